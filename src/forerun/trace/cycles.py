"""Durations of a trace's cycles, which all requests of a batch share: each is counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from forerun.theory.figures import (
    DURATIONS,
    Group,
    PlainComparison,
    Seconds,
    compare_with_plain,
    find_baselines,
    merge_seconds,
)
from forerun.trace.columns import (
    KINDS,
    PLAIN,
    PREFILL,
    Columns,
    CycleKind,
    Ints,
    chosen,
    sums_by,
)

NUM_PARTS = 64
"""Groups into which the cycles of a block of columns are divided."""


def seconds_by(
    keys: Sequence[Ints], columns: Columns, num_steps: Ints
) -> Iterator[tuple[tuple[int, ...], Seconds]]:
    """Yield every combination of the keys with the seconds of its rows, which are cycles.

    Args:
        num_steps: number of steps that each row counts for.
    """
    values = [num_steps, columns["cycle_tokens"], *(columns[name] for name in DURATIONS)]
    for place, num_cycles, (steps, tokens, draft_s, verify_s, other_s) in sums_by(keys, values):
        yield (
            place,
            Seconds(
                num_cycles=num_cycles,
                num_steps=int(steps),
                num_tokens=int(tokens),
                draft_s=draft_s,
                verify_s=verify_s,
                other_s=other_s,
            ),
        )


@dataclass(slots=True)
class CyclesByKind:
    """Durations of cycles by kind and batch size: a cycle with more requests takes longer.

    Attributes:
        groups: runs of consecutive cycles, by which decode steps are compared with plain ones.
    """

    places: defaultdict[tuple[CycleKind, int], Seconds] = field(
        default_factory=lambda: defaultdict(Seconds)
    )
    groups: list[Group] = field(default_factory=list)

    def add(self, columns: Columns) -> None:
        """Add one cycle per row, in order."""
        kind, size = columns["kind"], columns["size"]
        for (number, requests), times in seconds_by((kind, size), columns, size):
            self.places[KINDS[number], requests].include(times)
        part: Ints = np.arange(len(kind)) * NUM_PARTS // len(kind)
        groups: defaultdict[int, Group] = defaultdict(Group)
        after_draft = np.ones(len(kind), np.bool_)
        after_draft[1:] = columns["plans"][:-1]
        for rows, name in (
            (kind != PREFILL, "decoded"),
            ((kind == PLAIN) & ~after_draft, "plain"),
        ):
            chosen_rows = chosen(columns, rows)
            keys = part[rows], chosen_rows["size"]
            for (number, requests), times in seconds_by(keys, chosen_rows, chosen_rows["size"]):
                getattr(groups[number], name)[requests] = times
        self.groups += groups.values()

    @property
    def total(self) -> Seconds:
        """Return the durations of all cycles."""
        return merge_seconds(self.places.values())

    def by_size(self, kind: CycleKind) -> dict[int, Seconds]:
        """Return the cycles of a kind by the number of requests in them."""
        return {size: seconds for (k, size), seconds in self.places.items() if k == kind}

    @property
    def plain_step_s(self) -> dict[int, float]:
        """Return mean seconds of a plain step by batch size, where there are enough plain steps."""
        baselines = find_baselines(self.groups)
        return {size: size * ratio.ratio for size, ratio in baselines.items() if ratio.y > 0.0}

    def compare(self) -> PlainComparison:
        """Compare all decode cycles with plain ones."""
        return compare_with_plain(self.groups)
