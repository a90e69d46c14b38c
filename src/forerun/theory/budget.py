"""Division of a fixed number of drafted nodes among the requests of a batch.

Source of the rule: a node is worth the probability that everything up to it is accepted, and costs
one row wherever it stands; so the R best nodes of a batch are the R of highest survival. Survival
never rises with depth, so taking them in this order never takes a node before its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

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


def depths_within(survival: Sequence[Sequence[float]], num_nodes: int) -> list[int]:
    """Return the K per request with the most expected accepted tokens from `num_nodes` nodes."""
    if num_nodes < 0:
        raise ValueError(f"num_nodes is {num_nodes}; it must be 0 or more")
    depths = [0] * len(survival)
    for _, _, index in ranked_nodes(survival)[:num_nodes]:
        depths[index] += 1
    return depths


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
        num_nodes: the most nodes.
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
