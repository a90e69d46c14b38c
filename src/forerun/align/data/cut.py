"""Samples cut to the width of a packed row."""

from __future__ import annotations

from dataclasses import replace

from forerun.align.data.sample import Sample, TopLogprobs

__all__ = ["cut"]


def cut(sample: Sample, window: int) -> Sample:
    """The sample in at most `window` tokens, of which as many as sensible are learned.

    What follows the last learned token teaches nothing and goes first. Then the beginning goes, as
    far as it has to for all learned tokens to stay, but never so far that fewer than half a window
    of tokens stand before the first of them (or all there are). Then the end goes.

    Args:
        sample: with at least one learned token.
        window: most tokens, at least 2.
    """
    first, last = sample.spans[0][0], sample.spans[-1][1]
    start = max(min(last - window, first - window // 2), 0)
    end = min(last, start + window)
    if start == 0 and end == len(sample.token_ids):
        return sample
    kept = [(max(a, start), min(b, end)) for a, b in sample.spans]
    return replace(
        sample,
        token_ids=sample.token_ids[start:end],
        spans=tuple((a - start, b - start) for a, b in kept if a < b),
        top_logprobs=None if sample.top_logprobs is None else kept_logprobs(sample, start, end),
    )


def kept_logprobs(sample: Sample, start: int, end: int) -> TopLogprobs:
    """Of the learned tokens from `start` to before `end`."""
    learned = (index for a, b in sample.spans for index in range(a, b))
    assert sample.top_logprobs is not None
    pairs = zip(learned, sample.top_logprobs, strict=True)
    return tuple(top for index, top in pairs if start <= index < end)
