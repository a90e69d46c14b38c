"""Verifying a fixed number of drafted nodes across a batch: who drafts how deep.

Source of the rule: a node is worth the probability that everything up to it is accepted, and costs
one row wherever it stands; so the R best nodes of a batch are the R of highest survival. Survival
never rises with depth, so taking them greedily never takes a node before its parent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

__all__ = ["best_nodes", "depths_within"]


def best_nodes(survival: Sequence[Sequence[float]]) -> Iterator[tuple[int, float]]:
    """Requests in the order in which each should be given one node more.

    Args:
        survival: per request, P(accepted through i) for every position it may draft,
            non-increasing.

    Yields:
        Index of the request, and the survival of its next node; of equals the first request.
        O(log requests) each.
    """
    heap = [(-curve[0], index, 0) for index, curve in enumerate(survival) if curve]
    heapify(heap)
    while heap:
        lost, index, depth = heap[0]
        yield index, -lost
        curve = survival[index]
        if depth + 1 < len(curve):
            heapreplace(heap, (-curve[depth + 1], index, depth + 1))
        else:
            heappop(heap)


def depths_within(survival: Sequence[Sequence[float]], num_nodes: int) -> list[int]:
    """K per request that makes most of at most `num_nodes` drafted nodes in all.

    Raises:
        ValueError: the budget is negative.
    """
    if num_nodes < 0:
        raise ValueError(f"num_nodes is {num_nodes}; it must be 0 or more")
    depths = [0] * len(survival)
    for (index, _), _ in zip(best_nodes(survival), range(num_nodes), strict=False):
        depths[index] += 1
    return depths
