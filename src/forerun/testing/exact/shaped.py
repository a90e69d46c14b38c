"""Distributions shaped by penalties and masks: by definition, and as the engine computes them.

The logits are free, given every prefix; penalties and masks shape them. The target's distribution
is written down here once more, one text at a time. What verification sees comes from the engine's
processors, every row under the history the engine gives it: committed tokens counted, draft tokens
as a path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from jaxtyping import Bool
from torch import Tensor

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, RowHistory
from forerun.sampling.mask import TokenMask
from forerun.sampling.processors import pack_params, target_probs
from forerun.testing.exact.pairs import ModelPairs

__all__ = ["SHAPES", "Shape", "ShapedPairs", "View", "shaped_pairs"]

Text = tuple[int, ...]
View = Callable[[History, Text], RowHistory]
"""The history of a row, from the committed one and the draft tokens above the row."""

PROMPT = (0, 0, 1)
OFFSET = 1.5
"""Added to log-probabilities, so that logits of both signs meet the repetition penalty."""


class NoRepeats:
    """A token mask that forbids the same token twice in a row."""

    def __init__(self, vocab_size: int, last: int | None = None) -> None:
        self.vocab_size = vocab_size
        self.last = last

    def fork(self) -> NoRepeats:
        """Return an independent copy."""
        return NoRepeats(self.vocab_size, self.last)

    def advance(self, token: int) -> None:
        """Take one token."""
        self.last = token

    def allowed(self) -> Bool[Tensor, " vocab"]:
        """Allow every token but the last one."""
        row = torch.ones(self.vocab_size, dtype=torch.bool)
        if self.last is not None:
            row[self.last] = False
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Penalties and masks that shape a distribution by the text so far.

    Attributes:
        params: what a request asks for.
        define: logits of one prefix, (pairs, vocab), and the output so far to shaped ones.
        mask: a mask at the beginning of the output, from the size of the vocabulary.
    """

    params: SamplingParams
    define: Callable[[Tensor, Text], Tensor]
    mask: Callable[[int], TokenMask] | None = None


def penalised(params: SamplingParams, logits: Tensor, output: Text) -> Tensor:
    """Apply penalties: repetition over prompt and output, frequency and presence over output."""
    logits = logits.clone()
    times = Counter(output)
    for token in {*PROMPT, *output}:
        column = logits[:, token]
        worse = column * params.repetition_penalty
        logits[:, token] = torch.where(column < 0, worse, column / params.repetition_penalty)
    for token in set(output):
        logits[:, token] -= params.frequency_penalty * times[token] + params.presence_penalty
    return logits


def without_repeats(logits: Tensor, output: Text) -> Tensor:
    """Set the logit of the last output token to -inf."""
    logits = logits.clone()
    if output:
        logits[:, output[-1]] = -torch.inf
    return logits


# Every number is exact in fp32, as which parameters reach the processors.
PENALTIES = SamplingParams(repetition_penalty=2.0, frequency_penalty=0.75, presence_penalty=0.5)
SHAPES: Mapping[str, Shape] = {
    "penalties": Shape(params=PENALTIES, define=partial(penalised, PENALTIES)),
    "token mask": Shape(params=SamplingParams(), define=without_repeats, mask=NoRepeats),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShapedPairs(ModelPairs):
    """Distributions shaped by definition, with the engine's rows for verification.

    Attributes:
        seen: by committed tokens and draft tokens above the row, the rows for every prefix.
    """

    seen: Mapping[tuple[int, int], Tensor]

    def target_rows(self, num_committed: int, depth: int) -> Tensor:
        """Return the rows of the engine's processors, `depth` nodes past the committed text."""
        return self.seen[num_committed, depth]


def shaped_pairs(
    pairs: ModelPairs, shape: Shape, max_depth: int, view: View = History.at
) -> ShapedPairs:
    """Shape the target of every pair by penalties and masks; the draft is not changed.

    Args:
        pairs: without zeros, for a mask has to leave something.
        shape: what the text does to the distribution.
        max_depth: of the proposals that will be verified.
        view: the history of a row; a bug may be planted here.
    """
    vocab_size = pairs.vocab_size
    logits = [rows.log() + OFFSET for rows in pairs.target]
    texts = [list(product(range(vocab_size), repeat=level)) for level in range(pairs.horizon)]
    target = tuple(
        torch.stack([shape.define(rows[:, i], text) for i, text in enumerate(of_level)], 1)
        for rows, of_level in zip(logits, texts, strict=True)
    )
    return ShapedPairs(
        target=tuple(rows.softmax(-1) for rows in target),
        draft=pairs.draft,
        seen={
            (level - depth, depth): seen_rows(logits[level], texts[level], depth, shape, view)
            for level in range(pairs.horizon)
            for depth in range(min(level, max_depth) + 1)
        },
    )


def seen_rows(logits: Tensor, texts: list[Text], depth: int, shape: Shape, view: View) -> Tensor:
    """Return the engine's rows after `texts`, whose last `depth` tokens are drafted."""
    num_pairs, num_texts, vocab_size = logits.shape
    bases: dict[Text, History] = {}
    histories: list[RowHistory | None] = []
    for text in texts:
        committed, path = text[: len(text) - depth], text[len(text) - depth :]
        if committed not in bases:
            bases[committed] = history_after(committed, shape, vocab_size)
        histories += [view(bases[committed], path)] * num_pairs
    rows = logits.transpose(0, 1).flatten(0, 1)
    packed = pack_params([shape.params], rows=[0] * len(rows))
    found = target_probs(rows, packed, histories)
    return found.view(num_texts, num_pairs, vocab_size).transpose(0, 1)


def history_after(committed: Text, shape: Shape, vocab_size: int) -> History:
    """Return the history of a request whose output is `committed`."""
    mask = None if shape.mask is None else shape.mask(vocab_size)
    history = History.of(shape.params, PROMPT, vocab_size=vocab_size, mask=mask)
    for token in committed:
        history.append(token)
    return history
