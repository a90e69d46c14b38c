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

Every rule rejects the children of a node one after the other. With P the target's row at the node,
Q the draft's and w the node's weight, a rejection of x leaves

    R = [w P - Q]+,  Z = sum R,  w <- Z / (Z + 1 - w),  P <- R / Z,  Q <- Q without x, normalised.

Since [[a]+ - b]+ = [a - b]+ where b is not negative, w P stays of the form [scale P - shift Q]+ of
the rows as they came, but for the tokens removed from Q, whose values are kept apart. So a
rejection takes one sum over the vocabulary, and only the row that the final token is drawn from is
ever written out. Recursive rejection and greedy coupling are the same with w = 1 at every node.

Nodes are worked on level by level, and in a level by rank: the first children of all nodes of all
trees in one operation, then the second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, zip_longest
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for, on_host
from forerun.sampling.noise import Purpose, draw, step_keys, uniform
from forerun.sampling.processors import failed_rows
from forerun.theory.tree import TokenTree, expanded, post_order

TreeRule = Literal["traversal", "rejection", "greedy_coupling"]


class Level(NamedTuple):
    """The inner nodes of all trees at one depth, those with the most tested children first.

    Attributes:
        children: by rank, the nodes that are tested, of as many of them as have so many.
    """

    places: slice
    children: tuple[Int64[Tensor, " some"], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Forest:
    """Row indices of the nodes of several trees in one pass, with inner nodes by level.

    Attributes:
        levels: the inner nodes, the roots first.
        draft_rows: and its draft row.
        nodes: and its number over all trees; meaningless for roots.
        places: of every target row its place among the inner nodes; -1 for leaves.
        node_rows: of every node its target row.
        post_order: of every tree its nodes in post-order, padded with the number of all nodes.
        untested: nodes without a test of their own.
        above: the target rows of their parents.
    """

    levels: tuple[Level, ...]
    target_rows: Int64[Tensor, " parents"]
    draft_rows: Int64[Tensor, " parents"]
    nodes: Int64[Tensor, " parents"]
    places: Int64[Tensor, " rows"]
    node_rows: Int64[Tensor, " nodes"]
    root_rows: Int64[Tensor, " trees"]
    post_order: Int64[Tensor, "trees most"]
    untested: Int64[Tensor, " untested"]
    above: Int64[Tensor, " untested"]


class Inner(NamedTuple):
    """An inner node of one of several trees: depth, tested children and row indices."""

    depth: int
    num_untested: int
    tested: tuple[int, ...]
    target_row: int
    draft_row: int
    node: int


def _inner_nodes(trees: Sequence[TokenTree], rule: TreeRule) -> list[Inner]:
    """Return all inner nodes level by level, those with the most tested children first."""
    found = []
    first_node = first_draft = 0
    for index, tree in enumerate(trees):
        for row, parent in enumerate(expanded(tree)):
            children = tree.children(parent)
            tested = children[-1:] if rule == "greedy_coupling" else children
            found.append(
                Inner(
                    depth=tree.depths[parent] if parent >= 0 else 0,
                    num_untested=-len(tested),
                    tested=tuple(first_node + child for child in tested),
                    target_row=first_node + index + parent + 1,
                    draft_row=first_draft + row,
                    node=first_node + parent,
                )
            )
        first_node += len(tree.parents)
        first_draft += len(expanded(tree))
    return sorted(found)


@lru_cache(maxsize=256)
def forest_of(
    trees: tuple[TokenTree, ...], rule: TreeRule, *, device: torch.device, copies: int = 1
) -> Forest:
    """Return the row indices of the nodes of several trees, or of many copies of them."""
    num_nodes = sum(len(tree.parents) for tree in trees)
    num_rows, num_drafts = num_nodes + len(trees), sum(len(expanded(tree)) for tree in trees)
    offsets = torch.arange(copies, device=device)

    def spread(numbers: Sequence[int], stride: int) -> Tensor:
        """Return the indices, each followed by those of its copies."""
        own = torch.tensor(numbers, dtype=torch.int64, device=device)
        return (own[:, None] + stride * offsets).flatten()

    inner, levels, start = _inner_nodes(trees, rule), [], 0
    for depth in range(max(node.depth for node in inner) + 1):
        group = [node.tested for node in inner if node.depth == depth]
        ranks = zip_longest(*group)  # those with fewer children come last
        children = tuple(spread([n for n in rank if n is not None], num_nodes) for rank in ranks)
        end = start + len(group) * copies
        levels.append(Level(places=slice(start, end), children=children))
        start = end
    target_rows = spread([node.target_row for node in inner], num_rows)
    places = torch.full((num_rows * copies,), -1, dtype=torch.int64, device=device)
    places[target_rows] = torch.arange(len(target_rows), device=device)
    sizes = [len(tree.parents) for tree in trees]
    roots = [row + index for index, row in enumerate(accumulate([0, *sizes[:-1]]))]
    node_rows = [root + 1 + n for root, size in zip(roots, sizes, strict=True) for n in range(size)]
    orders = [
        [root - index + node for node in post_order(tree)] + [num_nodes] * (max(sizes) - size)
        for index, (root, size, tree) in enumerate(zip(roots, sizes, trees, strict=True))
    ]
    tested = {node for place in inner for node in place.tested}
    untested = [node for node in range(num_nodes) if node not in tested]
    above = [root + 1 + p for root, tree in zip(roots, trees, strict=True) for p in tree.parents]
    return Forest(
        levels=tuple(levels),
        target_rows=target_rows,
        draft_rows=spread([node.draft_row for node in inner], num_drafts),
        nodes=spread([node.node for node in inner], num_nodes),
        places=places,
        node_rows=spread(node_rows, num_rows),
        root_rows=torch.tensor(roots, device=device),
        post_order=torch.tensor(orders, dtype=torch.int64, device=device),
        untested=spread(untested, num_nodes),
        above=spread([above[node] for node in untested], num_rows),
    )


class Residuals:
    """Distributions of inner nodes, updated as their children are rejected one after another.

    Attributes:
        accept: acceptance probability of every node, given that the tests before its own failed.
        shares: of every node without a test the probability that the token drawn after the last
            rejection at its parent is its own; 0 for the others.
    """

    def __init__(
        self,
        forest: Forest,
        target_probs: Float[Tensor, "rows vocab"],
        draft_probs: Float[Tensor, "parents vocab"],
    ) -> None:
        self.forest = forest
        self.target_probs = target_probs
        self._target = target_probs.index_select(0, forest.target_rows)
        self._draft = draft_probs.to(target_probs.device).index_select(0, forest.draft_rows)
        self._valid = ~failed_rows(self._target)
        ones = torch.ones_like(self._target[:, 0])
        most = max(len(level.children) for level in forest.levels)
        self._weight, self._scale, self._shift = ones.clone(), ones.clone(), torch.zeros_like(ones)
        self._left = ones  # the mass of the draft's row without the removed tokens
        self._removed = self._target.new_zeros(len(ones), most)
        self._removed_ids = torch.zeros_like(self._removed, dtype=torch.int64)
        self.accept = self._target.new_zeros(len(forest.node_rows))
        self.shares = torch.zeros_like(self.accept)

    def reject(self, first: int, rank: int, nodes: Tensor, tokens: Tensor) -> None:
        """Test and reject one child of each inner node from number `first` on."""
        at = slice(first, first + len(nodes))
        target, draft, scale = self._target[at], self._draft[at], self._scale[at]
        valid, left, tokens = self._valid[at], self._left[at], tokens[:, None]
        target_x, draft_x = target.gather(1, tokens)[:, 0], draft.gather(1, tokens)[:, 0]
        weighted = (scale * target_x - self._shift[at] * draft_x).clamp_(min=0)
        ratio = weighted * left / draft_x.clamp(min=torch.finfo(draft_x.dtype).tiny)
        self.accept[nodes] = torch.where(valid, ratio.clamp_(max=1), 0.0)
        shift = self._shift[at] + torch.where(left > 0, 1 / left, 0.0)
        target.scatter_(1, tokens, 0.0)
        draft.scatter_(1, tokens, 0.0)
        own = (scale * target_x - shift * draft_x).clamp_(min=0)
        residual = (target * scale[:, None]).sub_(draft * shift[:, None]).clamp_(min=0)
        mass = residual.sum(-1) + self._removed[at].sum(-1) + own
        rest = mass + (1 - self._weight[at])
        factor = torch.where(rest > 0, 1 / rest, 0.0)
        # Where nothing is left both rows agree, and no test of a later child is ever reached.
        weight = torch.where(rest > 0, mass * factor, 1.0)
        self._weight[at] = torch.where(valid, weight, self._weight[at])
        self._scale[at], self._shift[at] = scale * factor, shift * factor
        self._removed[at] *= factor[:, None]
        self._removed[at, rank], self._removed_ids[at, rank] = own * factor, tokens[:, 0]
        self._left[at] = draft.sum(-1)

    def enter(self, places: slice) -> None:
        weight = self.accept[self.forest.nodes[places]]
        self._weight[places] = self._scale[places] = weight

    def leave(self, places: slice) -> None:
        """Set the acceptance probabilities of inner nodes to their remaining weights."""
        self.accept[self.forest.nodes[places]] = self._weight[places]

    def share(self, tokens: Int64[Tensor, " nodes"]) -> None:
        """Compute `shares`, the residual weights of the children that are not tested."""
        nodes, places = self.forest.untested, self.forest.places[self.forest.above]
        ids = tokens[nodes]
        target, draft = self._target[places, ids], self._draft[places, ids]
        share = self._scale[places] * target - self._shift[places] * draft
        self.shares[nodes] = share.clamp_(min=0)

    def final(self, rows: Int64[Tensor, " some"]) -> Float[Tensor, "some vocab"]:
        """Return unnormalised distributions of the token after rows whose children are rejected.

        Where nothing is left, both rows agree: it is the target's.
        """
        places, own = self.forest.places[rows], self.target_probs.index_select(0, rows)
        at = places.clamp(min=0)
        left = self._target[at].mul_(self._scale[at, None])
        left.sub_(self._draft[at].mul_(self._shift[at, None])).clamp_(min=0)
        left.scatter_add_(1, self._removed_ids[at], self._removed[at])
        is_residual = (places >= 0) & (left.sum(-1) > 0)
        return torch.where(is_residual[:, None], left, own)


def residuals_of(
    rule: TreeRule,
    forest: Forest,
    target_probs: Float[Tensor, "rows vocab"],
    draft_probs: Float[Tensor, "parents vocab"],
    tokens: Int64[Tensor, " nodes"],
) -> Residuals:
    """Reject all children of all inner nodes in turn and store each acceptance probability.

    Nothing is accepted after a row without a distribution.
    """
    found = Residuals(forest, target_probs, draft_probs)
    for depth, (places, children) in enumerate(forest.levels):
        carries = rule == "traversal" and depth > 0
        if carries:
            found.enter(places)
        for rank, nodes in enumerate(children):
            found.reject(places.start, rank, nodes, tokens[nodes])
        if carries:
            found.leave(places)
    if len(forest.untested):
        found.share(tokens)
    return found


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
