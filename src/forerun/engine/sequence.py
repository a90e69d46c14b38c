"""Sequence: the committed state of one sample, with its token ids, text and counts."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.engine.results import (
    Completion,
    RequestOutput,
    Stop,
    StreamChunk,
    TokenLogprobs,
    TokenStops,
    find_stop_string,
    held_back,
    sample_key,
)
from forerun.models.base import Context
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.sampling.config import SamplingParams, TokenSource
from forerun.sampling.history import History
from forerun.theory.acceptance import AcceptanceCounts


@dataclass(slots=True, kw_only=True, eq=False)
class DraftState:
    """State of a sequence that concerns its drafter.

    Attributes:
        num_observed: rows of the target's cache that were reported to the drafter.
        paused_until: number of committed tokens from which `propose` is called again.
        observe_failed: the drafter once raised when an outcome was reported.
        failed: the drafter raised again; the sequence is decoded plainly.
    """

    request: DraftRequest | None = None
    num_observed: int = 0
    paused_until: int = 0
    observe_failed: bool = False
    failed: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Committed state of one sample of a request.

    `ids` (prompt, then output) is shared with the contexts of target and drafter; only `append`
    grows it.

    Attributes:
        rank: (priority, order of arrival); the lowest goes first.
        scope: sequences of one scope share what is computed from a common beginning; None: nothing.
        num_cached: prompt tokens whose KV was found when it first joined the batch.
        kv_invalid: its last pass failed, so its KV must not be shared with others.
    """

    request_id: str
    index: int
    params: SamplingParams
    ids: list[int]
    num_prompt: int
    noise_key: int
    stops: TokenStops
    detokenizer: Detokenizer
    history: History | None
    arrived_at_s: float
    context: Context | None = None
    sources: list[TokenSource] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    stop: Stop | None = None
    joined_at_s: float | None = None
    first_token_at_s: float | None = None
    finished_at_s: float | None = None
    draft: DraftState = field(default_factory=DraftState)
    rank: tuple[int, int] = (0, 0)
    scope: str | None = None
    ends_at_s: float = math.inf
    tags: tuple[str, ...] = ()
    plan: Plan | None = None
    num_cached: int = 0
    num_preemptions: int = 0
    kv_invalid: bool = False
    num_shown: int = 0
    num_streamed: int = 0
    num_searched: int = 0
    text_end: int | None = None
    key: str = field(init=False)

    def __post_init__(self) -> None:
        self.key = sample_key(self.request_id, self.index, self.params.n)

    @property
    def num_output(self) -> int:
        return len(self.ids) - self.num_prompt

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log-probability is asked for and not known; never of the first."""
        if self.params.prompt_logprobs is None or self.index:
            return 0
        return self.num_prompt - 1 - len(self.prompt_logprobs)

    @property
    def num_paused(self) -> int:
        """Number of tokens until the drafter is asked again; at most 0 if it may draft now."""
        return self.draft.paused_until - len(self.ids)

    @property
    def may_draft(self) -> bool:
        return self.num_paused <= 0

    @property
    def max_new(self) -> int:
        """Number of tokens that may still be emitted."""
        return self.stops.max_new - self.num_output

    @property
    def text(self) -> str:
        """The output text up to a matched stop string."""
        return self.detokenizer.text[: self.text_end]

    def append(self, tokens: tuple[int, ...], sources: tuple[TokenSource, ...]) -> int:
        """Append emitted tokens until one ends the sequence, and return how many were appended."""
        is_watched = self.history is not None or self.params.stop
        if not is_watched and self.stops.allows(tokens, self.num_output):
            self.ids += tokens
            self.sources += sources
            self.detokenizer.extend(tokens)
            return len(tokens)
        for taken, (token, source) in enumerate(zip(tokens, sources, strict=True), start=1):
            self.ids.append(token)
            self.sources.append(source)
            if self.history is not None:
                self.history.append(token)
            self.stop = self._check(token)
            if self.stop is not None:
                return taken
        return len(tokens)

    def _check(self, token: int) -> Stop | None:
        by_token = self.stops.check(token, self.num_output)
        ends = by_token is not None and by_token.finish_reason == "stop"
        if ends and not self.params.include_stop_str_in_output:
            return by_token  # the ending token itself is not part of the text
        self.detokenizer.append(token)
        if ends:
            return by_token
        if self.params.stop:
            text, start = self.detokenizer.text, self.num_searched
            self.num_searched = len(text)
            found = find_stop_string(text, start, self.params.stop)
            if found is not None and self.num_output > self.params.min_tokens:
                begin, stop = found
                kept = len(stop) if self.params.include_stop_str_in_output else 0
                self.text_end = begin + kept
                return Stop(finish_reason="stop", stop_reason=stop)
        return by_token

    def take_chunk(self) -> StreamChunk:
        """Return what is new since the last call, except a possible start of a stop string."""
        if self.stop is not None and self.text_end is None:
            self.detokenizer.finish()
        text = self.text
        end = len(text)
        if self.stop is None and not self.params.include_stop_str_in_output:
            end -= held_back(text, self.params.stop)
        end = max(end, self.num_shown)
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = tuple(self.logprobs[self.num_streamed :])
        chunk = StreamChunk(
            request_id=self.request_id,
            index=self.index,
            text=text[self.num_shown : end],
            token_ids=tuple(self.ids[self.num_prompt + self.num_streamed :]),
            sources=tuple(self.sources[self.num_streamed :]),
            finish_reason=self.stop.finish_reason if self.stop else None,
            stop_reason=self.stop.stop_reason if self.stop else None,
            logprobs=logprobs,
        )
        self.num_shown, self.num_streamed = end, self.num_output
        return chunk

    def completion(self, tokenizer: Tokenizer) -> Completion:
        """Return the result of the finished sample."""
        assert self.stop is not None
        assert self.finished_at_s is not None
        first_s, joined_s = self.first_token_at_s, self.joined_at_s
        return Completion(
            index=self.index,
            text=self.text,
            token_ids=tuple(self.ids[self.num_prompt :]),
            finish_reason=self.stop.finish_reason,
            stop_reason=self.stop.stop_reason,
            sources=tuple(self.sources),
            logprobs=_readable(self.logprobs, tokenizer, self.params.logprobs),
            acceptance=self.acceptance,
            ttft_s=None if first_s is None else max(0.0, first_s - self.arrived_at_s),
            prefill_s=None if first_s is None or joined_s is None else max(0.0, first_s - joined_s),
            total_s=max(0.0, self.finished_at_s - self.arrived_at_s),
            num_cached_tokens=self.num_cached,
            num_preemptions=self.num_preemptions,
        )


def _readable(
    entries: Seq[TokenLogprobs], tokenizer: Tokenizer, asked: int | None
) -> tuple[TokenLogprobs, ...] | None:
    """Return log-probabilities with token texts; None if the request did not ask for them."""
    if asked is None:
        return None

    def text_of(token: int) -> str:
        return tokenizer.token_bytes(token).decode("utf-8", "replace")

    return tuple(
        replace(
            entry,
            token=text_of(entry.token_id),
            top_tokens=tuple(text_of(token) for token, _ in entry.top),
        )
        for entry in entries
    )


def output_of(samples: list[Sequence], tokenizer: Tokenizer) -> RequestOutput:
    """Return the output of a request after all of its samples have ended."""
    first = samples[0]
    return RequestOutput(
        request_id=first.request_id,
        prompt_token_ids=tuple(first.ids[: first.num_prompt]),
        completions=tuple(sample.completion(tokenizer) for sample in samples),
        prompt_logprobs=_readable(first.prompt_logprobs, tokenizer, first.params.prompt_logprobs),
    )
