"""Deliberate bugs in the verification of draft trees, which the enumeration must detect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.tree_residuals import TreeRule
from forerun.sampling.tree_rules import TreeWeights, tree_weights
from forerun.testing.exact.trees import DrawnTrees, Stage, TreeVerifier, without
from forerun.theory.tree import TokenTree, expanded

PLANTED_TREE = TokenTree((-1, -1, 0, 0))
"""The topology the bugs are tried on: two siblings, the first of which has two children."""
SIBLINGS = (0, 1)
LOW = 0.3
"""Probability below which a bug drops a drawn node."""

LeftWeight = Callable[[Tensor, Tensor, Tensor], Tensor]


def _right_weight(mass: Tensor, weight: Tensor, draft: Tensor) -> Tensor:
    return mass / (mass + 1 - weight).clamp(min=1e-300)


def _mass_over_draft(mass: Tensor, weight: Tensor, draft: Tensor) -> Tensor:
    return mass / draft.sum(-1).clamp(min=1e-300)


def traversal(left: LeftWeight = _right_weight, *, keeps_drawn: bool = False) -> Stage:
    def stage(
        rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
    ) -> TreeWeights:
        final, draft = target.clone(), draft.clone()
        rows = {parent: index for index, parent in enumerate(expanded(tree))}
        accept = torch.zeros_like(tokens, dtype=target.dtype)

        def visit(node: int, weight: Tensor) -> Tensor:
            for child in tree.children(node):
                row, token = draft[:, rows[node]], tokens[:, child, None]
                here = final[:, node + 1]
                ratio = here.gather(-1, token) / row.gather(-1, token).clamp(min=1e-300)
                accept[:, child] = visit(child, (weight * ratio[:, 0]).clamp(max=1)).clamp(max=1)
                residual = (weight[:, None] * here - row).clamp(min=0)
                mass = residual.sum(-1)
                kept = residual / mass.clamp(min=1e-300)[:, None]
                final[:, node + 1] = torch.where(mass[:, None] > 0, kept, here)
                weight = left(mass, weight, row.scatter(-1, token, 0.0)).clamp(max=1)
                if not keeps_drawn:
                    draft[:, rows[node]] = without(row, token[:, 0])
            return weight

        visit(-1, torch.ones_like(target[:, 0, 0]))
        return TreeWeights(accept=accept, final=final, shares=torch.zeros_like(accept))

    return stage


def _cut_by_own_probability(
    rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    """Bug: drop the last node if the draft gave its token a low probability."""
    last = len(tree.parents) - 1
    row = expanded(tree).index(tree.parents[last])
    is_cut = (draft[:, row].gather(-1, tokens[:, last, None])[:, 0] < LOW)[:, None]
    whole = tree_weights(rule, tree, target, draft, tokens)
    smaller = TokenTree(tree.parents[:-1])
    kept = [expanded(tree).index(parent) for parent in expanded(smaller)]
    part = tree_weights(rule, smaller, target[:, :-1], draft[:, kept], tokens[:, :-1])
    accept = torch.nn.functional.pad(part.accept, (0, 1))
    final = torch.cat([part.final, target[:, -1:]], 1)
    return TreeWeights(
        accept=torch.where(is_cut, accept, whole.accept),
        final=torch.where(is_cut[..., None], final, whole.final),
        shares=whole.shares,
    )


def _of_another_request(
    rule: TreeRule, tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    flatter = target.sqrt()
    return tree_weights(rule, tree, flatter / flatter.sum(-1, keepdim=True), draft, tokens)


def _sorted_siblings(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    """Bug: order the first siblings by their probabilities instead of their draws."""
    index = {tuple(draft): place for place, draft in enumerate(trees.tokens.tolist())}
    first, second = SIBLINGS
    swapped = []
    for draft in trees.tokens.tolist():
        draft[first], draft[second] = draft[second], draft[first]
        swapped.append(index[tuple(draft)])
    root = trees.draft[..., 0, :]
    one, other = (
        root.gather(-1, trees.tokens[:, node].expand(root.shape[:-1])[..., None])[..., 0]
        for node in SIBLINGS
    )
    probs = torch.where(one >= other, trees.probs + trees.probs[..., swapped], 0.0)
    return replace(trees, probs=torch.where(one == other, trees.probs, probs))


def _most_likely_called_sampled(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    """Bug: propose the most likely tokens and declare them as drawn."""
    probs = torch.ones_like(trees.probs)
    for row, parent in enumerate(expanded(tree)):
        top = trees.draft[..., row, :].argsort(dim=-1, descending=True, stable=True)
        for rank, child in enumerate(tree.children(parent)):
            probs = probs * (top[..., rank] == trees.tokens[:, child])
    return replace(trees, probs=probs)


def _optimistic_positions(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    return replace(trees, target=trees.target.roll(-1, 3))


def _position_keys(
    request_key: int, num_committed: int, num_nodes: int
) -> tuple[list[int], list[int]]:
    """Bug: derive the keys of tests and final draws from the position alone."""
    tests = [step_key(request_key, num_committed + n, 0, Purpose.ACCEPT) for n in range(num_nodes)]
    finals = [
        step_key(request_key, num_committed + n, 0, Purpose.RECOVERED) for n in range(num_nodes + 1)
    ]
    return tests, finals


def planted(name: str, *rules: TreeRule, **replaced: object) -> tuple[str, list[TreeVerifier]]:
    return name, [
        TreeVerifier(rule=rule, **replaced)  # type: ignore[arg-type]  # functions of its stages
        for rule in rules
    ]


PLANTED_TREES = (
    planted("tree: weight of a parent Z / sum Q", "traversal", stage=traversal(_mass_over_draft)),
    planted("tree: drawn token kept in Q", "traversal", stage=traversal(keeps_drawn=True)),
    planted("tree: siblings sorted", "traversal", "rejection", damage=_sorted_siblings),
    planted(
        "tree: node cut by its own probability",
        "traversal",
        "rejection",
        stage=_cut_by_own_probability,
    ),
    planted(
        "tree: most likely tokens called sampled",
        "traversal",
        "rejection",
        damage=_most_likely_called_sampled,
    ),
    planted(
        "tree: parameters of another request",
        "traversal",
        "rejection",
        "greedy_coupling",
        stage=_of_another_request,
    ),
    planted(
        "tree: positions from an optimistic length",
        "traversal",
        "rejection",
        "greedy_coupling",
        damage=_optimistic_positions,
    ),
    planted(
        "tree: position-only noise",
        "traversal",
        "rejection",
        "greedy_coupling",
        keys=_position_keys,
    ),
)
