"""Results of requests: text, tokens, the reason of the end, and counts of speculation."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.engine.stopping import FinishReason
from forerun.sampling.choice import TokenSource
from forerun.theory.acceptance import AcceptanceCounts

__all__ = ["Completion", "RequestOutput", "StreamChunk", "TokenLogprobs", "sample_key"]


def sample_key(request_id: str, index: int, num_samples: int) -> str:
    """Name of one sample for drafters and traces."""
    return request_id if num_samples == 1 else f"{request_id}/{index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Raw log-probabilities at one emitted token, before any processing.

    Attributes:
        token_id: the emitted token.
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
        index: sample index, 0 to n - 1.
        text: decoded output; a matched stop string is cut off unless the request keeps it.
        token_ids: emitted tokens, the end-of-sequence token included where it ended the text.
        finish_reason: "stop" (end-of-sequence, stop token or stop string), "length", "deadline" or
            "abort".
        stop_reason: the stop string or token id that matched, if one did.
        sources: provenance of every token.
        logprobs: one entry per token where logprobs were asked for.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request: its prompt and all its samples."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    completions: tuple[Completion, ...]

    @property
    def outputs(self) -> tuple[Completion, ...]:
        """The samples, by the name that vLLM uses."""
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
    """What one step added to one sample.

    Attributes:
        request_id: which request.
        index: which sample.
        text: new text (may be empty while a stop string or a character is incomplete).
        token_ids: new tokens.
        sources: provenance of the new tokens.
        finish_reason: set on the last chunk.
    """

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    sources: tuple[TokenSource, ...]
    finish_reason: FinishReason | None = None
