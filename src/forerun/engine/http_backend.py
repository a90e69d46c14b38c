"""Backend over HTTP for servers with the OpenAI API, through streamed completions."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from forerun.client.client import Client, ServerAnswer
from forerun.client.connection import ClientConfig
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.engine.results import (
    Completion,
    FinishReason,
    RequestOutput,
    StreamChunk,
)
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.sampling.config import SamplingParams, TokenSource
from forerun.terminal_text import printable
from forerun.theory.acceptance import AcceptanceCounts

_FINISH_REASONS: Mapping[str, FinishReason] = {"length": "length", "abort": "abort"}
"""Finish reasons of a server that are kept; any other, such as a tool call, becomes "stop"."""
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


@dataclass(slots=True, kw_only=True)
class _Arriving:
    """A request whose events are received."""

    started_s: float = field(default_factory=time.monotonic)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    first_s: float | None = None
    last: StreamChunk | None = None
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_counted: int | None = None

    def add(self, chunk: StreamChunk) -> None:
        if self.first_s is None and (chunk.text or chunk.token_ids):
            self.first_s = time.monotonic()
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        self.last = chunk

    def completion(self) -> Completion:
        """Return the finished sample; an incomplete one has the finish reason "abort"."""
        ttft_s = None if self.first_s is None else self.first_s - self.started_s
        last = self.last
        return Completion(
            index=0,
            text=self.text,
            token_ids=tuple(self.token_ids),
            finish_reason=(last.finish_reason if last is not None else None) or "abort",
            stop_reason=None if last is None else last.stop_reason,
            sources=tuple(self.sources),
            logprobs=None,
            acceptance=self.acceptance,
            ttft_s=ttft_s,
            prefill_s=ttft_s,
            total_s=time.monotonic() - self.started_s,
            num_cached_tokens=0,
            num_preemptions=0,
            num_counted=self.num_counted,
        )


class HttpBackend:
    """Generates text on a server, with the `Backend` interface that `Engine` has too.

    Token ids are those of the server where it returns them (vLLM, forerun); others only count
    them. One sample per prompt is asked for, without log-probabilities.

    Example:
        with HttpBackend("http://localhost:8000/v1") as backend:
            print(backend.generate(["def add(a, b):"], SamplingParams(max_tokens=20))[0].text)

    Args:
        server: address of the API, or all settings of the client.
        model: name of the model on the server; None takes the first one it lists.
        extra: further fields of every request, such as {"speculation": "off"}.
        transport: carries the requests, for tests; None takes the network.

    Raises:
        InvalidRequest: the server refuses the API key, or does not serve the model.
        ServerUnavailable: the server cannot be reached, or does not list its models.
    """

    def __init__(
        self,
        server: str | ClientConfig,
        model: str | None = None,
        *,
        extra: Mapping[str, object] | None = None,
        transport: Transport | None = None,
    ) -> None:
        config = ClientConfig(url=server) if isinstance(server, str) else server
        config = config if model is None else replace(config, model=model)
        self.client = Client(config, transport)
        self.extra = dict(extra or {})
        try:
            card = self.client.find_model()
        except BaseException:
            self.client.close()
            raise
        self.model, self._owner = card.id, card.owned_by
        self._numbers = itertools.count()

    def __enter__(self) -> HttpBackend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server; the backend cannot be used afterwards."""
        self.client.close()

    @property
    def waits_s(self) -> list[float]:
        """Seconds waited before every retry of a request."""
        return self.client.connection.waits_s

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, at most `max_connections` at once; return outputs in order.

        Raises:
            InvalidRequest: the server refuses a request, or a parameter has no name in its API.
            ServerUnavailable: the server fails, or breaks off an answer.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(batch)
        else:
            each = list(params)
        if len(each) != len(batch):
            raise InvalidRequest(f"{len(batch)} prompts and {len(each)} sampling parameters")
        for one in each:
            self._fields(one)  # refuses what no server takes, before any request is sent
        if len(batch) == 1:
            return [self._finish(batch[0], each[0])]
        most = self.client.config.max_connections
        with ThreadPoolExecutor(max(1, min(most, len(batch)))) as executor:
            return list(executor.map(self._finish, batch, each))

    def stream(
        self, prompt: str | Seq[int], params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt; closing the iterator closes the connection.

        Raises as `generate`.
        """
        yield from self._chunks(self._new_id(), _Arriving(), prompt, params or SamplingParams())

    def _fields(self, params: SamplingParams) -> dict[str, object]:
        if params.n != 1 or params.logprobs is not None:
            raise InvalidRequest("a server is asked for one sample without log-probabilities")
        return {"model": self.model, **sampling_fields(params, self._owner), **self.extra}

    def _new_id(self) -> str:
        return f"http-{next(self._numbers)}"

    def _finish(self, prompt: str | Seq[int], params: SamplingParams) -> RequestOutput:
        request_id, arriving = self._new_id(), _Arriving()
        for _ in self._chunks(request_id, arriving, prompt, params):
            pass
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=() if isinstance(prompt, str) else tuple(prompt),
            completions=(arriving.completion(),),
        )

    def _chunks(
        self, request_id: str, arriving: _Arriving, prompt: str | Seq[int], params: SamplingParams
    ) -> Iterator[StreamChunk]:
        arriving.started_s = time.monotonic()
        pieces = self.client.stream(prompt, self._fields(params), seed=params.seed)
        try:
            for piece in pieces:
                try:
                    chunk = _read(piece, arriving, request_id)
                except (OverflowError, ValueError) as error:
                    raise ServerUnavailable(
                        f"{shown_url(self.client.config.url)} sends an event that is no "
                        f"completion: {printable(error)}"
                    ) from error
                if chunk is not None:
                    arriving.add(chunk)
                    yield chunk
        finally:
            pieces.close()


def _read(piece: ServerAnswer, arriving: _Arriving, request_id: str) -> StreamChunk | None:
    """Return the chunk of an event, if it has one, and store its token counts."""
    if piece.usage is not None:
        arriving.num_counted = piece.usage.completion_tokens
        if piece.usage.speculative_decoding is not None:
            arriving.acceptance = piece.usage.speculative_decoding.acceptance
    reason = piece.finish_reason
    chunk = StreamChunk(
        request_id=request_id,
        index=0,
        text=piece.text or "",
        token_ids=piece.token_ids or (),
        sources=tuple(TokenSource(source) for source in piece.token_sources),
        finish_reason=None if reason is None else _FINISH_REASONS.get(reason, "stop"),
        stop_reason=piece.stop_reason,
    )
    return chunk if chunk.text or chunk.token_ids or reason else None
