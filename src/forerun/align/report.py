"""What an alignment was, found and made."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.align.evaluation.figures import DraftFigures, FigureChange, changes
from forerun.align.evaluation.ledger import Ledger
from forerun.align.selection import Judgement
from forerun.align.settings import built
from forerun.atomic_write import atomic_write
from forerun.provenance import Provenance

__all__ = ["AlignReport", "DataSummary", "JudgedPair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """What was learned and judged on.

    Attributes:
        num_training_prompts: prompts on the side that is learned.
        num_held_out_prompts: prompts on the side that judges.
        num_samples: texts learned in the last round.
        num_learned_tokens: learned tokens of those.
        num_rows: packed rows of those, an epoch.
    """

    num_training_prompts: int
    num_held_out_prompts: int
    num_samples: int
    num_learned_tokens: int
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """Two drafts on the same prompts at one temperature.

    Attributes:
        before: the draft to begin with.
        after: the draft that was kept.
    """

    before: DraftFigures
    after: DraftFigures

    @property
    def changes(self) -> tuple[FigureChange, ...]:
        """Before against after."""
        return changes(self.before, self.after)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "changes": [change.to_dict() for change in self.changes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignReport:
    """One alignment.

    Attributes:
        draft: folder of the draft that was kept.
        objective: what was minimised.
        data: what was learned and judged on.
        judged: both drafts on all held-out prompts; as deployed first, then at T=0 and T=1 if that
            is something else.
        ledger: where the rest of the expected length went.
        judgements: on the way, by step.
        best_step: of the draft that was kept; 0 says that training did not help.
        seconds: of every phase.
        provenance: of the measurement.
        identity: what all this is a function of.
    """

    draft: Path
    objective: str
    data: DataSummary
    judged: tuple[JudgedPair, ...]
    ledger: Ledger
    judgements: tuple[Judgement, ...]
    best_step: int
    seconds: Mapping[str, float]
    provenance: Provenance
    identity: Mapping[str, str]

    @property
    def best_k(self) -> int:
        """K of the best predicted speedup as deployed; 0 where none pays or none is known."""
        speedup = self.judged[0].after.overall.speedup
        return 0 if speedup is None else speedup.num_speculative_tokens

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {
            "draft": str(self.draft),
            "objective": self.objective,
            "data": asdict(self.data),
            "judged": [pair.to_dict() for pair in self.judged],
            "ledger": self.ledger.to_dict(),
            "judgements": [asdict(judgement) for judgement in self.judgements],
            "best_step": self.best_step,
            "seconds": dict(self.seconds),
            "provenance": self.provenance.to_dict(),
            "identity": dict(self.identity),
        }

    @classmethod
    def read(cls, path: Path) -> AlignReport | None:
        """What `write` has written; None where there is nothing, or nothing this version knows."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            for pair in values["judged"]:
                del pair["changes"]  # follow from the rest
            return built(cls, values)
        except (OSError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        with atomic_write(path) as scratch:
            scratch.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
