"""Backend over HTTP for servers with the OpenAI API, through streamed completions."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from forerun.engine.endpoint import (
    BrokenReply,
    Endpoint,
    check_encoding,
    check_status,
    client_for,
    parsed,
    read_whole,
    sampling_fields,
)
from forerun.engine.results import (
    BackendStats,
    Capabilities,
    Completion,
    FinishReason,
    RequestOutput,
    StreamChunk,
)
from forerun.errors import InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams, TokenSource
from forerun.terminal_text import printable
from forerun.theory.acceptance import AcceptanceCounts

MAX_CONCURRENT = 64
SEED_MASK = (1 << 31) - 1
"""Seeds that every server takes."""
TIMEOUT_S = 600.0
LISTING_TIMEOUT_S = 30.0
FINISH_REASONS: Mapping[str, FinishReason] = {"length": "length", "abort": "abort"}
"""Every other one, such as that of a tool call, is an end by the model: "stop"."""


@dataclass(slots=True, kw_only=True)
class Arriving:
    """One sample of a request while its events are received.

    Attributes:
        started_s: when its request was posted.
        acceptance: of the whole request, from the server's usage.
        num_prompt_tokens: prompt length, by the server's count.
        num_tokens: output tokens, by the server's count; None before the end.
    """

    started_s: float
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    sources: list[TokenSource] = field(default_factory=list)
    first_s: float | None = None
    last: StreamChunk | None = None
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_prompt_tokens: int = 0
    num_tokens: int | None = None

    def add(self, chunk: StreamChunk, now_s: float) -> None:
        """Append a chunk."""
        if self.first_s is None and (chunk.text or chunk.token_ids):
            self.first_s = now_s
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.sources += chunk.sources
        self.last = chunk

    def completion(self, ended_s: float) -> Completion:
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
            total_s=ended_s - self.started_s,
            num_cached_tokens=0,
            num_preemptions=0,
            num_counted=self.num_tokens,
        )


class HttpBackend:
    """Generates text on a server, with the `Backend` interface that `Engine` has too.

    Token ids are those of the server where it returns them (vLLM, forerun), and otherwise those
    that the tokenizer makes of the text. One sample per prompt is asked for, without
    log-probabilities.

    Example:
        with HttpBackend("http://localhost:8000/v1") as backend:
            print(backend.generate(["def add(a, b):"], SamplingParams(max_tokens=20))[0].text)

    Args:
        url: of the API, with or without /v1.
        model: name of the model on the server; None takes the first one it lists.
        tokenizer: of the model, for servers that return no token ids.
        extra: further fields of every request, such as {"speculation": "off"}.
        client: carries the requests; None makes one.

    Raises:
        InvalidRequest: the server refuses the API key, or does not serve the model.
        ServerUnavailable: the server cannot be reached, or does not list its models.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        extra: Mapping[str, object] | None = None,
        client: httpx.Client | None = None,
    ) -> None:
        base = url.rstrip("/")
        self.base = base if base.endswith("/v1") else base + "/v1"
        self.client = client or client_for(TIMEOUT_S, MAX_CONCURRENT)
        self.endpoint = Endpoint(url=self.base + "/completions", client=self.client)
        self.tokenizer = tokenizer
        self.extra = dict(extra or {})
        try:
            card = self._card(model)
        except BaseException:
            self.client.close()
            raise
        self.model: str = card["id"]
        self._capabilities = _capabilities_of(card)
        self._lock = threading.Lock()
        self._num_requests = 0
        self._ended: dict[str, threading.Event] = {}
        self._arriving: dict[str, Arriving] = {}
        self._num_emitted = 0
        self._acceptance = AcceptanceCounts()

    def __enter__(self) -> HttpBackend:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections to the server; the backend cannot be used afterwards."""
        self.endpoint.closing.set()
        self.client.close()

    def _card(self, model: str | None) -> dict[str, Any]:
        """Return the server's description of the model."""
        url = self.base + "/models"
        try:
            with self.client.stream("GET", url, timeout=LISTING_TIMEOUT_S) as reply:
                check_encoding(reply, url)
                read_whole(reply, url, LISTING_TIMEOUT_S)
            check_status(reply, url, "the list of models")
            listed = parsed(reply)["data"]
            cards = [card for card in listed if model is None or card["id"] == model]
            names = ", ".join(str(card["id"]) for card in listed)
        except InvalidRequest:
            raise
        except (httpx.TransportError, httpx.InvalidURL) as error:
            problem = printable(error) or type(error).__name__
            raise ServerUnavailable(f"{self.base} cannot be reached: {problem}") from error
        except (UnreadableInput, BrokenReply, KeyError, TypeError, ValueError) as error:
            problem = printable(error) or type(error).__name__
            raise ServerUnavailable(f"{url} lists no models: {problem}") from error
        if not cards:
            raise InvalidRequest(
                f"{self.base} does not serve {model!r}; it serves {printable(names) or 'nothing'}"
            )
        return dict(cards[0])

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts, at most 64 at once, and return one output per prompt, in order.

        Raises:
            InvalidRequest: the server refuses a request, or a parameter has no name in its API.
            ServerUnavailable: the server fails, or breaks off an answer.
        """
        batch = [prompts] if isinstance(prompts, str) else list(prompts)
        if params is None or isinstance(params, SamplingParams):
            each = [params or SamplingParams()] * len(batch)
        else:
            each = list(params)
        bodies = [self._body(*pair) for pair in zip(batch, each, strict=True)]
        if len(batch) == 1:
            return [self._finish(batch[0], bodies[0])]
        with ThreadPoolExecutor(max(1, min(MAX_CONCURRENT, len(batch)))) as executor:
            return list(executor.map(self._finish, batch, bodies))

    def stream(
        self, prompt: str | Seq[int], params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt; closing the iterator closes the connection.

        Raises:
            InvalidRequest: as `generate`.
            ServerUnavailable: as `generate`.
        """
        request_id = self._begin()
        try:
            yield from self._chunks(request_id, self._body(prompt, params or SamplingParams()))
        finally:
            self._end(request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request at its next event and return its output; None if its id is unknown."""
        with self._lock:
            ended, arriving = self._ended.get(request_id), self._arriving.get(request_id)
        if ended is None or arriving is None:
            return None
        ended.set()
        return RequestOutput(
            request_id=request_id,
            prompt_token_ids=(),
            completions=(arriving.completion(time.monotonic()),),
        )

    def stats(self) -> BackendStats:
        """Return counts of this client's requests, including running ones."""
        with self._lock:
            counts = self._acceptance
            return BackendStats(
                num_running=len(self._arriving),
                num_waiting=0,
                num_steps=counts.num_steps,
                num_drafted=counts.num_drafted,
                num_accepted=counts.num_accepted,
                num_emitted=self._num_emitted,
            )

    def capabilities(self) -> Capabilities:
        """Return the features and limits that the server reports."""
        return self._capabilities

    def _body(self, prompt: str | Seq[int], params: SamplingParams) -> dict[str, object]:
        if params.n != 1 or params.logprobs is not None:
            raise InvalidRequest("a server is asked for one sample without log-probabilities")
        body: dict[str, object] = {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **sampling_fields(params),
            **self.extra,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body if params.seed is None else {**body, "seed": params.seed & SEED_MASK}

    def _begin(self) -> str:
        with self._lock:
            request_id = f"http-{self._num_requests}"
            self._num_requests += 1
            self._ended[request_id] = threading.Event()
            self._arriving[request_id] = Arriving(started_s=time.monotonic())
        return request_id

    def _end(self, request_id: str) -> None:
        with self._lock:
            del self._ended[request_id]
            arriving = self._arriving.pop(request_id)
            self._num_emitted += (
                len(arriving.token_ids) if arriving.num_tokens is None else arriving.num_tokens
            )
            self._acceptance += arriving.acceptance

    def _finish(self, prompt: str | Seq[int], body: Mapping[str, object]) -> RequestOutput:
        request_id = self._begin()
        try:
            for _ in self._chunks(request_id, body):
                pass
            arriving = self._arriving[request_id]
            if not arriving.token_ids and self.tokenizer is not None:
                arriving.token_ids = self.tokenizer.encode(arriving.text, add_special_tokens=False)
            return RequestOutput(
                request_id=request_id,
                prompt_token_ids=self._prompt_ids(prompt),
                completions=(arriving.completion(time.monotonic()),),
            )
        finally:
            self._end(request_id)

    def _prompt_ids(self, prompt: str | Seq[int]) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            return tuple(prompt)
        return () if self.tokenizer is None else tuple(self.tokenizer.encode(prompt))

    def _chunks(self, request_id: str, body: Mapping[str, object]) -> Iterator[StreamChunk]:
        arriving, ended = self._arriving[request_id], self._ended[request_id]
        arriving.started_s = time.monotonic()
        events = self.endpoint.events(body)
        try:
            for event in events:
                if ended.is_set():
                    return
                for chunk in self._read(event, arriving, request_id):
                    arriving.add(chunk, time.monotonic())
                    yield chunk
        finally:
            events.close()

    def _read(
        self, event: Mapping[str, Any], arriving: Arriving, request_id: str
    ) -> list[StreamChunk]:
        """Return the chunks of an event, and store the token counts of its `usage` object."""
        try:
            if event.get("usage"):
                _note_usage(event["usage"], arriving)
            return [chunk_of(choice, request_id) for choice in event.get("choices") or ()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerUnavailable(
                f"{self.endpoint.url} sends an event that is no completion: {printable(error)}"
            ) from error


def _capabilities_of(card: Mapping[str, Any]) -> Capabilities:
    """Return the features that the server's entry in `/v1/models` names."""
    length = card.get("max_model_len")
    methods = card.get("drafters")
    return Capabilities(
        max_context=length if isinstance(length, int) else 0,
        max_batch=MAX_CONCURRENT,
        methods=tuple(map(str, methods)) if isinstance(methods, list) else (),
        logprobs=False,
    )


def chunk_of(choice: Mapping[str, Any], request_id: str) -> StreamChunk:
    """Return the chunk in one choice of an event."""
    ended = choice.get("finish_reason")
    return StreamChunk(
        request_id=request_id,
        index=int(choice.get("index", 0)),
        text=str(choice.get("text") or ""),
        token_ids=tuple(int(token) for token in choice.get("token_ids") or ()),
        sources=tuple(TokenSource(source) for source in choice.get("token_sources") or ()),
        finish_reason=None if ended is None else FINISH_REASONS.get(str(ended), "stop"),
        stop_reason=choice.get("stop_reason"),
    )


def _note_usage(usage: Mapping[str, Any], arriving: Arriving) -> None:
    """Store the token counts of a response's `usage` object."""
    arriving.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
    tokens = usage.get("completion_tokens")
    arriving.num_tokens = None if tokens is None else int(tokens)
    if found := usage.get("speculative_decoding"):
        arriving.acceptance = counts_of(found)


def counts_of(figures: Mapping[str, Any]) -> AcceptanceCounts:
    """Return acceptance counts that reproduce the figures per position of a forerun server.

    A server reports how many steps drafted and accepted each position, and not both together. The
    steps that drafted most are taken for those that accepted most, which leaves tau and every rate
    per position as they are; with a fixed K nothing else is possible.
    """
    drafted = [int(n) for n in figures.get("drafted_per_position") or ()]
    rates = figures.get("acceptance_rate_per_position") or ()
    accepted = [round(rate * n) for rate, n in zip(rates, drafted, strict=True)]
    counts = AcceptanceCounts()
    for step in range(int(figures["num_steps"])):
        depth = sum(step < n for n in drafted)
        counts.steps[depth, min(depth, sum(step < n for n in accepted))] += 1
    counts.steps[0, 0] += int(figures.get("num_plain_steps") or 0)
    counts.num_drafted = int(figures["num_drafted"])
    counts.steps = +counts.steps  # without an entry of zero plain steps
    return counts
