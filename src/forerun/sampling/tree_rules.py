"""Verifies drawn draft trees by traversal (2505.12398).

The children of a node were drawn without replacement, one after the other, from one row, and are
numbered in the order they were drawn. On a chain traversal is block verification.

The rule has a probability stage, which turns probabilities and drawn tokens into the acceptance
probability of every node and the distribution of the token that follows it, and a draw stage, which
compares noise with them (strictly, u < a). Both are used by the engine; `forerun exact` feeds the
probability stage every possible draft in fp64.

Row 0 of a tree's target distributions belongs to the last committed token, row n + 1 to node n; of
the draft's there is one row per node that has children, in the order of `expanded(tree)`.

The children of a node are rejected one after the other. With P the target's row at the node, Q the
draft's and w the node's weight, a rejection of x leaves

    R = [w P - Q]+,  Z = sum R,  w <- Z / (Z + 1 - w),  P <- R / Z,  Q <- Q without x, normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for, on_host
from forerun.sampling.noise import Purpose, draw, step_keys, uniform
from forerun.sampling.processors import failed_rows
from forerun.theory.tree import TokenTree, expanded, post_order


class TreeWeights(NamedTuple):
    """Probabilities that noise is compared with, for a batch of trees of one topology.

    Attributes:
        accept: acceptance probability of every node, given that the tests before its own failed.
        final: unnormalised distribution of the token after the last accepted node, by row.
    """

    accept: Float[Tensor, "batch nodes"]
    final: Float[Tensor, "batch rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOutcome:
    """Verdict on one tree.

    Attributes:
        expected_accepted: E[num_accepted | draft tokens].
        is_valid: whether the target had a distribution at every row of the path.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    expected_accepted: float
    is_valid: bool


