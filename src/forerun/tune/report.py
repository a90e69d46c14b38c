"""What a run of tune says: per load the fastest exact setting, its gain, and what was given up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load
from forerun.tune.check import ExactnessCheck
from forerun.tune.drafting import DraftingCounts
from forerun.tune.race import Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmResult(Standing):
    """What was measured of one arm at one load.

    Attributes:
        figures: tokens/s, TTFT and TPOT by the names of `load.LOAD_FIGURES`; empty without blocks.
        drafting: counts of the engine; None where it reports none.
        equal_texts: share of texts at T=0 that equal those of the baseline; None at other
            temperatures.
    """

    figures: Mapping[str, Interval] = field(default_factory=dict)
    drafting: DraftingCounts | None = None
    equal_texts: float | None = None

    @property
    def cycle_cost(self) -> float | None:
        """Return kappa: seconds of a step in those of one that decodes plainly.

        A draft of this cost, at this load, gains where its acceptance length is above it. That
        holds where every step drafts: the acceptance length leaves out the others.
        """
        tau = None if self.drafting is None else self.drafting.acceptance_length
        return None if tau is None or self.speedup is None else tau / self.speedup.estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The outcome at one load.

    Attributes:
        arms: the fastest first, those that were given up last.
        recommended: name of the arm; the baseline's where no other is shown to be faster, None
            where the run has not decided.
        confirmed: its speedup on prompts that had no part in the choice; None for the baseline.
        check: the audit of its text, made once for all loads; None for the baseline.
        num_starts: of each server in the confirmation, where they ran one at a time; else 0.
    """

    load: Load
    arms: tuple[ArmResult, ...]
    recommended: str | None
    confirmed: Interval | None = None
    check: ExactnessCheck | None = None
    num_starts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneReport:
    """The result of a run.

    Attributes:
        source: the command, target or addresses that were tuned, as the user wrote them.
        baseline: name of the arm that the others are compared with.
        memory_bytes: main memory of every arm's server.
        start_s: seconds from its start until it answered.
        minutes: since the run was started, or last resumed.
        is_complete: whether every load was decided, and its recommendation confirmed.
        versions: of forerun, and of the measured server as it names itself.
        acceptance_length: tokens per step that drafts had by chance; None: as they were accepted.
        left_out: prompts that servers refused, each with the reason.
        provenance: machine, versions and time.
    """

    source: str
    baseline: str
    arms: tuple[Arm, ...]
    loads: tuple[LoadResult, ...]
    memory_bytes: Mapping[str, int]
    start_s: Mapping[str, float]
    minutes: float
    is_complete: bool
    acceptance_length: float | None = None
    left_out: tuple[str, ...] = ()
    provenance: Mapping[str, object]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; an end of an interval at infinity, which JSON has not, is None."""
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(replace(self, arms=())))
        memory, starts = values.pop("memory_bytes"), values.pop("start_s")
        values["arms"] = [
            {
                "name": arm.name,
                "command": arm.shown_command,
                "memory_bytes": memory.get(arm.name),
                "start_s": starts.get(arm.name),
            }
            for arm in self.arms
        ]
        for load, result in zip(values["loads"], self.loads, strict=True):
            load.update(load.pop("load"))
            for row, arm in zip(load["arms"], result.arms, strict=True):
                row.update(given_up=row.pop("reason"), cycle_cost=arm.cycle_cost)
                if arm.drafting is not None:
                    row["drafting"]["acceptance_length"] = arm.drafting.acceptance_length
        return values
