"""Results of requests, their stop conditions, and the interface of what generates them.

Tokens of an accepted block are checked one at a time, as plain decoding would do, so that a
stop inside the block drops what follows it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, fields
from typing import Literal, Protocol, runtime_checkable

from forerun.sampling.config import SamplingParams, TokenSource
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import Json, RequestRecord

FinishReason = Literal["stop", "length", "deadline", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The reason that a sequence ended, and the stop token or string that matched."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


class TokenStops:
    """Stop conditions that depend on token ids and counts only."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], max_new: int) -> None:
        self.eos = params.heeded_eos(eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids)
        self.ends = self.eos | self.stop_ids
        self.max_new = max_new
        self.min_tokens = params.min_tokens

    def allows(self, tokens: Seq[int], num_output: int) -> bool:
        """Whether none of these tokens, after `num_output` others, can cause a stop."""
        return num_output + len(tokens) < self.max_new and self.ends.isdisjoint(tokens)

    def check(self, token: int, num_output: int) -> Stop | None:
        """Return the stop that output token number `num_output` causes; None if it causes none."""
        if num_output > self.min_tokens:
            if token in self.eos:
                return Stop(finish_reason="stop")
            if token in self.stop_ids:
                return Stop(finish_reason="stop", stop_reason=token)
        if num_output >= self.max_new:
            return Stop(finish_reason="length")
        return None


def find_stop_string(text: str, start: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return position and text of the earliest stop string that ends after `start`."""
    best: tuple[int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, start - len(stop) + 1))
        if begin < 0:
            continue
        if best is None or (begin, -len(stop)) < (best[0], -len(best[1])):
            best = (begin, stop)
    return best


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` could be the start of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest


def sample_key(request_id: str, index: int, num_samples: int) -> str:
    return request_id if num_samples == 1 else f"{request_id}/{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities at one emitted token, before any sampling parameter is applied.

    Attributes:
        logprob: its natural-log probability.
        top: the most likely tokens with their log-probabilities, best first.
        token: text of the emitted token alone; bytes of an unfinished character read as U+FFFD.
        top_tokens: the same of the most likely tokens.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    token: str = ""
    top_tokens: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One finished sample of a request.

    Attributes:
        text: decoded output; a matched stop string is cut off unless the request keeps it.
        token_ids: emitted tokens, the end-of-sequence token included where it ended the text.
        finish_reason: "stop" (end-of-sequence, stop token or stop string), "length", "deadline" or
            "abort".
        stop_reason: the stop string or token id that matched, if one did.
        sources: provenance of every token.
        acceptance: counts from which tau and the per-position figures follow.
        ttft_s: seconds from arrival to the first token, waiting included; None without a token.
        prefill_s: seconds from joining the batch to the first token; None without a token.
        total_s: seconds from arrival to the end.
        num_cached_tokens: prompt tokens whose KV was found in the cache.
        num_preemptions: how often it had to give up its place in the batch for a while.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    sources: tuple[TokenSource, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    acceptance: AcceptanceCounts
    ttft_s: float | None
    prefill_s: float | None
    total_s: float
    num_cached_tokens: int
    num_preemptions: int

    @property
    def num_tokens(self) -> int:
        """Number of emitted tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request: its prompt and all its samples.

    Attributes:
        prompt_logprobs: one entry per prompt token from the second on, where they were asked for;
            fewer if the request ended before its prompt was read.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The samples, under the name that vLLM uses."""
        return self.completions

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of the first sample."""
        return self.completions[0].token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """Text and tokens that one step added to one sample.

    Attributes:
        text: new text (may be empty while a stop string or a character is incomplete).
        stop_reason: on the last chunk the stop string or token id that matched, if one did.
        logprobs: one entry per new token where logprobs were asked for, without the texts.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None


def request_records(
    output: RequestOutput,
    params: SamplingParams,
    tags: tuple[str, ...] = (),
    *,
    with_tokens: bool = False,
) -> list[RequestRecord]:
    """Return one trace record per sample of a finished request.

    `with_tokens` keeps the ids of its prompt.
    """
    parameters = {item.name: plain(getattr(params, item.name)) for item in fields(params)}
    return [
        RequestRecord(
            request_id=sample_key(output.request_id, completion.index, params.n),
            parameters=parameters,
            tags=tags,
            num_prompt_tokens=len(output.prompt_token_ids),
            num_output_tokens=len(completion.token_ids),
            ttft_s=completion.ttft_s,
            prefill_s=completion.prefill_s,
            finish_reason=completion.finish_reason,
            prompt_token_ids=output.prompt_token_ids if with_tokens else None,
        )
        for completion in output.completions
    ]


def plain(value: object) -> Json:
    """Convert the value of a parameter to a JSON value."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, Collection):
        return [plain(entry) for entry in value]
    return str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counts of a backend since it was created.

    Attributes:
        num_steps: target passes.
        num_drafted: draft nodes that were verified.
        num_accepted: of these, accepted.
        num_emitted: output tokens.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features and limits of a backend.

    Attributes:
        max_context: prompt plus output tokens of one sequence.
        methods: names of its drafters; empty where it decodes plainly.
    """

    max_context: int
    max_batch: int
    methods: tuple[str, ...] = ()


@runtime_checkable
class Backend(Protocol):
    """Interface for text generation, which `Engine` has."""

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        /,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return one output per prompt, in order."""

    def stream(
        self, prompt: str | Seq[int], sampling_params: SamplingParams | None = None, /
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt; closing the iterator aborts the request."""
