"""Verifiers with deliberate bugs, which the enumeration must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from forerun.doctor.exact.run import View, renormalised
from forerun.doctor.exact.trees import (
    ChainRows,
    ChainVerifier,
    DrawnTrees,
    Stage,
    TreeVerifier,
    engine_accept,
    engine_final,
    without,
)
from forerun.sampling.chain import Rule, prefix_ratios, residual_weights
from forerun.sampling.history import History, RowHistory
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.tree_rules import TreeWeights, tree_weights
from forerun.theory.tree import TokenTree, expanded


def _uncapped_accept(rows: ChainRows, rule: Rule) -> Tensor:
    """Bug: accept a block by the plain product of ratios instead of the capped product."""
    accept = engine_accept(rows, rule)
    nodes = rows.tokens[..., None]
    drawn = rows.draft[:, :-1].gather(-1, nodes).clamp(min=1e-50)  # drawn, hence positive
    product = (rows.target[:, :-1].gather(-1, nodes) / drawn)[..., 0].prod(-1)
    return torch.cat([accept[:, :-1], product.clamp(max=1)[:, None]], -1)


def _final_from_next_row(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    """Bug: take the residual from the row after the rejected token's row."""
    right = engine_final(rows, accepted, rule)
    chains = torch.arange(len(accepted))
    row = (accepted + 1).clamp(max=rows.target.shape[1] - 1)
    ratios = prefix_ratios(rows.target, rows.draft[:, :-1], rows.tokens, rows.num_drafted)
    ratio = ratios[chains, accepted] if rule == "block" else torch.ones_like(ratios[:, 0])
    wrong = residual_weights(rows.target[chains, row], rows.draft[chains, row], ratio)
    return torch.where((accepted < rows.num_drafted)[:, None], wrong, right)


def _bonus_from_draft(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    right = engine_final(rows, accepted, rule)
    draft_row = rows.draft[torch.arange(len(accepted)), accepted]
    return torch.where((accepted == rows.num_drafted)[:, None], draft_row, right)


def _position_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed + node, 0, Purpose.DRAFT)


def _accept_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed, node, Purpose.ACCEPT)


def _position_verify_keys(request_key: int, num_committed: int, num_nodes: int) -> list[int]:
    accept = [step_key(request_key, num_committed + i, 0, Purpose.ACCEPT) for i in range(num_nodes)]
    last = [step_key(request_key, num_committed, 0, p) for p in (Purpose.RECOVERED, Purpose.BONUS)]
    return accept + last


def _confident_after(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    return drawn_prob >= 0.25


def _committed_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return history.at()


def _masked_root_only(history: History, path: tuple[int, ...]) -> RowHistory:
    return RowHistory(base=history, path=path) if path else history.at()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedView:
    """History of a row with a deliberate bug, as the processors read it."""

    name: str
    shape: str
    view: View


def planted(
    name: str, *, rules: tuple[Rule, ...] = ("token", "block"), **replaced: Any
) -> tuple[str, tuple[ChainVerifier, ...]]:
    return name, tuple(ChainVerifier(rule=rule, **replaced) for rule in rules)


PLANTED = (
    planted("uncapped product", rules=("block",), accept=_uncapped_accept),
    planted("residual from the wrong row", final=_final_from_next_row),
    planted("bonus from the draft", final=_bonus_from_draft),
    planted("position-only draft noise", rules=("block",), draft_key=_position_draft_key),
    planted("position-only accept noise", rules=("block",), verify_keys=_position_verify_keys),
    planted("one noise for draft and acceptance", draft_key=_accept_draft_key),
    planted("drawn token dropped by its own probability", keep=_confident_after),
)

PLANTED_VIEWS = (
    PlantedView(
        name="penalty counts not extended along the path", shape="penalties", view=_committed_only
    ),
    PlantedView(name="mask not applied at draft nodes", shape="token mask", view=_masked_root_only),
)


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
    def stage(tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor) -> TreeWeights:
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
        return TreeWeights(accept, final)

    return stage


def _cut_by_own_probability(
    tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    """Bug: drop the last node if the draft gave its token a low probability."""
    last = len(tree.parents) - 1
    row = expanded(tree).index(tree.parents[last])
    is_cut = (draft[:, row].gather(-1, tokens[:, last, None])[:, 0] < LOW)[:, None]
    whole = tree_weights(tree, target, draft, tokens)
    smaller = TokenTree(tree.parents[:-1])
    kept = [expanded(tree).index(parent) for parent in expanded(smaller)]
    part = tree_weights(smaller, target[:, :-1], draft[:, kept], tokens[:, :-1])
    accept = torch.nn.functional.pad(part.accept, (0, 1))
    final = torch.cat([part.final, target[:, -1:]], 1)
    return TreeWeights(
        accept=torch.where(is_cut, accept, whole.accept),
        final=torch.where(is_cut[..., None], final, whole.final),
    )


def _of_another_request(
    tree: TokenTree, target: Tensor, draft: Tensor, tokens: Tensor
) -> TreeWeights:
    flatter = target.sqrt()
    return tree_weights(tree, flatter / flatter.sum(-1, keepdim=True), draft, tokens)


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


PLANTED_TREES = (
    ("tree: weight of a parent Z / sum Q", TreeVerifier(stage=traversal(_mass_over_draft))),
    ("tree: drawn token kept in Q", TreeVerifier(stage=traversal(keeps_drawn=True))),
    ("tree: siblings sorted", TreeVerifier(damage=_sorted_siblings)),
    ("tree: node cut by its own probability", TreeVerifier(stage=_cut_by_own_probability)),
    ("tree: most likely tokens called sampled", TreeVerifier(damage=_most_likely_called_sampled)),
    ("tree: parameters of another request", TreeVerifier(stage=_of_another_request)),
    ("tree: positions from an optimistic length", TreeVerifier(damage=_optimistic_positions)),
    ("tree: position-only noise", TreeVerifier(keys=_position_keys)),
)


def not_renormalised(logits: Tensor, columns: Tensor, is_missing: Tensor) -> tuple[Tensor, Tensor]:
    """Bug: verify with the draft's probabilities of the shared tokens, which do not sum to 1."""
    shared = logits.softmax(-1)[..., columns] * ~is_missing
    return renormalised(logits, columns, is_missing)[0], shared


def two_draft_tokens_for_one(
    logits: Tensor, columns: Tensor, is_missing: Tensor
) -> tuple[Tensor, Tensor]:
    """Bug: draw token 0 also where the draft drew a token that the target does not have."""
    probs = logits.softmax(-1)
    both = probs[..., columns] * ~is_missing
    unknown = min({*range(logits.shape[-1])} - {*columns.tolist()})
    both[..., 0] += probs[..., unknown]
    verified = renormalised(logits, columns, is_missing)[1]
    return both / both.sum(-1, keepdim=True), verified


PLANTED_MAPS = (not_renormalised, two_draft_tokens_for_one)
