"""Two steps of sampled chains, every draft, acceptance and final token enumerated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from forerun.sampling.noise import request_key
from forerun.testing.exact.histories import Histories
from forerun.testing.exact.pairs import ModelPairs
from forerun.testing.exact.verifiers import ChainRows, ChainVerifier, decisive_tests

__all__ = ["Drafted", "Emitted", "draft_chain", "emit_chains"]

REQUEST = request_key(0, 0)
NUM_PROMPT = 3
"""Tokens committed before the first step; keys count them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """Output distribution of one or more steps.

    Attributes:
        joint: distribution of the first `horizon` tokens under each pair.
        num_histories: possible histories summed over, all pairs together.
    """

    joint: Float64[Tensor, "pairs texts"]
    num_histories: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted:
    """Histories after drafting, with the rows that verification reads."""

    histories: Histories
    tokens: Int64[Tensor, "histories nodes"]
    num_drafted: Int64[Tensor, "pairs histories"]
    target: Float64[Tensor, "pairs histories rows vocab"]
    draft: Float64[Tensor, "pairs histories rows vocab"]

    def rows(self) -> ChainRows:
        """Flatten pairs and histories to rows, as the engine's functions expect."""
        num_pairs = len(self.num_drafted)
        return ChainRows(
            target=self.target.flatten(0, 1),
            draft=self.draft.flatten(0, 1),
            tokens=self.tokens.repeat(num_pairs, 1),
            num_drafted=self.num_drafted.flatten(),
        )


def emit_chains(pairs: ModelPairs, verifier: ChainVerifier, num_drafts: int) -> Emitted:
    """Return the output distribution of two steps, continued by the target to the horizon.

    The K of the second step depends on what the first one accepted: it then tells of the noise of
    the first, which is what noise used twice needs to do harm.

    Args:
        pairs: target and draft, given every prefix.
        verifier: how to draft and verify.
        num_drafts: K of the first step.
    """
    mass: dict[int, Tensor] = {}
    num_histories = 0
    for accepted, first in step(pairs, verifier, Histories.begin(pairs.num_pairs), num_drafts):
        room = pairs.horizon - 1 - first.length
        for _, second in step(
            pairs, verifier, first, min(verifier.next_k(num_drafts, accepted), room)
        ):
            found = second.mass(pairs.vocab_size**second.length)
            mass[second.length] = mass.get(second.length, 0.0) + found
            num_histories += int(second.weights.count_nonzero())
    return Emitted(joint=pairs.complete(mass), num_histories=num_histories)


def step(
    pairs: ModelPairs, verifier: ChainVerifier, histories: Histories, num_drafts: int
) -> Iterator[tuple[int, Histories]]:
    """Run one step from `histories`: the number accepted, and the histories that end so."""
    drafted = draft_chain(pairs, verifier, histories, num_drafts)
    rows = drafted.rows()
    shape = drafted.num_drafted.shape
    accept = verifier.accept(rows, verifier.rule).reshape(*shape, num_drafts)
    keys = verifier.verify_keys(REQUEST, NUM_PROMPT + histories.length, num_drafts)
    for accepted, tests in enumerate(decisive_tests(verifier.rule, num_drafts)):
        # the row after `accepted` tokens; shorter proposals have weight 0 but must be valid input
        counts = torch.full_like(rows.num_drafted, accepted).minimum(rows.num_drafted)
        final = verifier.final(rows, counts, verifier.rule).reshape(*shape, pairs.vocab_size)
        at_hand = drafted.histories
        for node, passed in tests:
            at_hand = at_hand.compare(keys[node], accept[..., node], passed)
        recovered, bonus = drafted.num_drafted > accepted, drafted.num_drafted == accepted
        for kind, key in ((recovered, keys[-2]), (bonus, keys[-1])):
            if kind.any():
                ended = at_hand.masked(kind).draw(key, final)
                yield accepted, committed(ended, drafted.tokens[:, :accepted], pairs.vocab_size)


def committed(ended: Histories, accepted: Tensor, vocab_size: int) -> Histories:
    """Commit the accepted tokens and the final one, the last draw of `ended`."""
    final = torch.arange(vocab_size).repeat(len(accepted))
    tokens = torch.cat([accepted.repeat_interleave(vocab_size, 0), final[:, None]], 1)
    return ended.commit(tokens, vocab_size)


def draft_chain(
    pairs: ModelPairs, verifier: ChainVerifier, histories: Histories, num_drafts: int
) -> Drafted:
    """Draft every chain of `num_drafts` tokens from every history."""
    vocab_size, start = pairs.vocab_size, histories.length
    paths = histories.prefixes
    tokens = torch.empty(len(paths), 0, dtype=torch.int64)
    kept = torch.ones(*histories.weights.shape, 0, dtype=torch.bool)
    for node in range(num_drafts):
        rows = pairs.draft[start + node][:, paths]
        key = verifier.draft_key(REQUEST, NUM_PROMPT + start, node)
        histories = histories.draw(key, rows)
        drawn = torch.arange(vocab_size).repeat(len(paths))
        paths = paths.repeat_interleave(vocab_size) * vocab_size + drawn
        tokens = torch.cat([tokens.repeat_interleave(vocab_size, 0), drawn[:, None]], 1)
        keep = verifier.keep(rows[:, :, None], rows).expand_as(rows).flatten(1)
        kept = torch.cat([kept.repeat_interleave(vocab_size, 1), keep[..., None]], -1)
    prefixes = [paths // vocab_size ** (num_drafts - node) for node in range(num_drafts + 1)]
    return Drafted(
        histories=histories,
        tokens=tokens,
        num_drafted=kept.cumprod(-1).sum(-1),
        target=torch.stack([pairs.target_rows(start, i)[:, p] for i, p in enumerate(prefixes)], 2),
        draft=torch.stack([pairs.draft[start + i][:, p] for i, p in enumerate(prefixes)], 2),
    )
