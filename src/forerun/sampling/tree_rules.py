"""Verifies draft trees by traversal, recursive rejection or greedy coupling.

Each rule has a probability stage, which turns probabilities and drawn tokens into the acceptance
probability of every node and the distribution of the token that follows it, and a draw stage, which
compares noise with them (strictly, u < a). Both are used by the engine; `forerun exact` feeds the
probability stage every possible draft in fp64.

Which proposal a rule is exact for:

- "traversal" (2505.12398) and "rejection" (RSD, 2402.14160; Sequoia, 2402.12374): the children of a
  node were drawn without replacement, one after the other, from one row, and are numbered in the
  order they were drawn. Of the two, traversal never accepts less on average. On a chain traversal
  is block verification and rejection is the token rule.
- "greedy_coupling" (2502.18779): the last child of every node was drawn from the row handed in, in
  which all its siblings have probability 0. The siblings are a function of the committed tokens,
  such as the most likely ones.

Row 0 of a tree's target distributions belongs to the last committed token, row n + 1 to node n; of
the draft's there is one row per node that has children, in the order of `expanded(tree)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for, on_host
from forerun.sampling.noise import Purpose, draw, step_keys, uniform
from forerun.sampling.processors import failed_rows
from forerun.sampling.tree_residuals import Forest, TreeRule, forest_of, residuals_of
from forerun.theory.tree import TokenTree, post_order


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeWeights:
    """Probabilities that noise is compared with, for a batch of trees of one topology.

    Attributes:
        accept: acceptance probability of every node, given that the tests before its own failed.
        final: unnormalised distribution of the token after the last accepted node, by row.
        shares: under greedy coupling, of every node without a test the probability that it is
            accepted once the test of its last sibling has failed; 0 otherwise.
    """

    accept: Float[Tensor, "batch nodes"]
    final: Float[Tensor, "batch rows vocab"]
    shares: Float[Tensor, "batch nodes"]


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
    rule: TreeRule,
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
    device = target_probs.device
    drafts = [rows.to(device) for rows in draft_probs]
    if rule == "traversal" and (kernels := kernels_for(target_probs, *drafts)):
        fed = tokens.contiguous()
        return by_kernels(trees, fed, kernels.verify_trees(target_probs, fed, trees, drafts, keys))
    forest = forest_of(tuple(trees), rule, device=device)
    drafted = tokens.to(device)[forest.node_rows]
    found = residuals_of(rule, forest, target_probs, torch.cat(drafts), drafted)
    tests, finals = (
        uniform(torch.tensor([key for part in each for key in part], device=device))
        for each in zip(*keys, strict=True)
    )
    passed = tests < found.accept
    if rule == "traversal":
        rows = _first_passed(forest, passed)
        drawn = draw(found.final(rows), finals[rows])
    else:
        rows = drawn = draw(found.final(torch.arange(len(finals), device=device)), finals)
    numbers = Numbers(
        *on_host(passed, rows, drawn, found.accept, found.shares, tokens, failed_rows(target_probs))
    )
    return outcomes_of(rule, trees, numbers)


def by_kernels(
    trees: Sequence[TokenTree],
    tokens: Int64[Tensor, " rows"],
    verdicts: Sequence[tuple[int, int, int, float]],
) -> list[TreeOutcome]:
    """Return the outcomes of tree verification by the CPU kernels."""
    fed, found, row = tokens.tolist(), [], 0
    for tree, (last, token, is_valid, expected) in zip(trees, verdicts, strict=True):
        path = tree.path(last)
        found.append(
            TreeOutcome(
                path=path,
                tokens=(*(fed[row + node + 1] for node in path), token),
                expected_accepted=expected,
                is_valid=bool(is_valid),
            )
        )
        row += len(tree.parents) + 1
    return found


def _first_passed(forest: Forest, passed: Bool[Tensor, " nodes"]) -> Int64[Tensor, " trees"]:
    """Return the row of the first node in post-order that passes its test; else the root's."""
    behind = torch.cat([passed, passed.new_zeros(1)])[forest.post_order]
    first = behind.view(torch.uint8).argmax(-1, keepdim=True)
    nodes = forest.post_order.gather(1, first)[:, 0]
    rows = forest.node_rows[nodes.clamp(max=len(passed) - 1)]
    return torch.where(behind.any(-1), rows, forest.root_rows)


