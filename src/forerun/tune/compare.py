"""Compares a run with an earlier one, such as that of the version before an upgrade."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from forerun.bounded_read import read_json
from forerun.errors import UnreadableInput
from forerun.theory.intervals import Interval, divide
from forerun.tune.arms import Load
from forerun.tune.report import ArmResult, TuneReport


class Ends(msgspec.Struct, frozen=True):
    """An interval of `result.json`; an end at infinity is None."""

    estimate: float
    low: float | None
    high: float | None


class EarlierArm(msgspec.Struct, frozen=True):
    """What an earlier run measured of an arm at a load."""

    arm: str
    speedup: Ends | None = None
    figures: Mapping[str, Ends] = field(default_factory=dict)


class EarlierLoad(msgspec.Struct, frozen=True):
    """What an earlier run measured at a load."""

    clients: int
    temperature: float
    arms: tuple[EarlierArm, ...]


class EarlierReport(msgspec.Struct, frozen=True):
    """What is compared of the `result.json` of an earlier run."""

    loads: tuple[EarlierLoad, ...]
    versions: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedChange:
    """One arm at one load, now and in an earlier run.

    Attributes:
        tokens_per_s: of now.
        ratio: tokens/s of now over those of before.
        speedups: over the baseline, before and now; None where one is not known.
    """

    arm: str
    load: Load
    tokens_per_s: float
    ratio: Interval
    speedups: tuple[Interval, Interval] | None

    @property
    def sentence(self) -> str:
        gains = ""
        if self.speedups is not None:
            before, now = (speedup.show() for speedup in self.speedups)
            gains = f"; speedup was {before}, is {now}"
        return (
            f"{self.arm}, {self.load.label}: {self.tokens_per_s:.1f} tokens/s, "
            f"{self.ratio.show()} of before{gains}"
        )


def read_earlier(path: Path) -> EarlierReport:
    """Read the `result.json` of an earlier run.

    Raises:
        UnreadableInput: it is no such file.
    """
    try:
        return msgspec.convert(read_json(path), EarlierReport)
    except msgspec.ValidationError as error:
        raise UnreadableInput(
            f"{path} is not the result.json of a run of forerun tune: {error}"
        ) from error


def list_changes(report: TuneReport, earlier: EarlierReport) -> Iterator[SpeedChange]:
    """Yield the arms that both runs measured in two blocks or more at the same load."""
    before = {(e.clients, e.temperature, a.arm): a for e in earlier.loads for a in e.arms}
    for result in report.loads:
        for arm in result.arms:
            old = before.get((result.load.clients, result.load.temperature, arm.arm))
            ends = None if old is None else _read(old.figures.get("tokens_per_s"))
            now = arm.figures.get("tokens_per_s")
            if old is None or ends is None or now is None or not math.isfinite(now.high):
                continue
            yield SpeedChange(
                arm=arm.arm,
                load=result.load,
                tokens_per_s=now.estimate,
                ratio=divide(now, ends),
                speedups=None if arm.arm == report.baseline else _find_speedups(old, arm),
            )


def compare_runs(report: TuneReport, earlier: EarlierReport) -> list[str]:
    """Return versions that changed, regressions, and the other arms, one line each."""
    versions = {**earlier.versions, **report.versions}
    lines = [
        f"{name} was {earlier.versions.get(name, 'unknown')}, is {now}"
        for name, now in versions.items()
        if earlier.versions.get(name) != now
    ]
    changes = sorted(list_changes(report, earlier), key=lambda change: not _is_slower(change))
    if not changes:
        return [*lines, "no arm was measured at the same load in both runs"]
    return lines + [
        f"{'slower: ' if _is_slower(change) else ''}{change.sentence}" for change in changes
    ]


def _is_slower(change: SpeedChange) -> bool:
    return change.ratio.is_below(1.0)


def _find_speedups(old: EarlierArm, now: ArmResult) -> tuple[Interval, Interval] | None:
    before = _read(old.speedup)
    return None if before is None or now.speedup is None else (before, now.speedup)


def _read(ends: Ends | None) -> Interval | None:
    """Return an interval of two blocks or more; None for others."""
    if ends is None or not ends.low or ends.high is None:
        return None
    return Interval(estimate=ends.estimate, low=ends.low, high=ends.high)
