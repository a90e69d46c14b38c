"""Random and structured pairs of target and draft distributions over a tiny vocabulary.

A prefix is the integer its tokens spell in base `vocab_size`, first token first; level l of a table
holds one row per prefix of length l. All tables are fp64 and carry a leading axis of pairs,
enumerated at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

Interval = tuple[Tensor, Tensor]


class Inexact(Exception):
    """Raised if a verifier lacks a property that its exactness requires."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Histories:
    """Possible histories of noise and committed tokens with their probabilities, per model pair.

    Children of one history are consecutive, so an interval recorded for the ancestors of these
    histories applies to equal runs of them.

    Attributes:
        prefixes: the tokens each history committed (see `pairs` for the numbering).
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
        """Return the interval of the uniform of `key` in each history; [0, 1) for an unused key."""
        if key not in self.intervals:
            return torch.zeros_like(self.weights), torch.ones_like(self.weights)
        low, high = self.intervals[key]
        run = self.weights.shape[1] // low.shape[1]
        return low.repeat_interleave(run, 1), high.repeat_interleave(run, 1)

    def masked(self, kept: Tensor) -> Histories:
        return replace(self, weights=self.weights * kept)

    def compare(
        self, key: int, threshold: Float64[Tensor, "pairs histories"], passed: bool
    ) -> Histories:
        low, high = self.interval(key)
        inside = (low, high.minimum(threshold)) if passed else (low.maximum(threshold), high)
        return replace(
            self,
            weights=self.weights * _share(inside, (low, high)),
            intervals={**self.intervals, key: inside},
        )

    def draw(self, key: int, weights: Float64[Tensor, "pairs histories vocab"]) -> Histories:
        """Split every history by the token that an inverse-CDF draw returns."""
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
        prefixes = self.prefixes
        for column in tokens.unbind(1):
            prefixes = prefixes * vocab_size + column
        return replace(self, prefixes=prefixes, length=self.length + tokens.shape[1])

    def mass(self, num_texts: int) -> Float64[Tensor, "pairs texts"]:
        total = torch.zeros(len(self.weights), num_texts, dtype=torch.float64)
        return total.index_add_(1, self.prefixes, self.weights)


def _share(inside: Interval, whole: Interval) -> Tensor:
    width = (inside[1] - inside[0]).clamp(min=0)
    total = whole[1] - whole[0]
    return torch.where(total > 0, width / total, 0.0)


Table = tuple[Tensor, ...]
BATCH = 64
"""Pairs enumerated together: tensors stay in cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPairs:
    """Target distributions over a tiny vocabulary, each paired with a draft distribution."""

    target: Table
    draft: Table

    @property
    def num_pairs(self) -> int:
        return len(self.target[0])

    @property
    def vocab_size(self) -> int:
        return self.target[0].shape[-1]

    @property
    def horizon(self) -> int:
        """Number of tokens whose joint distribution the probability tables determine."""
        return len(self.target)

    def target_rows(self, num_committed: int, depth: int) -> Tensor:
        return self.target[num_committed + depth]

    def draft_rows(self, num_committed: int, depth: int) -> Tensor:
        return self.draft[num_committed + depth]

    def with_full_drafts(self) -> ModelPairs:
        """Return pairs whose draft distributions give every token a positive probability."""
        full = torch.stack([(rows > 0).flatten(1).all(-1) for rows in self.draft]).all(0)
        return ModelPairs(
            target=tuple(rows[full] for rows in self.target),
            draft=tuple(rows[full] for rows in self.draft),
        )

    def joint(self) -> Float64[Tensor, "pairs texts"]:
        """Return the target's distribution of the first `horizon` tokens."""
        return self.complete({0: torch.ones_like(self.target[0][..., 0])})

    def complete(self, mass: Mapping[int, Tensor]) -> Float64[Tensor, "pairs texts"]:
        """Extend committed texts to the horizon with the target's distribution."""
        total = mass.get(0, torch.zeros_like(self.target[0][..., 0]))
        for level, rows in enumerate(self.target):
            total = (total[..., None] * rows).flatten(1)
            total = total + mass.get(level + 1, 0.0)
        return total


def random_pairs(
    num_pairs: int, vocab_size: int, horizon: int, generator: torch.Generator
) -> Iterator[ModelPairs]:
    """Return random pairs, from nearly uniform to nearly one-hot, with more or less agreement."""
    for start in range(0, num_pairs, BATCH):
        count = min(BATCH, num_pairs - start)
        sharpness, kinship = (
            torch.empty(count, 1, 1, dtype=torch.float64).uniform_(*ends, generator=generator)
            for ends in ((0.3, 4.0), (0.0, 1.0))
        )
        target, draft = [], []
        for level in range(horizon):
            shape = (count, vocab_size**level, vocab_size)
            common, own = (_clocks(shape, generator) for _ in range(2))
            target.append(_normalised(common**sharpness))
            draft.append(_normalised(common ** (sharpness * kinship) * own ** (1 - kinship)))
        yield ModelPairs(target=tuple(target), draft=tuple(draft))


def structured_pairs(vocab_size: int, horizon: int, generator: torch.Generator) -> ModelPairs:
    """Return a batch of corner cases, such as equal or disjoint distributions.

    In order: identical; one-hot target; one-hot draft; both one-hot, sometimes agreeing; zero
    overlap, the target on one token; zero overlap, the draft on one token; zeros in the target;
    zeros in both.
    """
    target, draft = [], []
    for level in range(horizon):
        shape = (vocab_size**level, vocab_size)
        first, second = (_normalised(_clocks(shape, generator)) for _ in range(2))
        one, other = (_one_hot(_clocks(shape, generator)) for _ in range(2))
        without = _normalised(first * (1 - one))
        holes = _normalised(second * (1 - other))
        target.append(torch.stack([first, one, first, one, one, without, without, without]))
        draft.append(torch.stack([first, second, one, other, without, one, second, holes]))
    return ModelPairs(target=tuple(target), draft=tuple(draft))


def _clocks(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _one_hot(weights: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)
