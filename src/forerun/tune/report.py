"""What a run of tune says: per load the fastest exact setting, its gain, and what was given up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from forerun.theory.intervals import Interval
from forerun.tune.arms import Arm, Load
from forerun.tune.check import ExactnessCheck
from forerun.tune.drafting import DraftingCounts
from forerun.tune.race import Standing


def to_ends(interval: Interval | None) -> dict[str, float | None] | None:
    """Return an interval for JSON, which has no infinity: such an end is None."""
    if interval is None:
        return None
    return {end: v if math.isfinite(v) else None for end, v in asdict(interval).items()}


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

    def to_dict(self) -> dict[str, object]:
        return {
            "arm": self.arm,
            "speedup": to_ends(self.speedup),
            "num_blocks": self.num_blocks,
            "figures": {name: to_ends(figure) for name, figure in self.figures.items()},
            "drafting": None if self.drafting is None else self.drafting.to_dict(),
            "cycle_cost": self.cycle_cost,
            "equal_texts": self.equal_texts,
            "given_up": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """The outcome at one load.

    Attributes:
        arms: the fastest first, those that were given up last.
        recommended: name of the arm; the baseline's where no other is shown to be faster, None
            where the run has not decided.
        confirmed: its speedup on prompts that had no part in the choice; None for the baseline.
        check: the audit of its text; None for the baseline.
    """

    load: Load
    arms: tuple[ArmResult, ...]
    recommended: str | None
    confirmed: Interval | None = None
    check: ExactnessCheck | None = None

    def to_dict(self) -> dict[str, object]:
        return {
            **asdict(self.load),
            "arms": [arm.to_dict() for arm in self.arms],
            "recommended": self.recommended,
            "confirmed": to_ends(self.confirmed),
            "check": None if self.check is None else asdict(self.check),
        }


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
    provenance: Mapping[str, object]
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        return {
            "source": self.source,
            "baseline": self.baseline,
            "arms": [
                {
                    "name": arm.name,
                    "command": arm.shown_command,
                    "memory_bytes": self.memory_bytes.get(arm.name),
                    "start_s": self.start_s.get(arm.name),
                }
                for arm in self.arms
            ],
            "loads": [result.to_dict() for result in self.loads],
            "minutes": self.minutes,
            "is_complete": self.is_complete,
            "acceptance_length": self.acceptance_length,
            "versions": dict(self.versions),
            "provenance": dict(self.provenance),
        }
