"""Streamed answers of a server with the OpenAI API, their times, and what it drafted for them."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

from forerun.client.client import Client, ServerAnswer
from forerun.client.connection import ClientConfig
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.measure.prompt_files import Message
from forerun.measure.request_fields import sampling_fields
from forerun.sampling.config import SamplingParams

_METRICS_S = 10.0
_VERSIONS = (("/version", "version"), ("/props", "build_info"), ("/server_info", "version"))
"""Pages that tell a version, and its field there."""

Prompt: TypeAlias = str | tuple[Message, ...]
"""A text to continue as it is, or a conversation, which the server renders with its template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """Times and counts of one answer; of its text, what tells it from another.

    Attributes:
        digest: of the text, reasoning included; see `digest_text`.
        ttft_s: seconds to the first token; None if no event has text or ids.
        num_tokens: as the server counts them, or else the ids that it returned.
        num_drafts: steps that drafted for it; None, as the next two, where the server counts
            nothing per answer. llama.cpp does not tell steps that did not draft apart.
        num_drafted: draft tokens.
        num_accepted: of them.
    """

    digest: str
    ttft_s: float | None
    total_s: float
    num_tokens: int
    finish_reason: str | None = None
    num_drafts: int | None = None
    num_drafted: int | None = None
    num_accepted: int | None = None


def digest_text(text: str) -> str:
    """Return 16 hexadecimal digits that tell a text from others."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


class MeasuredServer:
    """A server that is asked for streamed answers; several threads may use it at once.

    Args:
        config: without a model, the first one that the server lists is taken; `timeout_s` is how
            long it may send no event before it counts as hung.
        extra: further fields of every request, such as {"speculation": "off"}.
        transport: carries the requests, for tests; None takes the network.

    Raises:
        InvalidRequest: the server refuses the API key, or does not serve the model.
        ServerUnavailable: the server cannot be reached, or does not list its models.
    """

    def __init__(
        self,
        config: ClientConfig,
        *,
        extra: Mapping[str, object] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.client = Client(config, transport)
        self.extra = dict(extra or {})
        try:
            card = self.client.find_model()
        except BaseException:
            self.client.close()
            raise
        self.model, self._owner = card.id, card.owned_by

    def __enter__(self) -> MeasuredServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server, which ends the requests that still run."""
        self.client.close()

    def read_metrics(self) -> str | None:
        """Return the server's metrics page; None if it has none."""
        return self._read_page("/metrics")

    def read_version(self) -> str | None:
        """Return the version of the server's engine; None if it does not tell.

        forerun and vLLM have a page for it, llama.cpp and SGLang a field of another page.
        """
        for path, field in _VERSIONS:
            try:
                answer = json.loads(self._read_page(path) or "null")
            except (ValueError, RecursionError):
                continue
            if isinstance(answer, dict) and isinstance(found := answer.get(field), str):
                return found[:100]
        return None

    def _read_page(self, path: str) -> str | None:
        url = self.client.config.base.removesuffix("/v1") + path
        try:
            return self.client.connection.get(url, _METRICS_S).decode("utf-8", "replace")
        except (InvalidRequest, ServerUnavailable):
            return None

    def can_chat(self) -> bool:
        """Return whether the server answers conversations; a base model has no template for them.

        Raises ServerUnavailable as `ask`.
        """
        try:
            self.client.chat(
                [{"role": "user", "content": "Hi"}], {"model": self.model, "max_tokens": 1}
            )
        except InvalidRequest:
            return False
        return True

    def ask(self, prompt: Prompt | Sequence[int], params: SamplingParams) -> TimedAnswer:
        """Return the answer to a text, to token ids or to a conversation.

        Its times include retries.

        Raises:
            InvalidRequest: the server refuses the request, or a parameter has no name in its API.
            ServerUnavailable: the server fails, hangs, breaks off its answer or sends no token.
        """
        fields = {"model": self.model, **sampling_fields(params, self._owner), **self.extra}
        events = list[ServerAnswer]()
        ttft_s: float | None = None
        started_s = time.monotonic()
        with closing(self.client.stream(prompt, fields, seed=params.seed)) as pieces:
            for piece in pieces:
                if ttft_s is None and (piece.text or piece.reasoning or piece.token_ids):
                    ttft_s = time.monotonic() - started_s
                events.append(piece)
        total_s = time.monotonic() - started_s
        text = "".join((event.reasoning or "") + (event.text or "") for event in events)
        counted = [e.usage.completion_tokens for e in events if e.usage is not None]
        num_ids = sum(len(event.token_ids or ()) for event in events)
        num_tokens = next((n for n in reversed(counted) if n), num_ids)
        name = shown_url(self.client.config.base)
        if text and not num_tokens:
            raise ServerUnavailable(
                f"{name} sends text without its number of tokens (usage.completion_tokens), from "
                "which the time per token is computed"
            )
        reasons = [event.finish_reason for event in events if event.finish_reason]
        if not num_tokens or (ttft_s is None and not reasons):
            raise ServerUnavailable(f"{name} ends its answer without a token")
        if num_tokens > (params.max_tokens or num_tokens):
            raise ServerUnavailable(
                f"{name} counts {num_tokens} tokens in an answer of at most {params.max_tokens}"
            )
        num_drafts, num_drafted, num_accepted = _count_drafting(events)
        return TimedAnswer(
            digest=digest_text(text),
            ttft_s=ttft_s,
            total_s=total_s,
            num_tokens=num_tokens,
            finish_reason=reasons[-1] if reasons else None,
            num_drafts=num_drafts,
            num_drafted=num_drafted,
            num_accepted=num_accepted,
        )


def _count_drafting(events: Sequence[ServerAnswer]) -> tuple[int | None, int | None, int | None]:
    """Return steps that drafted, draft tokens and accepted ones, of forerun or of llama.cpp."""
    for event in reversed(events):
        if event.usage is not None and event.usage.speculative_decoding is not None:
            counts = event.usage.speculative_decoding
            return counts.num_steps, counts.num_drafted, counts.num_accepted
        if event.timings is not None and event.timings.draft_n:
            accepted = event.timings.draft_n_accepted
            num_steps = max(1, event.timings.predicted_n - accepted)
            return num_steps, event.timings.draft_n, accepted
    return None, None, None
