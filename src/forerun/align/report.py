"""The report of an alignment and the card of its draft."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import forerun
from forerun.align.selection import Judgement
from forerun.align.workspace import Workspace, differences, from_json, to_json, write_json
from forerun.bounded_read import read_json
from forerun.errors import InvalidModel
from forerun.measure.judge import DraftFigures, FigureChange, changes
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import CardFigures, DraftCard, identify
from forerun.provenance import Provenance, content_hash, version_of


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSummary:
    """Sizes of the training and the held-out data.

    Attributes:
        num_cut_responses: of the target's and the server's, those that `max_tokens` ended.
    """

    num_training_prompts: int
    num_held_out_prompts: int
    num_samples: int
    num_learned_tokens: int
    num_rows: int
    num_cut_responses: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPair:
    """Figures of the first and the kept draft on the same prompts at one temperature."""

    before: DraftFigures
    after: DraftFigures

    @property
    def changes(self) -> tuple[FigureChange, ...]:
        return changes(self.before, self.after)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignReport:
    """The report of one alignment.

    Attributes:
        judged: both drafts on all held-out prompts; as deployed first, then at the further
            temperatures of the settings.
        best_step: of the draft that was kept; 0 if training did not help.
    """

    draft: Path
    objective: str
    data: DataSummary
    judged: tuple[JudgedPair, ...]
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
        write_json(path, self.to_dict())


def find_finished(
    workspace: Workspace, identity: Mapping[str, str], *, predicted: bool
) -> AlignReport | None:
    """Return the report of an alignment that is already complete; None if phases remain to run."""
    report = AlignReport.read(workspace.report)
    if report is None or not workspace.draft.is_dir():
        return None
    damaged = report.provenance.models.get("draft") != content_hash(str(workspace.draft))
    if damaged:
        raise InvalidModel(
            f"the weights in {workspace.draft} are not those that {workspace.report} describes; "
            "delete both, and the same command restores the draft and judges it again"
        )
    lacks_speedup = predicted and report.judged[0].after.overall.speedup is None
    if lacks_speedup or differences(report.identity, identity):
        return None
    return report


PACKAGES = ("torch", "transformers", "accelerate")


def card_of(
    report: AlignReport, *, target: ModelFiles, settings: Mapping[str, Any], data: str
) -> DraftCard:
    """Return the card of the kept draft; `data` is the hash of its training texts."""
    return DraftCard(
        target=target.name,
        target_hash=report.identity["target"],
        made_for=identify(target),
        data_hash=data,
        objective=report.objective,
        temperature=report.judged[0].after.temperature,
        before=tuple(_card_figures(pair.before) for pair in report.judged),
        after=tuple(_card_figures(pair.after) for pair in report.judged),
        versions={"forerun": forerun.__version__, **{name: version_of(name) for name in PACKAGES}},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings,
    )


def _card_figures(judged: DraftFigures) -> CardFigures:
    overall = judged.overall
    return CardFigures(
        temperature=judged.temperature,
        num_speculative_tokens=judged.num_speculative_tokens,
        acceptance_length=overall.acceptance_length,
        acceptance_probability=overall.acceptance_probability,
        speedup=None if overall.speedup is None else overall.speedup.best,
    )
