"""The report of an alignment, the card of its draft, and their pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import forerun
from forerun.align.selection import Judgement
from forerun.align.workspace import (
    StepMetrics,
    Workspace,
    differences,
    from_json,
    read_metrics,
    to_json,
    write_json,
)
from forerun.bounded_read import read_json
from forerun.errors import InvalidModel
from forerun.measure.judge import AcceptanceFigures, DraftFigures, FigureChange, changes
from forerun.models.draft_card import CardFigures, DraftCard, identify
from forerun.pictures import BASELINE, COLOURS, picture
from forerun.provenance import Provenance, content_hash, version_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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


def draw(workspace: Workspace, report: AlignReport) -> None:
    deployed = report.judged[0]
    plot_survival(
        {"before": deployed.before, "after": deployed.after},
        f"Acceptance at T={deployed.after.temperature:g}",
        [workspace.picture("acceptance")],
    )
    judged = {judgement.step: judgement for judgement in report.judgements}
    alphas = {step: j.acceptance_probability for step, j in judged.items()}
    speedups = {step: j.predicted_speedup for step, j in judged.items()}
    plot_training(
        read_metrics(workspace.metrics),
        {step: alpha for step, alpha in alphas.items() if alpha is not None},
        {step: speedup for step, speedup in speedups.items() if speedup is not None},
        [workspace.picture("training")],
    )


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
    report: AlignReport, *, target: str, settings: Mapping[str, Any], data: str
) -> DraftCard:
    """Return the card of the kept draft; `data` is the hash of its training texts."""
    return DraftCard(
        target=target,
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


DRAFT_COLOURS = (BASELINE, *COLOURS)
"""Colours of the drafts in a plot: first the draft before alignment, then those after it."""
MAX_COLUMNS = 4


def plot_survival(drafts: Mapping[str, DraftFigures], title: str, paths: Sequence[Path]) -> None:
    panels = _panels_of(drafts)
    num_columns = min(len(panels), MAX_COLUMNS)
    num_lines = -(-len(panels) // num_columns)
    with picture(paths, width=1.2 + 2.8 * num_columns, height=3.2 * num_lines) as figure:
        grid = figure.subplots(num_lines, num_columns, squeeze=False, sharey=True)
        figure.suptitle(title, fontsize=11)
        places = list(grid.flat)
        for axes, (name, figures) in zip(places, panels.items(), strict=False):
            _draw_survival(axes, name, figures)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for line in grid:
            line[0].set_ylabel("accepted through it (95% interval)")


def _panels_of(drafts: Mapping[str, DraftFigures]) -> dict[str, dict[str, AcceptanceFigures]]:
    """Return the figures by panel and draft; each tag has a panel if there are several tags."""
    panels = {"all prompts": {name: figures.overall for name, figures in drafts.items()}}
    tags = sorted({tag for figures in drafts.values() for tag in figures.by_tag})
    for tag in tags if len(tags) > 1 else ():
        panels[tag or "no tag"] = {
            name: figures.by_tag[tag] for name, figures in drafts.items() if tag in figures.by_tag
        }
    return panels


def _draw_survival(axes: Axes, name: str, drafts: Mapping[str, AcceptanceFigures]) -> None:
    """Draw the share of steps accepted through each position, one line per draft."""
    for row, (draft, figures) in enumerate(drafts.items()):
        beta, tau = figures.acceptance_rate_per_position, figures.acceptance_length
        positions = range(1, len(beta) + 1)
        colour = DRAFT_COLOURS[row % len(DRAFT_COLOURS)]
        label = draft if tau is None else f"{draft}: $\\tau$ {tau.estimate:.2f}"
        axes.plot(positions, [b.estimate for b in beta], marker="o", color=colour, label=label)
        lows, highs = [b.low for b in beta], [b.high for b in beta]
        axes.fill_between(positions, lows, highs, color=colour, alpha=0.2, linewidth=0)
    num_prompts = max(figures.num_prompts for figures in drafts.values())
    axes.set_title(f"{name} ({num_prompts} prompts)", fontsize=9, loc="left")
    axes.set_ylim(0, 1)
    axes.set_xlabel("drafted position")
    axes.set_xticks(range(1, 1 + max(len(f.acceptance_rate_per_position) for f in drafts.values())))
    axes.legend()


TRAINED, JUDGED = "#9fb3c8", COLOURS[0]


def plot_training(
    steps: Sequence[StepMetrics],
    alphas: Mapping[int, float],
    speedups: Mapping[int, float],
    paths: Sequence[Path],
) -> None:
    with picture(paths, width=9.0, height=3.4) as figure:
        left, right = figure.subplots(1, 2)
        _draw_acceptance(left, steps, alphas)
        right.axhline(1.0, color=BASELINE, linewidth=1, linestyle="--")
        right.plot(list(speedups), list(speedups.values()), "o-", color=JUDGED)
        right.set_ylabel("predicted speedup over plain decoding")
        if not speedups:
            right.annotate("no cost table", (0.5, 0.5), xycoords="axes fraction", ha="center")
        for axes in (left, right):
            axes.set_xlabel("optimiser steps")


def _draw_acceptance(axes: Axes, steps: Sequence[StepMetrics], alphas: Mapping[int, float]) -> None:
    known = {
        step.step: step.acceptance_probability
        for step in steps
        if step.acceptance_probability is not None
    }
    axes.plot(list(known), list(known.values()), color=TRAINED, linewidth=1, label="training texts")
    axes.plot(list(alphas), list(alphas.values()), "o-", color=JUDGED, label="held-out prompts")
    axes.set_ylabel("acceptance probability (alpha)")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
