"""Which cases `make test` runs of a test that has many; the others belong to the full grid.

Of a test that is marked `covering` it runs a covering array: one of strength 1 has every value of
every parameter, one of strength 2 every pair of values. Of one marked `one_in(n)` it runs every nth
case.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path

import pytest

Combination = Mapping[str, int]
"""Parameter name to a number that stands for its value."""


def covering(grid: Sequence[Combination], strength: int) -> list[int]:
    """Indices into a grid of few combinations in which all tuples of values of the grid occur.

    The next combination is the one with the most tuples that are missing, and among those one of
    values and pairs that were seldom taken, so that they alternate.
    """
    tuples = [set(combinations(sorted(one.items()), min(strength, len(one)))) for one in grid]
    pairs = [{*one.items(), *combinations(sorted(one.items()), 2)} for one in grid]
    missing = set().union(*tuples)
    taken: Counter[object] = Counter()
    chosen: list[int] = []
    while missing:
        best = max(
            range(len(grid)),
            key=lambda i: (
                len(tuples[i] & missing),
                -sum(taken[part] for part in pairs[i]),
                -i,
            ),
        )
        chosen.append(best)
        taken.update(pairs[best])
        missing -= tuples[best]
    return sorted(chosen)


def values_of(item: pytest.Function) -> Combination:
    """Identities of the values that a test is called with: all its calls have the same objects."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def mark_full(items: Sequence[pytest.Item]) -> None:
    """Mark what `make test` leaves out of the tests that are marked `covering` or `one_in`."""
    grids: dict[tuple[Path, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("full") is None:
            grids[item.path, item.originalname].append(item)
    for grid in grids.values():
        if (marker := grid[0].get_closest_marker("one_in")) is not None:
            kept = list(range(0, len(grid), marker.args[0]))
        elif (marker := grid[0].get_closest_marker("covering")) is not None:
            (strength,) = marker.args or (1,)
            kept = covering([values_of(item) for item in grid], strength)
        else:
            continue
        for index, item in enumerate(grid):
            if index not in kept:
                item.add_marker("full")
