"""How a fixed number of drafted nodes is divided among the requests of a batch.

Source of the rule: a node is worth the probability that everything up to it is accepted, and costs
one row wherever it stands; so the R best nodes of a batch are the R of highest survival. Survival
never rises with depth, so taking them in this order never takes a node before its parent.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["Node", "depths_within", "ranked_nodes"]


Node = tuple[float, int, int]
"""A position that a request may draft: minus its survival, positions before it, the request."""


def ranked_nodes(survival: Sequence[Sequence[float]]) -> list[Node]:
    """Return all nodes, the best first; among equals the shallowest, then the first request's.

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
    """Return the K per request that makes the most of at most `num_nodes` drafted nodes.

    Raises:
        ValueError: the budget is negative.
    """
    if num_nodes < 0:
        raise ValueError(f"num_nodes is {num_nodes}; it must be 0 or more")
    depths = [0] * len(survival)
    for _, _, index in ranked_nodes(survival)[:num_nodes]:
        depths[index] += 1
    return depths
