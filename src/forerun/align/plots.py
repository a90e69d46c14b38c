"""Plots of an alignment report: acceptance by position and by tag, and training progress."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.align.progress import StepMetrics
from forerun.measure.judge.figures import AcceptanceFigures, DraftFigures
from forerun.pictures import BASELINE, COLOURS, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DRAFT_COLOURS = (BASELINE, *COLOURS)
"""The first is what there was before."""
MAX_COLUMNS = 4


def plot_survival(drafts: Mapping[str, DraftFigures], title: str, paths: Sequence[Path]) -> None:
    """Draw acceptance by position, and write the plot to every path."""
    panels = _panels_of(drafts)
    num_columns = min(len(panels), MAX_COLUMNS)
    num_lines = -(-len(panels) // num_columns)
    with picture(paths, width=1.2 + 2.8 * num_columns, height=3.2 * num_lines) as figure:
        grid = figure.subplots(num_lines, num_columns, squeeze=False, sharey=True)
        figure.suptitle(title, fontsize=11)
        places = list(grid.flat)
        for axes, (name, figures) in zip(places, panels.items(), strict=False):
            draw(axes, name, figures)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        for line in grid:
            line[0].set_ylabel("accepted through it (95% interval)")


def _panels_of(
    drafts: Mapping[str, DraftFigures],
) -> dict[str, dict[str, AcceptanceFigures]]:
    """Return the figures by panel and draft; each tag has a panel if there are several tags."""
    panels = {"all prompts": {name: figures.overall for name, figures in drafts.items()}}
    tags = sorted({tag for figures in drafts.values() for tag in figures.by_tag})
    for tag in tags if len(tags) > 1 else ():
        panels[tag or "no tag"] = {
            name: figures.by_tag[tag] for name, figures in drafts.items() if tag in figures.by_tag
        }
    return panels


def draw(axes: Axes, name: str, drafts: Mapping[str, AcceptanceFigures]) -> None:
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
    """Draw acceptance and predicted speedup over the training, and write the plot to a file."""
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
    """Draw alpha on the training texts, step by step, and on the held-out prompts."""
    known = {
        step.step: step.acceptance_probability
        for step in steps
        if step.acceptance_probability is not None
    }
    axes.plot(
        list(known),
        list(known.values()),
        color=TRAINED,
        linewidth=1,
        label="training texts",
    )
    axes.plot(list(alphas), list(alphas.values()), "o-", color=JUDGED, label="held-out prompts")
    axes.set_ylabel("acceptance probability (alpha)")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
