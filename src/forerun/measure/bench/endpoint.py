"""Streamed completions of a server with the OpenAI API, and their times, for load tests."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from forerun.client.client import Client
from forerun.client.connection import ClientConfig
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.sampling.config import SamplingParams

_EXTENSIONS = (
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "allowed_token_ids",
)
"""Parameters that are sent only if they are set: some servers accept only the first two."""
_DEFAULTS = SamplingParams()
_UNFILTERED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
NEUTRAL_FIELDS: Mapping[str | None, Mapping[str, object]] = {
    "llamacpp": {
        "top_k": 0,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "repeat_last_n": 1 << 16,
        "samplers": ["penalties", "temperature", "min_p", "top_k", "top_p"],
    },
    "forerun": _UNFILTERED,
    "vllm": _UNFILTERED,
    "sglang": _UNFILTERED,
}
"""Request fields, by kind of server, that switch off its default filters and penalties.

llama.cpp has top_k 40 and min_p .05, and filters before it divides by the temperature unless a
request orders its samplers; the others take defaults from the model's generation_config.json.
"""


def sampling_fields(params: SamplingParams, owner: str | None) -> dict[str, object]:
    """Return sampling parameters under the names of the OpenAI API and vLLM, without the seed.

    Args:
        owner: the kind of server (`ModelCard.owned_by`). What is off in the parameters is sent to
            the kinds that have defaults of their own, and left out for others, which may not know
            it.

    Raises:
        InvalidRequest: no protocol has a parameter, or the output has no limit.
    """
    if params.max_tokens is None:
        raise InvalidRequest("max_tokens is not set; servers then stop after 16 tokens: set it")
    if params.bad_token_ids:
        raise InvalidRequest("bad_token_ids cannot be asked of a server; use logit_bias")
    fields: dict[str, object] = {**NEUTRAL_FIELDS.get(owner, {})}
    for name in ("temperature", "top_p", "max_tokens"):
        fields[name] = getattr(params, name)
    if params.stop:
        fields["stop"] = list(params.stop)
    if params.logit_bias:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    for name in _EXTENSIONS:
        value = getattr(params, name)
        if value != getattr(_DEFAULTS, name):
            fields[name] = list(value) if isinstance(value, tuple) else value
    if owner == "llamacpp":
        fields["repeat_penalty"] = params.repetition_penalty  # its name for it
    return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """The text of one answer, with its times and number of tokens.

    Attributes:
        ttft_s: seconds to the first token; None without a token.
        num_tokens: as the server counts them, or else the ids that it returned.
    """

    text: str
    ttft_s: float | None
    total_s: float
    num_tokens: int


class MeasuredServer:
    """A server that is asked for streamed completions; several threads may use it at once.

    Args:
        config: without a model, the first one that the server lists is taken.
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

    @property
    def waits_s(self) -> list[float]:
        """Seconds waited before every retry of a request."""
        return self.client.connection.waits_s

    def ask(self, prompt: str | Sequence[int], params: SamplingParams) -> TimedAnswer:
        """Return the continuation of a prompt; its times include retries.

        Raises:
            InvalidRequest: the server refuses the request, or a parameter has no name in its API.
            ServerUnavailable: the server fails, or breaks off its answer.
        """
        fields = {"model": self.model, **sampling_fields(params, self._owner), **self.extra}
        text, num_ids, has_answer = "", 0, False
        num_counted: int | None = None
        ttft_s: float | None = None
        started_s = time.monotonic()
        with closing(self.client.stream(prompt, fields, seed=params.seed)) as pieces:
            for piece in pieces:
                if ttft_s is None and (piece.text or piece.token_ids):
                    ttft_s = time.monotonic() - started_s
                text += piece.text or ""
                num_ids += len(piece.token_ids or ())
                has_answer |= bool(piece.text or piece.token_ids or piece.finish_reason)
                if piece.usage is not None:
                    num_counted = piece.usage.completion_tokens
        total_s = time.monotonic() - started_s
        num_tokens, name = num_counted or num_ids, shown_url(self.client.config.base)
        if not has_answer:
            raise ServerUnavailable(f"{name} sends events without a completion (choices)")
        if text and not num_tokens:
            raise ServerUnavailable(
                f"{name} sends text without its number of tokens (usage.completion_tokens), from "
                "which the time per token is computed"
            )
        if num_tokens > (params.max_tokens or num_tokens):
            raise ServerUnavailable(
                f"{name} counts {num_tokens} tokens in an answer of at most {params.max_tokens}"
            )
        return TimedAnswer(text=text, ttft_s=ttft_s, total_s=total_s, num_tokens=num_tokens)
