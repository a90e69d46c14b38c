"""Histories of a few steps with their probabilities, the noise kept symbolic.

Every distinct noise key is an independent uniform. What a history has decided confines the uniform
of each key to an interval: `u < a` cuts it at a, an inverse-CDF draw at the running sums. A key
that comes back is still confined to what it decided before, so noise used twice shows as a biased
output distribution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

__all__ = ["Histories", "Inexact"]

Interval = tuple[Tensor, Tensor]


class Inexact(Exception):
    """Raised where a verifier lacks a property that its exactness depends on."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histories:
    """Possible histories of noise and committed tokens, with their probabilities, per model pair.

    Children of one history are consecutive, so an interval recorded for the ancestors of these
    histories applies to equal runs of them.

    Attributes:
        weights: probability of each history under each pair.
        prefixes: the tokens each history committed (see `pairs` for the numbering).
        length: how many tokens that is.
        intervals: by key, where its uniform lies: lower and upper ends, (pairs, ancestors).
    """

    weights: Float64[Tensor, "pairs histories"]
    prefixes: Int64[Tensor, " histories"]
    length: int
    intervals: Mapping[int, Interval]

    @classmethod
    def begin(cls, num_pairs: int) -> Histories:
        """Return the single history before the first draw."""
        return cls(
            weights=torch.ones(num_pairs, 1, dtype=torch.float64),
            prefixes=torch.zeros(1, dtype=torch.int64),
            length=0,
            intervals={},
        )

    def interval(self, key: int) -> Interval:
        """Return the interval of the uniform of `key` in each history; [0, 1) for a new key."""
        if key not in self.intervals:
            return torch.zeros_like(self.weights), torch.ones_like(self.weights)
        low, high = self.intervals[key]
        run = self.weights.shape[1] // low.shape[1]
        return low.repeat_interleave(run, 1), high.repeat_interleave(run, 1)

    def masked(self, kept: Tensor) -> Histories:
        """Return the same histories with weight 0 for those that are not `kept`."""
        return replace(self, weights=self.weights * kept)

    def compare(
        self, key: int, threshold: Float64[Tensor, "pairs histories"], passed: bool
    ) -> Histories:
        """Return the histories for the outcome `passed` of the test `u < threshold`."""
        low, high = self.interval(key)
        inside = (low, high.minimum(threshold)) if passed else (low.maximum(threshold), high)
        return replace(
            self,
            weights=self.weights * _share(inside, (low, high)),
            intervals={**self.intervals, key: inside},
        )

    def draw(self, key: int, weights: Float64[Tensor, "pairs histories vocab"]) -> Histories:
        """Return every history once per token that an inverse-CDF draw can give."""
        vocab_size = weights.shape[-1]
        sums = weights.cumsum(-1)
        ends = sums / sums[..., -1:]
        starts = torch.cat([torch.zeros_like(ends[..., :1]), ends[..., :-1]], -1)
        low, high = (bound[..., None] for bound in self.interval(key))
        inside = (starts.maximum(low), ends.minimum(high))
        shares = _share(inside, (low, high))
        return replace(
            self,
            weights=(self.weights[..., None] * shares).flatten(1),
            prefixes=self.prefixes.repeat_interleave(vocab_size),
            intervals={**self.intervals, key: (inside[0].flatten(1), inside[1].flatten(1))},
        )

    def commit(self, tokens: Int64[Tensor, "histories tokens"], vocab_size: int) -> Histories:
        """Append tokens to the committed text of each history."""
        prefixes = self.prefixes
        for column in tokens.unbind(1):
            prefixes = prefixes * vocab_size + column
        return replace(self, prefixes=prefixes, length=self.length + tokens.shape[1])

    def mass(self, num_texts: int) -> Float64[Tensor, "pairs texts"]:
        """Return the probability of each committed text."""
        total = torch.zeros(len(self.weights), num_texts, dtype=torch.float64)
        return total.index_add_(1, self.prefixes, self.weights)


def _share(inside: Interval, whole: Interval) -> Tensor:
    """Probability of one interval within another; 0 in an empty one, whose history has weight 0."""
    width = (inside[1] - inside[0]).clamp(min=0)
    total = whole[1] - whole[0]
    return torch.where(total > 0, width / total, 0.0)
