"""Verifiers of sampled chains under enumeration; each function can be replaced.

A `ChainVerifier` with nothing replaced is the engine; the planted bugs of `plants` replace a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from forerun.sampling.chain import Rule, accept_probs, final_weights, num_accepted
from forerun.sampling.kernels import SamplingKernels, sampling_kernels
from forerun.sampling.noise import Purpose, chain_keys, step_key
from forerun.testing.exact.histories import Inexact
from forerun.theory.stop_rule import StopRule

__all__ = [
    "ChainRows",
    "ChainVerifier",
    "Decision",
    "certain_before",
    "confident_before",
    "decisive_tests",
    "kernel_accept",
    "kernel_final",
]

Decision = tuple[int, bool]
"""A node and whether its acceptance test passed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRows:
    """The input of verification, flattened over pairs and histories.

    Attributes:
        target: after every prefix of the chain.
        draft: likewise; verification may read all but the last row.
        tokens: the drawn chain.
        num_drafted: how much of it was proposed.
    """

    target: Float64[Tensor, "batch rows vocab"]
    draft: Float64[Tensor, "batch rows vocab"]
    tokens: Int64[Tensor, "batch nodes"]
    num_drafted: Int64[Tensor, " batch"]


def engine_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Return the engine's acceptance probabilities."""
    return accept_probs(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted, rule)


def engine_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Return the engine's weights of the recovered or bonus token."""
    draft = rows.draft[:, :-1]
    return final_weights(rows.target, draft, rows.tokens, rows.num_drafted, accepted, rule)


def kernel_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Return the acceptance probabilities of the CPU kernels, in fp64."""
    inputs = rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted
    return loaded_kernels().chain_accept(*inputs, is_block=rule == "block")


def kernel_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Return the weights of the final token from the CPU kernels."""
    inputs = rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted
    return loaded_kernels().chain_weights(*inputs, accepted, is_block=rule == "block")


def loaded_kernels() -> SamplingKernels:
    """Return the kernels of this machine, where `sampling_kernels` has found some."""
    kernels = sampling_kernels()
    assert kernels is not None
    return kernels


def engine_draft_key(request_key: int, num_committed: int, node: int) -> int:
    """Return the key that an engine's drafter draws node `node` with."""
    return step_key(request_key, num_committed, node, Purpose.DRAFT)


def keep_all(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    """Keep every drawn token."""
    return torch.ones_like(drawn_prob, dtype=torch.bool)


def confident_before(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    """Apply a valid stop rule, which reads the distribution before the draw only."""
    return going_on(StopRule(measure="top_probability", threshold=0.55), draft_row.amax(-1))


def certain_before(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    """Apply a valid stop rule on the entropy of the distribution."""
    entropy = torch.special.entr(draft_row).sum(-1)
    return going_on(StopRule(measure="entropy", threshold=0.8), entropy)


def going_on(rule: StopRule, values: Tensor) -> Tensor:
    """Return where a rule lets a node be drafted."""
    goes = [not rule.stops(value) for value in values.flatten().tolist()]
    return torch.tensor(goes).reshape(values.shape)


def one_more(num_drafts: int, num_accepted: int) -> int:
    """Return a K of the second step that depends on the noise of the first."""
    return num_accepted + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerifier:
    """How chains are drafted, accepted and completed.

    Attributes:
        rule: the engine's rule.
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
    draft_key: Callable[[int, int, int], int] = engine_draft_key
    verify_keys: Callable[[int, int, int], list[int]] = chain_keys
    keep: Callable[[Tensor, Tensor], Tensor] = keep_all
    next_k: Callable[[int, int], int] = one_more


def decisive_tests(rule: Rule, num_nodes: int) -> list[tuple[Decision, ...]]:
    """Per number of accepted tokens, the acceptance tests whose outcomes decide it.

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
