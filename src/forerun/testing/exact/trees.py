"""Enumerates two steps with sampled draft trees over all drafts and test outcomes.

The noise of a step is keyed by the committed length, by node and by purpose, so that no key occurs
twice (`_check_keys`). Then all draws are independent and the probability of a text is a sum over
drafts and outcomes. The outcomes are those of the engine's draw stage on every pattern of passed
and failed tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.tree_rules import (
    TreeRule,
    TreeWeights,
    accepted_node,
    tree_keys,
    tree_weights,
)
from forerun.testing.exact.chains import NUM_PROMPT, REQUEST, Emitted, loaded_kernels
from forerun.testing.exact.pairs import Inexact, ModelPairs
from forerun.theory.tree import TokenTree, expanded

Stage = Callable[[TreeRule, TokenTree, Tensor, Tensor, Tensor], TreeWeights]
Keys = Callable[[int, int, int], tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTrees:
    """All drafts with one tree topology, after every prefix of one length.

    Attributes:
        draft: row of each expanded parent that its children were drawn from.
        target: the target's row after the prefix and after every node.
    """

    tokens: Int64[Tensor, "drafts nodes"]
    probs: Float64[Tensor, "pairs prefixes drafts"]
    draft: Float64[Tensor, "pairs prefixes drafts parents vocab"]
    target: Float64[Tensor, "pairs prefixes drafts rows vocab"]


def kernel_weights(
    rule: TreeRule,
    tree: TokenTree,
    target_probs: Float64[Tensor, "batch rows vocab"],
    draft_probs: Float64[Tensor, "batch parents vocab"],
    tokens: Int64[Tensor, "batch nodes"],
) -> TreeWeights:
    assert rule == "traversal"
    accept, weights = loaded_kernels().tree_weights(tree, target_probs, draft_probs, tokens)
    return TreeWeights(accept=accept, final=weights, shares=torch.zeros_like(accept))


def _as_drawn(trees: DrawnTrees, tree: TokenTree) -> DrawnTrees:
    return trees


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeVerifier:
    """Functions that draw and verify trees in the enumeration, by default the engine's."""

    rule: TreeRule
    stage: Stage = tree_weights
    damage: Callable[[DrawnTrees, TokenTree], DrawnTrees] = _as_drawn
    keys: Keys = tree_keys


def all_trees(max_nodes: int, max_depth: int, max_width: int) -> list[TokenTree]:
    """Return every ordered tree with 2 to `max_nodes` nodes within limits, sorted by level."""
    found = []
    for num_nodes in range(2, max_nodes + 1):
        for parents in product(*(range(-1, node) for node in range(num_nodes))):
            if list(parents) != sorted(parents):
                continue
            tree = TokenTree(parents)
            width = max(parents.count(parent) for parent in parents)
            if max(tree.depths) <= max_depth and width <= max_width:
                found.append(tree)
    return found


def emit_trees(
    pairs: ModelPairs, verifier: TreeVerifier, tree: TokenTree, second: TokenTree
) -> Emitted:
    """Return the output distribution of two steps, completed by the target to the horizon."""
    _check_keys(verifier, tree, second)
    mass: dict[int, Tensor] = {}
    num_histories = 0
    for length, first in step(pairs, verifier, tree, 0).items():
        for more, then in step(pairs, verifier, second, length).items():
            joint = (first[:, 0, :, None] * then).flatten(1)
            mass[length + more] = mass.get(length + more, 0.0) + joint
            num_histories += int(joint.count_nonzero())
    return Emitted(joint=pairs.complete(mass), num_histories=num_histories)


def step(
    pairs: ModelPairs, verifier: TreeVerifier, tree: TokenTree, start: int
) -> dict[int, Float64[Tensor, "pairs prefixes texts"]]:
    """Return the probability of every emitted text by length, after every prefix of `start`."""
    vocab, rule = pairs.vocab_size, verifier.rule
    trees = verifier.damage(_draw_trees(pairs, tree, start, rule), tree)
    num_nodes = len(tree.parents)
    shape = trees.probs.shape
    tokens = trees.tokens.expand(*shape, num_nodes).flatten(0, 2)
    weights = verifier.stage(
        rule, tree, trees.target.flatten(0, 2), trees.draft.flatten(0, 2), tokens
    )
    final = weights.final / weights.final.sum(-1, keepdim=True)
    emitted: dict[int, Tensor] = {}
    for node, prob in reach_probs(rule, tree, weights.accept, final, tokens).items():
        path = tree.path(node)
        rows = (trees.probs.flatten() * prob)[:, None] * final[:, node + 1]
        if rule == "greedy_coupling":
            for child in tree.children(node)[:-1]:  # a token of theirs goes on instead
                rows = rows.scatter(-1, tokens[:, child, None], 0.0)
        texts = torch.zeros(*shape[:2], vocab ** len(path) * vocab, dtype=torch.float64)
        index = _spelled(trees.tokens, path, vocab)[:, None] * vocab + torch.arange(vocab)
        texts.index_add_(2, index.flatten(), rows.reshape(*shape[:2], -1))
        emitted[len(path) + 1] = emitted.get(len(path) + 1, 0.0) + texts
    return emitted


