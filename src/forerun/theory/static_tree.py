"""The best tree for acceptance by rank, by Sequoia's dynamic programme.

Source: Sequoia (2402.12374), section 3. The shape depends on no token, so a static tree is exact
for sampled tokens too. It suits them, and drafts for which deciding level by level is expensive.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

from forerun.theory.tree import TokenTree


def static_tree(
    acceptance_by_rank: Sequence[float], num_nodes: int, depth: int, width: int
) -> TokenTree:
    """Return the tree with the largest expected number of accepted nodes, numbered depth-first.

    Args:
        acceptance_by_rank: probability that the child of each rank is the accepted one, given that
            its parent was accepted; one entry per rank, adding up to at most 1.
        num_nodes: the most nodes, the last committed token not counted.
        depth: the most levels.
        width: the most children of a node.

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
    return TokenTree(_static_tree(ranks, num_nodes, min(depth, num_nodes)))


def expected_static(tree: TokenTree, acceptance_by_rank: Sequence[float]) -> float:
    """Return the expected number of accepted nodes of a tree; missing ranks have probability 0."""
    reached: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children(parent).index(node)
        chance = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)


@lru_cache(maxsize=256)
def _static_tree(ranks: tuple[float, ...], num_nodes: int, depth: int) -> tuple[int, ...]:
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
