"""Stop conditions: end-of-sequence and stop tokens, stop strings, and the length.

Tokens of an accepted block are checked one at a time, as plain decoding would do, so that a
stop inside the block drops what follows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from forerun.sampling.config import SamplingParams

__all__ = ["FinishReason", "Stop", "TokenStops", "find_stop_string", "held_back"]

FinishReason = Literal["stop", "length", "deadline", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Reason for the end of a sequence: finish reason, and the matched token or string."""

    finish_reason: FinishReason
    stop_reason: str | int | None = None


class TokenStops:
    """The stop conditions that depend on ids and counts alone."""

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int], max_new: int) -> None:
        self.eos = params.heeded_eos(eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids)
        self.max_new = max_new
        self.min_tokens = params.min_tokens

    def check(self, token: int, num_output: int) -> Stop | None:
        """Return the stop that `token`, the `num_output`-th output token, causes."""
        if num_output > self.min_tokens:
            if token in self.eos:
                return Stop(finish_reason="stop")
            if token in self.stop_ids:
                return Stop(finish_reason="stop", stop_reason=token)
        if num_output >= self.max_new:
            return Stop(finish_reason="length")
        return None


def find_stop_string(text: str, start: int, stops: tuple[str, ...]) -> tuple[int, str] | None:
    """Return position and text of the earliest stop string that ends after `start`.

    Args:
        text: output so far.
        start: length of the text already searched.
        stops: stop strings; on equal begin the longer one wins.

    Returns:
        None where there is none.
    """
    best: tuple[int, str] | None = None
    for stop in stops:
        begin = text.find(stop, max(0, start - len(stop) + 1))
        if begin < 0:
            continue
        if best is None or (begin, -len(stop)) < (best[0], -len(best[1])):
            best = (begin, stop)
    return best


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """Return how many characters at the end of `text` may be the start of a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
