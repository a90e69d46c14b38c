"""Enumerates the exact output distribution of two steps with sampled chains."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from forerun.sampling.chain import Rule, accept_probs, final_weights, num_accepted
from forerun.sampling.kernels import SamplingKernels, sampling_kernels
from forerun.sampling.noise import Purpose, chain_keys, request_key, step_key
from forerun.testing.exact.pairs import Histories, Inexact, ModelPairs
from forerun.theory.stop_rule import StopRule

Decision = tuple[int, bool]
"""A node and whether its acceptance test passed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRows:
    """Input of verification for all pairs and histories, flattened to rows."""

    target: Float64[Tensor, "batch rows vocab"]
    draft: Float64[Tensor, "batch rows vocab"]
    tokens: Int64[Tensor, "batch nodes"]
    num_drafted: Int64[Tensor, " batch"]


def engine_accept(rows: ChainRows, rule: Rule) -> Tensor:
    return accept_probs(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted, rule)


def engine_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    draft = rows.draft[:, :-1]
    return final_weights(rows.target, draft, rows.tokens, rows.num_drafted, accepted, rule)


def kernel_accept(rows: ChainRows, rule: Rule) -> Tensor:
    inputs = rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted
    return loaded_kernels().chain_accept(*inputs, is_block=rule == "block")


def kernel_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    inputs = rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted
    return loaded_kernels().chain_weights(*inputs, accepted, is_block=rule == "block")


def loaded_kernels() -> SamplingKernels:
    kernels = sampling_kernels()
    assert kernels is not None
    return kernels


def _engine_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed, node, Purpose.DRAFT)


def _keep_all(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    return torch.ones_like(drawn_prob, dtype=torch.bool)


def confident_before(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    return _going_on(StopRule(measure="top_probability", threshold=0.55), draft_row.amax(-1))


def certain_before(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    entropy = torch.special.entr(draft_row).sum(-1)
    return _going_on(StopRule(measure="entropy", threshold=0.8), entropy)


def _going_on(rule: StopRule, values: Tensor) -> Tensor:
    goes = [not rule.stops(value) for value in values.flatten().tolist()]
    return torch.tensor(goes).reshape(values.shape)


def _one_more(num_drafts: int, num_accepted: int) -> int:
    return num_accepted + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerifier:
    """Functions that draft, accept and complete chains in the enumeration.

    Attributes:
        accept: acceptance probabilities, from rows and rule.
        final: weights of the final token, from rows, number accepted and rule.
        draft_key: key of a draft draw, from request key, committed tokens and node.
        verify_keys: keys of verification, from request key, committed tokens and number of nodes.
        keep: whether drafting goes on through a node, from its distribution and the drawn token's
            probability.
        next_k: K of the second step, from that of the first and how many it accepted.
    """

    rule: Rule
    accept: Callable[[ChainRows, Rule], Tensor] = engine_accept
    final: Callable[[ChainRows, Tensor, Rule], Tensor] = engine_final
    draft_key: Callable[[int, int, int], int] = _engine_draft_key
    verify_keys: Callable[[int, int, int], list[int]] = chain_keys
    keep: Callable[[Tensor, Tensor], Tensor] = _keep_all
    next_k: Callable[[int, int], int] = _one_more


def decisive_tests(rule: Rule, num_nodes: int) -> list[tuple[Decision, ...]]:
    """Return for each number of accepted tokens the acceptance tests that determine it.

    Asks the engine's draw stage about every pattern of outcomes. The patterns with one verdict must
    be all that agree in the decisive tests, else the verdict would not have the probability of
    those tests.
    """
    patterns = list(product((False, True), repeat=num_nodes))
    passed = torch.tensor(patterns, dtype=torch.bool).reshape(len(patterns), num_nodes)
    uniforms = torch.where(passed, 0.25, 0.75).double()
    verdicts = num_accepted(torch.full_like(uniforms, 0.5), uniforms, rule).tolist()
    decisive = []
    for accepted in range(num_nodes + 1):
        agreeing = [p for p, v in zip(patterns, verdicts, strict=True) if v == accepted]
        tests = tuple(
            (node, agreeing[0][node])
            for node in range(num_nodes)
            if len({pattern[node] for pattern in agreeing}) == 1
        )
        if len(agreeing) != 2 ** (num_nodes - len(tests)):
            raise Inexact(f"{rule}: {accepted} accepted is no conjunction of tests")
        decisive.append(tests)
    return decisive


REQUEST = request_key(0, 0)
NUM_PROMPT = 3
"""Tokens committed before the first step; keys count them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """Output distribution of one or more enumerated steps."""

    joint: Float64[Tensor, "pairs texts"]
    num_histories: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drafted:
    """Histories after drafting, with the target and draft rows that verification reads."""

    histories: Histories
    tokens: Int64[Tensor, "histories nodes"]
    num_drafted: Int64[Tensor, "pairs histories"]
    target: Float64[Tensor, "pairs histories rows vocab"]
    draft: Float64[Tensor, "pairs histories rows vocab"]

    def rows(self) -> ChainRows:
        """Flatten pairs and histories to the rows that the engine's functions read."""
        num_pairs = len(self.num_drafted)
        return ChainRows(
            target=self.target.flatten(0, 1),
            draft=self.draft.flatten(0, 1),
            tokens=self.tokens.repeat(num_pairs, 1),
            num_drafted=self.num_drafted.flatten(),
        )


def emit_chains(pairs: ModelPairs, verifier: ChainVerifier, num_drafts: int) -> Emitted:
    """Return the output distribution of two steps, completed by the target to the horizon.

    The K of the second step depends on what the first one accepted: it then tells of the noise of
    the first, which is what noise used twice needs to do harm.
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
    """Run one step, and yield each number of accepted tokens with the histories that have it."""
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
    """Commit the accepted tokens and the final token, which is the last draw of `ended`."""
    final = torch.arange(vocab_size).repeat(len(accepted))
    tokens = torch.cat([accepted.repeat_interleave(vocab_size, 0), final[:, None]], 1)
    return ended.commit(tokens, vocab_size)


def draft_chain(
    pairs: ModelPairs, verifier: ChainVerifier, histories: Histories, num_drafts: int
) -> Drafted:
    """Enumerate every chain of `num_drafts` draft tokens after every history."""
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
        draft=torch.stack([pairs.draft_rows(start, i)[:, p] for i, p in enumerate(prefixes)], 2),
    )
