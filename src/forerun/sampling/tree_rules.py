"""Verification of draft trees: traversal, recursive rejection and greedy coupling.

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

Shapes: a batch of trees of one topology. Row 0 of `target_probs` belongs to the last committed
token, row n + 1 to node n; `draft_probs` has one row per node that has children, in the order of
`expanded(tree)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.noise import Purpose, draw, step_key, uniform
from forerun.theory.tree import TokenTree

__all__ = [
    "TreeRule",
    "TreeWeights",
    "accepted_node",
    "expanded",
    "expected_accepted",
    "post_order",
    "tree_keys",
    "tree_weights",
    "verify_tree",
]

TreeRule = Literal["traversal", "rejection", "greedy_coupling"]
TargetProbs = Float[Tensor, "batch rows vocab"]
DraftProbs = Float[Tensor, "batch parents vocab"]
Tokens = Int64[Tensor, "batch nodes"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeWeights:
    """What the draw stage compares noise with.

    Attributes:
        accept: acceptance probability of every node, given that the tests before its own failed.
        final: unnormalised distribution of the token behind the last accepted node, by row.
    """

    accept: Float[Tensor, "batch nodes"]
    final: Float[Tensor, "batch rows vocab"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOutcome:
    """The verdict on one tree.

    Attributes:
        path: accepted nodes from the root down.
        final_token: the token behind them.
        expected_accepted: E[num_accepted | draft tokens].
    """

    path: tuple[int, ...]
    final_token: int
    expected_accepted: float


@lru_cache(maxsize=1024)
def expanded(tree: TokenTree) -> tuple[int, ...]:
    """Return the nodes that have children, ascending; -1 is the last committed token."""
    return tuple(sorted(set(tree.parents)))


@lru_cache(maxsize=1024)
def post_order(tree: TokenTree) -> tuple[int, ...]:
    """Return every node behind all its descendants, siblings in draw order."""
    order: list[int] = []

    def visit(node: int) -> None:
        for child in tree.children(node):
            visit(child)
            order.append(child)

    visit(-1)
    return tuple(order)


def verify_tree(
    rule: TreeRule,
    tree: TokenTree,
    target_probs: Float[Tensor, "rows vocab"],
    draft_probs: Float[Tensor, "parents vocab"],
    tokens: Int64[Tensor, " nodes"],
    keys: tuple[Sequence[int], Sequence[int]],
) -> TreeOutcome:
    """Accept a path of one tree and draw the token behind it.

    Args:
        rule: as for `tree_weights`, like the next four, but without the batch.
        tree: topology, at least one node.
        target_probs: the target's rows.
        draft_probs: the rows that children were drawn from.
        tokens: token of every node.
        keys: `tree_keys` of the step.
    """
    weights = tree_weights(rule, tree, target_probs[None], draft_probs[None], tokens[None])
    tests, finals = (uniform(torch.tensor(k, device=target_probs.device)) for k in keys)
    passed: list[bool] = (tests < weights.accept[0]).tolist()
    if rule == "greedy_coupling":
        drawn: list[int] = draw(weights.final[0], finals).tolist()
        node = accepted_node(rule, tree, passed, tokens.tolist(), drawn)
        token = drawn[node + 1]
    else:
        node = accepted_node(rule, tree, passed)
        row = slice(node + 1, node + 2)
        token = int(draw(weights.final[0, row], finals[row]))
    return TreeOutcome(
        path=tree.path(node),
        final_token=token,
        expected_accepted=float(expected_accepted(rule, tree, weights, tokens[None])),
    )


# -------------------------------------------------------------------------------- probability stage


def tree_weights(
    rule: TreeRule,
    tree: TokenTree,
    target_probs: TargetProbs,
    draft_probs: DraftProbs,
    tokens: Tokens,
) -> TreeWeights:
    """Return acceptance probabilities and final distributions under `rule`.

    Args:
        rule: one of `TreeRule`; the module says for which proposals it is exact.
        tree: topology of every tree of the batch.
        target_probs: the target's distribution after the root and after every node.
        draft_probs: the rows that children were drawn from, one per node of `expanded(tree)`.
        tokens: token of every node.
    """
    if rule == "traversal":
        return traversal_weights(tree, target_probs, draft_probs, tokens)
    if rule == "rejection":
        return rejection_weights(tree, target_probs, draft_probs, tokens)
    return greedy_coupling_weights(tree, target_probs, draft_probs, tokens)


def traversal_weights(
    tree: TokenTree, target_probs: TargetProbs, draft_probs: DraftProbs, tokens: Tokens
) -> TreeWeights:
    """Traversal Verification (2505.12398): leaves are tested first, in depth-first order.

    A node carries a weight w, 1 at the root and min(1, w(parent) P(node) / Q(node)) below it. A
    leaf is accepted with its weight. After a rejection its parent v is left with the distribution
    R / Z, R = [w(v) P_v - Q_v]+ and Z its sum, and with the weight Z / (Z + 1 - w(v)); the rejected
    token is removed from Q_v. A node whose children are all rejected becomes a leaf.
    """
    final, draft = target_probs.clone(), draft_probs.clone()
    rows = {parent: index for index, parent in enumerate(expanded(tree))}
    accept = torch.zeros_like(tokens, dtype=target_probs.dtype)
    root_weight = torch.ones_like(target_probs[:, 0, 0])

    def visit(node: int, weight: Tensor) -> Tensor:
        """Reject the children of a node one after the other; returns the weight it is left with."""
        for child in tree.children(node):
            row, token = rows[node], tokens[:, child, None]
            target = final[:, node + 1]
            ratio = _divided(_of(target, token), _of(draft[:, row], token))
            accept[:, child] = visit(child, (weight * ratio).clamp(max=1))
            residual = (weight[:, None] * target - draft[:, row]).clamp_(min=0)
            mass = residual.sum(-1)
            left = mass + (1 - weight)
            final[:, node + 1] = _residual_or(residual, mass, target)
            weight = torch.where(left > 0, _divided(mass, left), 1.0)
            draft[:, row] = _without(draft[:, row], token)
        return weight

    visit(-1, root_weight)
    return TreeWeights(accept=accept, final=final)


def rejection_weights(
    tree: TokenTree, target_probs: TargetProbs, draft_probs: DraftProbs, tokens: Tokens
) -> TreeWeights:
    """Recursive rejection without replacement (2402.14160): children are tested from the root down.

    A child is accepted with min(1, P / Q); after a rejection P is left with [P - Q]+, normalised,
    and the rejected token is removed from Q.
    """
    final, draft = target_probs.clone(), draft_probs.clone()
    accept = torch.zeros_like(tokens, dtype=target_probs.dtype)
    for row, node in enumerate(expanded(tree)):
        for child in tree.children(node):
            token, target = tokens[:, child, None], final[:, node + 1]
            ratio = _divided(_of(target, token), _of(draft[:, row], token))
            accept[:, child] = ratio.clamp(max=1)
            residual = (target - draft[:, row]).clamp_(min=0)
            final[:, node + 1] = _residual_or(residual, residual.sum(-1), target)
            draft[:, row] = _without(draft[:, row], token)
    return TreeWeights(accept=accept, final=final)


def greedy_coupling_weights(
    tree: TokenTree, target_probs: TargetProbs, draft_probs: DraftProbs, tokens: Tokens
) -> TreeWeights:
    """Greedy coupling (2502.18779): the drawn child is tested, its siblings wait for the residual.

    Only the last child of a node has a test, min(1, P / Q). The token that is drawn from [P - Q]+
    after a rejection may be one of the siblings, which is then accepted.
    """
    final = target_probs.clone()
    accept = torch.zeros_like(tokens, dtype=target_probs.dtype)
    for row, node in enumerate(expanded(tree)):
        drawn = tree.children(node)[-1]
        token, target, draft = tokens[:, drawn, None], final[:, node + 1], draft_probs[:, row]
        accept[:, drawn] = _divided(_of(target, token), _of(draft, token)).clamp(max=1)
        residual = (target - draft).clamp_(min=0)
        final[:, node + 1] = _residual_or(residual, residual.sum(-1), target)
    return TreeWeights(accept=accept, final=final)


def expected_accepted(
    rule: TreeRule, tree: TokenTree, weights: TreeWeights, tokens: Tokens
) -> Float[Tensor, " batch"]:
    """Return E[num_accepted | draft tokens] over the noise of verification."""
    accept = weights.accept
    if rule == "traversal":
        rejected = torch.ones_like(accept[:, 0])
        expected = torch.zeros_like(rejected)
        for node in post_order(tree):
            expected += tree.depths[node] * rejected * accept[:, node]
            rejected = rejected * (1 - accept[:, node])
        return expected
    reached = torch.zeros_like(accept)
    for node in (-1, *range(len(tree.parents))):
        left = torch.ones_like(accept[:, 0]) if node < 0 else reached[:, node].clone()
        children = tree.children(node)
        if rule == "rejection":
            for child in children:
                reached[:, child] = left * accept[:, child]
                left = left - reached[:, child]
        elif children:
            reached[:, children[-1]] = left * accept[:, children[-1]]
            left = left - reached[:, children[-1]]
            row = weights.final[:, node + 1]
            share = _divided(row, row.sum(-1, keepdim=True))
            for child in children[:-1]:
                reached[:, child] = left * _of(share, tokens[:, child, None])
    return reached.sum(-1)


# --------------------------------------------------------------------------------------- draw stage


def tree_keys(request_key: int, num_committed: int, num_nodes: int) -> tuple[list[int], list[int]]:
    """Return the keys of the acceptance tests, by node, and of the final draws, by row.

    Args:
        request_key: of the sample.
        num_committed: tokens at the start of the step: a rejected position is drawn again in the
            next step, with other noise.
        num_nodes: draft nodes.
    """
    tests = [step_key(request_key, num_committed, n, Purpose.ACCEPT) for n in range(num_nodes)]
    finals = [
        step_key(request_key, num_committed, row, Purpose.RECOVERED) for row in range(num_nodes + 1)
    ]
    return tests, finals


def accepted_node(
    rule: TreeRule,
    tree: TokenTree,
    passed: Sequence[bool],
    drafted: Sequence[int] = (),
    drawn: Sequence[int] = (),
) -> int:
    """Return the last accepted node, -1 where all were rejected.

    Args:
        rule: one of `TreeRule`.
        tree: topology.
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


# ------------------------------------------------------------------------------------------ details


def _divided(part: Tensor, whole: Tensor) -> Tensor:
    """Divide; 0 / 0 is 0, and no drawn token has a draft probability of 0."""
    return part / whole.clamp(min=torch.finfo(whole.dtype).tiny)


def _of(probs: Float[Tensor, "batch vocab"], token: Int64[Tensor, "batch 1"]) -> Tensor:
    return probs.gather(-1, token)[:, 0]


def _residual_or(residual: Tensor, mass: Tensor, target: Tensor) -> Tensor:
    """Normalise a residual; where nothing is left, both rows agree: keep the target's."""
    kept = _divided(residual, mass[:, None])
    return torch.where(mass[:, None] > 0, kept, target)


def _without(probs: Tensor, token: Tensor) -> Tensor:
    """Remove a drawn token and normalise; a row that held nothing else becomes 0."""
    left = probs.scatter(-1, token, 0.0)
    return _divided(left, left.sum(-1, keepdim=True))