def reach_probs(
    rule: TreeRule, tree: TokenTree, accept: Tensor, final: Tensor, tokens: Tensor
) -> dict[int, Tensor]:
    """Return the probability that each node is the last accepted one.

    It sums the engine's draw stage over all patterns of passed and failed tests. Greedy coupling
    draws a token at every node it visits: the result is then the probability to arrive there and to
    fail the test of its last child, whatever is drawn next.
    """
    nodes = range(len(tree.parents))
    if rule == "greedy_coupling":
        return _coupled_reach_probs(tree, accept, final, tokens)
    found: dict[int, Tensor] = {}
    for passed in product((False, True), repeat=len(nodes)):
        node = accepted_node(rule, tree, passed)
        prob = torch.ones_like(accept[:, 0])
        for at in nodes:
            prob = prob * (accept[:, at] if passed[at] else 1 - accept[:, at])
        found[node] = found.get(node, 0.0) + prob
    return found


def _coupled_reach_probs(
    tree: TokenTree, accept: Tensor, final: Tensor, tokens: Tensor
) -> dict[int, Tensor]:
    arrived = {-1: torch.ones_like(accept[:, 0])}
    found: dict[int, Tensor] = {}
    for node in (-1, *range(len(tree.parents))):
        children, here = tree.children(node), arrived[node]
        if children:
            drawn = children[-1]
            arrived[drawn] = here * accept[:, drawn]
            here = here * (1 - accept[:, drawn])
            for child in children[:-1]:
                share = final[:, node + 1].gather(-1, tokens[:, child, None])[:, 0]
                arrived[child] = here * share
        found[node] = here
    return found


def _draw_trees(pairs: ModelPairs, tree: TokenTree, start: int, rule: TreeRule) -> DrawnTrees:
    """Enumerate drafts after every prefix: children drawn without replacement, or the top ones."""
    vocab, num_nodes = pairs.vocab_size, len(tree.parents)
    tokens = torch.tensor(list(product(range(vocab), repeat=num_nodes)))
    prefixes = torch.arange(vocab**start)
    probs = torch.ones(pairs.num_pairs, len(prefixes), len(tokens), dtype=torch.float64)
    draft: list[Tensor] = []
    for parent in expanded(tree):
        path = tree.path(parent)
        after = prefixes[:, None] * vocab ** len(path) + _spelled(tokens, path, vocab)
        row = pairs.draft[start + len(path)][:, after]
        drawn, children = row, tree.children(parent)
        if rule == "greedy_coupling":
            top = row.argsort(dim=-1, descending=True, stable=True)
            for rank, child in enumerate(children[:-1]):
                probs = probs * (top[..., rank] == tokens[:, child])
                drawn = without(drawn, tokens[:, child])
            row, children = drawn, children[-1:]
        draft.append(row)
        for child in children:
            token = tokens[:, child].expand(drawn.shape[:-1])[..., None]
            probs = probs * drawn.gather(-1, token)[..., 0]
            drawn = without(drawn, tokens[:, child])
    target = [
        pairs.target[start + len(tree.path(node))][
            :,
            prefixes[:, None] * vocab ** len(tree.path(node))
            + _spelled(tokens, tree.path(node), vocab),
        ]
        for node in range(-1, num_nodes)
    ]
    return DrawnTrees(
        tokens=tokens, probs=probs, draft=torch.stack(draft, 3), target=torch.stack(target, 3)
    )


def without(rows: Tensor, tokens: Int64[Tensor, " drafts"]) -> Tensor:
    """Remove a token from every row and renormalise; a row may become 0."""
    left = rows.scatter(-1, tokens.expand(rows.shape[:-1])[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=1e-300)


def _spelled(tokens: Int64[Tensor, "drafts nodes"], path: tuple[int, ...], vocab: int) -> Tensor:
    value = torch.zeros(len(tokens), dtype=torch.int64)
    for node in path:
        value = value * vocab + tokens[:, node]
    return value


def _check_keys(verifier: TreeVerifier, first: TokenTree, second: TokenTree) -> None:
    """Refuse noise keys that occur twice in a step or in two consecutive steps."""
    at_start = set(_keys_of(verifier, first, NUM_PROMPT))
    for num_emitted in range(1, max(first.depths) + 2):
        keys = [*_keys_of(verifier, second, NUM_PROMPT + num_emitted)]
        if len(set(keys)) < len(keys) or at_start.intersection(keys):
            raise Inexact("a noise key decides twice")


def _keys_of(verifier: TreeVerifier, tree: TokenTree, num_committed: int) -> Iterator[int]:
    """Return all noise keys of one step: draft draws, acceptance tests and final draws."""
    num_nodes = len(tree.parents)
    for node in range(num_nodes):
        yield step_key(REQUEST, num_committed, node, Purpose.DRAFT)
    tests, finals = verifier.keys(REQUEST, num_committed, num_nodes)
    yield from tests
    yield from finals
