"""Token trees: parents, depths, children and paths, and the best tree of a number of nodes.

A node is worth the probability that everything up to it is accepted, and costs one row wherever it
stands; so the R best nodes of a batch are the R of highest survival. Survival never rises with
depth, so taking them in this order never takes a node before its parent. The best tree for
acceptance by rank follows from the dynamic programme of Sequoia (2402.12374), section 3: its shape
depends on no token, so a static tree is exact for sampled tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from heapq import heappop, heappush


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The shape of one proposal, without its tokens.

    Nodes are numbered in topological order, siblings in the order they were drawn. Node -1 is the
    last committed token: everything hangs off it, but it is no node itself.

    Attributes:
        parents: parent of every node, smaller than the node itself; -1 for children of the last
            committed token.
        depths: tokens between the committed text and each node's end: 1 for children of node -1.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _children: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the parents, and derive the depths and children once."""
        depths: list[int] = []
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"parent of node {node} is {parent}; it must be -1 or an earlier node, "
                    "so list parents before their children"
                )
            depths.append(1 + depths[parent] if parent >= 0 else 1)
            children[parent + 1].append(node)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "_children", tuple(map(tuple, children)))

    @classmethod
    def chain(cls, num_nodes: int) -> TokenTree:
        """Return the tree with one path of `num_nodes` nodes, the same object every time."""
        return _build_chain(num_nodes)

    @property
    def is_chain(self) -> bool:
        """Return whether no node has a sibling, which holds for the empty tree."""
        # Only if all other nodes are its ancestors can the last node be that deep.
        return not self.depths or self.depths[-1] == len(self.depths)

    @property
    def width(self) -> int:
        """Return the most children of a node."""
        return max(map(len, self._children))

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of `node` in draw order; -1 is the last committed token."""
        return self._children[node + 1]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root down to `node`, itself included; none for -1."""
        upwards = []
        while node >= 0:
            upwards.append(node)
            node = self.parents[node]
        return tuple(reversed(upwards))

    def ancestor_mask(self) -> tuple[tuple[bool, ...], ...]:
        """Return the square mask whose row i is true at i and at its ancestors."""
        return _build_mask(self.parents)


NO_TREE = TokenTree(())
"""The proposal of a plain step."""

# The same chains and templates recur in every step, so what is derived from them is cached.


@lru_cache(maxsize=1024)
def _build_chain(num_nodes: int) -> TokenTree:
    if num_nodes < 0:
        raise ValueError(f"a chain of {num_nodes} nodes; it takes 0 or more")
    return TokenTree(tuple(range(-1, num_nodes - 1)))


@lru_cache(maxsize=1024)
def _build_mask(parents: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    rows: list[tuple[bool, ...]] = []
    for node, parent in enumerate(parents):
        above = rows[parent] if parent >= 0 else (False,) * len(parents)
        rows.append((*above[:node], True, *above[node + 1 :]))
    return tuple(rows)


@lru_cache(maxsize=1024)
def expanded(tree: TokenTree) -> tuple[int, ...]:
    """Return the nodes that have children, ascending; -1 is the last committed token."""
    return tuple(sorted(set(tree.parents)))


@lru_cache(maxsize=1024)
def post_order(tree: TokenTree) -> tuple[int, ...]:
    """Return every node after all its descendants, siblings in draw order."""
    order: list[int] = []

    def visit(node: int) -> None:
        for child in tree.children(node):
            visit(child)
            order.append(child)

    visit(-1)
    return tuple(order)


Node = tuple[float, int, int]
"""A position that a request may draft: minus its survival, positions before it, the request."""


def ranked_nodes(survival: Sequence[Sequence[float]]) -> list[Node]:
    """Return all nodes in descending order of survival; ties go to the shallowest, then by request.

    Args:
        survival: per request, P(accepted through i) for every position it may draft,
            non-increasing.
    """
    return sorted(
        (-survived, depth, index)
        for index, curve in enumerate(survival)
        for depth, survived in enumerate(curve)
    )


def tree_survival(
    first: Sequence[float], later: Sequence[float], *, depth: int, num_nodes: int
) -> list[float]:
    """Return P(accepted) of the nodes of the best tree of a size, in descending order.

    It is the tree that best-first growth gives where acceptance depends on depth and rank alone, so
    every beginning of the list belongs to a tree too.

    Args:
        first: P(the most likely child is accepted | its parent is), by level from 1 on.
        later: P(the child of rank 2, 3, ... is accepted | its parent is, the ranks before are not),
            at every level.
        depth: the most levels; at most as many as `first` has.
    """
    found: list[float] = []
    # Minus P(accepted), level, rank, and P(the parent is accepted and the ranks before are not).
    heap = [(-first[0], 0, 0, 1.0)] if depth else []
    while heap and len(found) < num_nodes:
        lost, level, rank, before = heappop(heap)
        found.append(-lost)
        if level + 1 < depth:
            heappush(heap, (lost * first[level + 1], level + 1, 0, -lost))
        if rank < len(later):
            left = before + lost
            heappush(heap, (-left * later[rank], level, rank + 1, left))
    return found


def static_tree(
    acceptance_by_rank: Sequence[float], num_nodes: int, depth: int, width: int
) -> TokenTree:
    """Return the tree with the largest expected number of accepted nodes, numbered depth-first.

    Args:
        acceptance_by_rank: probability that the child of each rank is the accepted one, given that
            its parent was accepted; one entry per rank, adding up to at most 1.

    Raises:
        ValueError: a size is below 1, or the acceptances are not probabilities of one event.
    """
    if min(num_nodes, depth, width) < 1:
        raise ValueError(
            f"a tree of {num_nodes} nodes, depth {depth} and width {width}; each is at least 1"
        )
    if min(acceptance_by_rank, default=0) < 0 or not sum(acceptance_by_rank) <= 1 + 1e-9:
        raise ValueError(
            f"acceptance by rank {tuple(acceptance_by_rank)}: probabilities that add up to at most "
            "1 are needed"
        )
    ranks = tuple(acceptance_by_rank[:width])
    return TokenTree(_build_static_tree(ranks, num_nodes, min(depth, num_nodes)))


@lru_cache(maxsize=256)
def _build_static_tree(ranks: tuple[float, ...], num_nodes: int, depth: int) -> tuple[int, ...]:
    """Return the parents of the best tree's nodes, in depth-first order.

    `best(n, d, r)` is the most that n nodes can add in d levels under an accepted node, by its
    children of rank r and later, with the number of nodes given to the subtree of child r.
    """

    @cache
    def best(nodes: int, levels: int, rank: int) -> tuple[float, int]:
        if nodes == 0 or levels == 0 or rank == len(ranks):
            return 0.0, 0
        # Of equal values the larger subtree wins: a chain costs no gather.
        return max(
            (
                ranks[rank] * (1 + best(size - 1, levels - 1, 0)[0])
                + best(nodes - size, levels, rank + 1)[0],
                size,
            )
            for size in range(1, nodes + 1)
        )

    parents: list[int] = []

    def place(nodes: int, levels: int, rank: int, parent: int) -> None:
        while (size := best(nodes, levels, rank)[1]) > 0:
            node = len(parents)
            parents.append(parent)
            place(size - 1, levels - 1, 0, node)
            nodes, rank = nodes - size, rank + 1

    place(num_nodes, depth, 0, -1)
    return tuple(parents)
