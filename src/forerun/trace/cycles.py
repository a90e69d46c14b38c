"""Durations of a trace's cycles, which all requests of a batch share: each is counted once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from forerun.theory.record import StepRecord
from forerun.trace.columns import KINDS, Columns, CycleKind, Ints, sums_by
from forerun.trace.files import DURATIONS

MIN_PLAIN_STEPS = 8
"""Plain steps, counted per request, below which their mean time is not used."""


@dataclass(slots=True, kw_only=True)
class Seconds:
    """Numbers of cycles, of their steps and tokens, and the sums of their durations in seconds."""

    num_cycles: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def add(self, cycle: Sequence[StepRecord]) -> None:
        """Add the cycle that these records share."""
        self.num_cycles += 1
        self.num_steps += len(cycle)
        self.num_tokens += sum(record.num_emitted for record in cycle)
        for name in DURATIONS:
            setattr(self, name, getattr(self, name) + getattr(cycle[0], name))

    def include(self, other: Seconds) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


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


def merged(parts: Iterable[Seconds]) -> Seconds:
    """Sum cycles of several kinds or batch sizes."""
    total = Seconds()
    for part in parts:
        total.include(part)
    return total


@dataclass(slots=True)
class CyclesByKind:
    """Durations of cycles by kind and batch size: a cycle with more requests takes longer."""

    places: defaultdict[tuple[CycleKind, int], Seconds] = field(
        default_factory=lambda: defaultdict(Seconds)
    )

    def add(self, columns: Columns, num_steps: Ints) -> None:
        """Add one cycle per row, counting the given number of steps of each."""
        for (kind, size), part in seconds_by(
            (columns["kind"], columns["size"]), columns, num_steps
        ):
            self.places[KINDS[kind], size].include(part)

    @property
    def total(self) -> Seconds:
        """Return the durations of all cycles."""
        return merged(self.places.values())

    def by_size(self, kind: CycleKind) -> dict[int, Seconds]:
        """Return the cycles of a kind by the number of requests in them."""
        return {size: seconds for (k, size), seconds in self.places.items() if k == kind}

    @property
    def plain_step_s(self) -> dict[int, float]:
        """Return mean seconds of a plain step by batch size, where there are enough plain steps."""
        return {
            size: seconds.total_s / seconds.num_cycles
            for size, seconds in self.by_size("plain").items()
            if seconds.num_steps >= MIN_PLAIN_STEPS and seconds.total_s > 0.0
        }

    def speedup(self, plain_step_s: Mapping[int, float]) -> float | None:
        """Return the rate of all decode cycles over that of plain ones; None if none is known.

        Plain cycles and those without a proposal count too, so that this is below tau / kappa,
        which is of drafting steps alone, where a controller planned some steps without a draft.
        """
        decoded = [
            (size, seconds)
            for (kind, size), seconds in self.places.items()
            if kind != "prefill" and size in plain_step_s
        ]
        total_s = sum(seconds.total_s for _, seconds in decoded)
        plain_s = sum(seconds.num_tokens / size * plain_step_s[size] for size, seconds in decoded)
        return plain_s / total_s if total_s > 0.0 else None