def verify_trees(
    trees: Sequence[TokenTree],
    target_probs: Float[Tensor, "rows vocab"],
    draft_probs: Sequence[Float[Tensor, "_ vocab"]],
    tokens: Int64[Tensor, " rows"],
    keys: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> list[TreeOutcome]:
    """Accept a path of every tree and draw the token after it; synchronises with the device once.

    Nothing is accepted after a node where the target has no distribution: the tokens up to it
    decide that, so it biases nothing.

    Args:
        target_probs: the target's rows of all trees, one after the other.
        draft_probs: of every tree the rows that children were drawn from.
        tokens: fed at the rows of `target_probs`; the first of every tree is not a draft token.
    """
    drafts = [rows.to(target_probs.device) for rows in draft_probs]
    if kernels := kernels_for(target_probs, *drafts):
        tokens = tokens.contiguous()
        verdicts = kernels.verify_trees(target_probs, tokens, trees, drafts, keys)
        fed: list[int] = tokens.tolist()
    else:
        verdicts, fed = _verify(trees, target_probs, drafts, tokens, keys)
    outcomes, row = [], 0
    for tree, (last, token, is_valid, expected) in zip(trees, verdicts, strict=True):
        path = tree.path(last)
        outcomes.append(
            TreeOutcome(
                path=path,
                tokens=(*(fed[row + node + 1] for node in path), token),
                expected_accepted=expected,
                is_valid=bool(is_valid),
            )
        )
        row += len(tree.parents) + 1
    return outcomes


def _verify(
    trees: Sequence[TokenTree],
    target_probs: Tensor,
    drafts: Sequence[Tensor],
    tokens: Tensor,
    keys: Sequence[tuple[Sequence[int], Sequence[int]]],
) -> tuple[list[tuple[int, int, int, float]], list[int]]:
    """Return what the kernels do: last accepted node, final token, validity and expectation.

    The fed tokens come over with them.
    """
    device, row = target_probs.device, 0
    weights: list[TreeWeights] = []
    for tree, draft in zip(trees, drafts, strict=True):
        own = slice(row, row := row + len(tree.parents) + 1)
        fed = tokens[own][None, 1:].to(device)
        weights.append(tree_weights(tree, target_probs[own][None], draft[None], fed))
    tests, finals = (
        uniform(torch.tensor([key for part in each for key in part], device=device))
        for each in zip(*keys, strict=True)
    )
    accept = torch.cat([found.accept[0] for found in weights])
    drawn = draw(torch.cat([found.final[0] for found in weights]), finals)
    columns = on_host(tests < accept, accept, drawn, failed_rows(target_probs), tokens)
    passed, accepts, final_tokens, failed, fed_tokens = columns
    verdicts: list[tuple[int, int, int, float]] = []
    row = node = 0
    for tree in trees:
        nodes = slice(node, node := node + len(tree.parents))
        last = accepted_node(tree, passed[nodes])
        is_valid = not any(failed[row + n + 1] for n in (-1, *tree.path(last)))
        expected = expected_accepted(tree, accepts[nodes])
        verdicts.append((last, final_tokens[row + last + 1], is_valid, expected))
        row += len(tree.parents) + 1
    return verdicts, fed_tokens


# -------------------------------------------------------------------------------- probability stage


def tree_weights(
    tree: TokenTree,
    target_probs: Float[Tensor, "batch rows vocab"],
    draft_probs: Float[Tensor, "batch parents vocab"],
    tokens: Int64[Tensor, "batch nodes"],
) -> TreeWeights:
    """Return acceptance probabilities and final distributions for trees of one topology.

    Args:
        target_probs: the target's distribution after the root and after every node.
        draft_probs: the rows that children were drawn from, one per node of `expanded(tree)`.
    """
    accept, final = target_probs.new_zeros(tokens.shape), target_probs.clone()
    rows = {parent: row for row, parent in enumerate(expanded(tree))}
    tiny = torch.finfo(target_probs.dtype).tiny

    def reject_children(node: int, weight: Tensor) -> Tensor:
        """Return the weight that is left of a node after the rejection of all its children."""
        if node not in rows:
            return weight
        own, draft = target_probs[:, node + 1], draft_probs[:, rows[node]]
        here = own
        is_valid = ~failed_rows(here)
        for child in tree.children(node):
            token = tokens[:, child, None]
            ratio = weight * (here.gather(1, token) / draft.gather(1, token).clamp(min=tiny))[:, 0]
            reached = torch.where(is_valid, ratio.clamp(max=1), 0.0)
            accept[:, child] = reject_children(child, reached)
            residual = (weight[:, None] * here - draft).clamp_(min=0)
            mass = residual.sum(-1)
            rest = mass + (1 - weight)
            # Where nothing is left both rows agree, and no test of a later child is ever reached.
            left = torch.where(rest > 0, mass / rest.clamp(min=tiny), 1.0)
            weight = torch.where(is_valid, left, weight)
            residual /= mass.clamp(min=tiny)[:, None]
            here = torch.where(mass[:, None] > 0, residual, own)
            draft = draft.scatter(1, token, 0.0)
            draft = draft / draft.sum(-1, keepdim=True).clamp(min=tiny)
        final[:, node + 1] = here
        return weight

    reject_children(-1, target_probs.new_ones(len(tokens)))
    return TreeWeights(accept, final)


def expected_accepted(tree: TokenTree, accept: Sequence[float]) -> float:
    """Return E[num_accepted | draft tokens] over the noise of verification."""
    rejected, expected = 1.0, 0.0
    for node in post_order(tree):
        expected += tree.depths[node] * rejected * accept[node]
        rejected *= 1 - accept[node]
    return expected


# --------------------------------------------------------------------------------------- draw stage


def tree_keys(request_key: int, num_committed: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """Return the keys of the acceptance tests, by node, and of the final draws, by row.

    They depend on the tokens committed at the start of the step, for a rejected position is drawn
    again in the next step, with other noise.
    """
    tests = step_keys(request_key, num_committed, range(num_nodes), Purpose.ACCEPT)
    finals = step_keys(request_key, num_committed, range(num_nodes + 1), Purpose.RECOVERED)
    return tests, finals


def accepted_node(tree: TokenTree, passed: Sequence[bool]) -> int:
    """Return the last accepted node, the first in post-order that passed its test; -1 if none."""
    return next((node for node in post_order(tree) if passed[node]), -1)
