"""Compares a run with an earlier one, such as that of the version before an upgrade."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from forerun.bounded_read import read_json
from forerun.errors import UnreadableInput
from forerun.theory.intervals import Interval, divide
from forerun.tune.report import TuneReport


class Ends(msgspec.Struct, frozen=True):
    """An interval of `result.json`; an end at infinity is None."""

    estimate: float
    low: float | None
    high: float | None


class EarlierArm(msgspec.Struct, frozen=True):
    """What an earlier run measured of an arm at a load."""

    arm: str
    speedup: Ends | None = None
    figures: Mapping[str, Ends] = msgspec.field(default_factory=dict)


class EarlierLoad(msgspec.Struct, frozen=True):
    """What an earlier run measured at a load."""

    clients: int
    temperature: float
    arms: tuple[EarlierArm, ...]


class EarlierReport(msgspec.Struct, frozen=True):
    """What is compared of the `result.json` of an earlier run."""

    loads: tuple[EarlierLoad, ...]
    versions: Mapping[str, str]


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


def compare_runs(report: TuneReport, earlier: EarlierReport) -> list[str]:
    """Return versions that changed, what became slower, and the other arms, one line each.

    Arms are compared where both runs measured them in two blocks or more at the same load.
    """
    lines = [
        f"{name} was {earlier.versions.get(name, 'unknown')}, is {now}"
        for name, now in {**earlier.versions, **report.versions}.items()
        if earlier.versions.get(name) != now
    ]
    before = {(e.clients, e.temperature, a.arm): a for e in earlier.loads for a in e.arms}
    slower, others = list[str](), list[str]()
    for load, arm in ((result.load, arm) for result in report.loads for arm in result.arms):
        old = before.get((load.clients, load.temperature, arm.arm), EarlierArm(arm.arm))
        rate, then = arm.figures.get("tokens_per_s"), _read(old.figures.get("tokens_per_s"))
        if then is None or rate is None or not math.isfinite(rate.high):
            continue
        ratio = divide(rate, then)
        line = f"{arm.arm}, {load.label}: {rate.estimate:.1f} tokens/s, {ratio.show()} of before"
        speedup = _read(old.speedup)
        if speedup is not None and arm.speedup is not None and arm.arm != report.baseline:
            line = f"{line}; speedup was {speedup.show()}, is {arm.speedup.show()}"
        if ratio.is_below(1.0):
            slower.append(f"slower: {line}")
        else:
            others.append(line)
    compared = slower + others or ["no arm was measured at the same load in both runs"]
    return lines + compared


def _read(ends: Ends | None) -> Interval | None:
    """Return an interval of two blocks or more; None for others."""
    if ends is None or not ends.low or ends.high is None:
        return None
    if not 0.0 < ends.low <= ends.estimate <= ends.high:
        return None
    return Interval(estimate=ends.estimate, low=ends.low, high=ends.high)