class Numbers(NamedTuple):
    """Results of the draw stage for all trees, concatenated and copied to the host.

    Attributes:
        passed: whether u < accept, by node.
        rows: under traversal the row of the last accepted node, by tree.
        drawn: the final token by tree under traversal, by row under the other rules.
        failed: whether the target has no distribution there.
    """

    passed: Sequence[bool]
    rows: Sequence[int]
    drawn: Sequence[int]
    accept: Sequence[float]
    shares: Sequence[float]
    tokens: Sequence[int]
    failed: Sequence[bool]


def outcomes_of(rule: TreeRule, trees: Sequence[TokenTree], numbers: Numbers) -> list[TreeOutcome]:
    """Follow every tree to its last accepted node."""
    found = []
    row = node = 0
    for index, tree in enumerate(trees):
        num_nodes = len(tree.parents)
        nodes, own = slice(node, node + num_nodes), slice(row, row + num_nodes + 1)
        fed, failed = numbers.tokens[own], numbers.failed[own]
        if rule == "traversal":
            last, token = numbers.rows[index] - row - 1, numbers.drawn[index]
        else:
            drawn = numbers.drawn[own]
            last = accepted_node(rule, tree, numbers.passed[nodes], fed[1:], drawn)
            token = drawn[last + 1]
        path = tree.path(last)
        accept, shares = numbers.accept[nodes], numbers.shares[nodes]
        found.append(
            TreeOutcome(
                path=path,
                tokens=(*(fed[n + 1] for n in path), token),
                expected_accepted=expected_accepted(rule, tree, accept, shares),
                is_valid=not any(failed[n + 1] for n in (-1, *path)),
            )
        )
        row, node = row + num_nodes + 1, node + num_nodes
    return found


# -------------------------------------------------------------------------------- probability stage


def tree_weights(
    rule: TreeRule,
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
    forest = forest_of((tree,), rule, copies=len(tokens), device=target_probs.device)
    found = residuals_of(
        rule, forest, target_probs.flatten(0, 1), draft_probs.flatten(0, 1), tokens.flatten()
    )
    rows = torch.arange(len(tokens) * (len(tree.parents) + 1), device=target_probs.device)
    return TreeWeights(
        accept=found.accept.view(tokens.shape),
        final=found.final(rows).view(target_probs.shape),
        shares=found.shares.view(tokens.shape),
    )


def expected_accepted(
    rule: TreeRule, tree: TokenTree, accept: Sequence[float], shares: Sequence[float]
) -> float:
    """Return E[num_accepted | draft tokens] over the noise of verification; see `TreeWeights`."""
    if rule == "traversal":
        rejected, expected = 1.0, 0.0
        for node in post_order(tree):
            expected += tree.depths[node] * rejected * accept[node]
            rejected *= 1 - accept[node]
        return expected
    reached = [1.0] * (len(tree.parents) + 1)  # the last entry is the root's
    for node in (-1, *range(len(tree.parents))):
        left = reached[node]
        for child in reversed(tree.children(node)) if rule != "rejection" else tree.children(node):
            is_tested = rule == "rejection" or child == tree.children(node)[-1]
            reached[child] = left * (accept[child] if is_tested else shares[child])
            if is_tested:
                left -= reached[child]
    return sum(reached) - 1


# --------------------------------------------------------------------------------------- draw stage


def tree_keys(request_key: int, num_committed: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """Return the keys of the acceptance tests, by node, and of the final draws, by row.

    They depend on the tokens committed at the start of the step, for a rejected position is drawn
    again in the next step, with other noise.
    """
    tests = step_keys(request_key, num_committed, range(num_nodes), Purpose.ACCEPT)
    finals = step_keys(request_key, num_committed, range(num_nodes + 1), Purpose.RECOVERED)
    return tests, finals


def accepted_node(
    rule: TreeRule,
    tree: TokenTree,
    passed: Sequence[bool],
    drafted: Sequence[int] = (),
    drawn: Sequence[int] = (),
) -> int:
    """Return the last accepted node; -1 if all nodes were rejected.

    Args:
        passed: whether u < accept, by node.
        drafted: tokens of the nodes; only greedy coupling reads them.
        drawn: the token drawn from the final distribution of every row; likewise.
    """
    if rule == "traversal":
        return next((node for node in post_order(tree) if passed[node]), -1)
    node = -1
    while children := tree.children(node):
        chosen = next((child for child in children if passed[child]), None)
        if chosen is None and rule == "greedy_coupling":
            token = drawn[node + 1]
            chosen = next((child for child in children if drafted[child] == token), None)
        if chosen is None:
            return node
        node = chosen
    return node
