"""The report of an alignment: settings, figures before and after, ledger, judgements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.align.evaluation.figures import DraftFigures, FigureChange, changes
from forerun.align.evaluation.ledger import Ledger
from forerun.align.json_files import from_json, to_json, write_json
from forerun.align.selection import Judgement
from forerun.bounded_documents import read_json
from forerun.provenance import Provenance

__all__ = ["AlignReport", "DataSummary", "JudgedPair"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Sizes of the training and the held-out data.

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
    """Figures of the first and the kept draft on the same prompts at one temperature.

    Attributes:
        before: the draft to begin with.
        after: the draft that was kept.
    """

    before: DraftFigures
    after: DraftFigures

    @property
    def changes(self) -> tuple[FigureChange, ...]:
        """Comparison of the figures of the first and the kept draft."""
        return changes(self.before, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignReport:
    """The report of one alignment.

    Attributes:
        draft: folder of the draft that was kept.
        objective: what was minimised.
        data: what was learned and judged on.
        judged: both drafts on all held-out prompts; as deployed first, then at T=0 and T=1 if that
            is something else.
        ledger: where the rest of the expected length went.
        judgements: on the way, by step.
        best_step: of the draft that was kept; 0 if training did not help.
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
    def best_k(self) -> int | None:
        """K with the best predicted speedup as deployed; 0 if none exceeds 1, None if unknown."""
        speedup = self.judged[0].after.overall.speedup
        return None if speedup is None else speedup.num_speculative_tokens

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values without single prompts, and with the changes between both drafts."""
        bare = tuple(
            JudgedPair(
                before=replace(pair.before, prompts=()), after=replace(pair.after, prompts=())
            )
            for pair in self.judged
        )
        values: dict[str, Any] = to_json(replace(self, judged=bare))
        for pair, judged in zip(values["judged"], self.judged, strict=True):
            del pair["before"]["prompts"], pair["after"]["prompts"]
            pair["changes"] = [change.to_dict() for change in judged.changes]
        return values

    @classmethod
    def read(cls, path: Path) -> AlignReport | None:
        """Read a report that `write` wrote; None if there is none or its version differs."""
        try:
            values = read_json(path)
            for pair in values["judged"]:
                del pair["changes"]  # they follow from the figures
            return from_json(cls, values)
        except (AttributeError, KeyError, TypeError, ValueError):
            return None

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        write_json(path, self.to_dict())
