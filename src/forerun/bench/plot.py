"""Plots of a comparison: tokens per second and acceptance by position in each cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.bench.summary import ArmSummary
from forerun.pictures import BASELINE, COLOURS, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

ARM_COLOURS = (BASELINE, *COLOURS)


def plot(panels: Mapping[str, Sequence[ArmSummary]], title: str, paths: Sequence[Path]) -> None:
    """Draw the arms and write the plot to every path, whose suffix selects the format.

    Args:
        panels: arms by what they have in common, the baseline first; one line of axes each.
        title: above the picture.
        paths: for example a .png and a .svg.
    """
    with picture(paths, width=9.0, height=3.6 * len(panels)) as figure:
        lines = figure.subplots(len(panels), 2, width_ratios=[3, 2], squeeze=False)
        figure.suptitle(title, fontsize=11)
        for (name, summaries), (speeds, survivals) in zip(panels.items(), lines, strict=True):
            speeds.set_title(name, fontsize=9, loc="left")
            draw_speeds(speeds, summaries)
            draw_survival(survivals, summaries)


def draw_speeds(axes: Axes, summaries: Sequence[ArmSummary]) -> None:
    """Draw horizontal bars with 95% intervals, each labelled with its speedup."""
    for row, summary in enumerate(summaries):
        speed, ratio = summary.tokens_per_s, summary.speedup
        reach = [[speed.estimate - speed.low], [speed.high - speed.estimate]]
        axes.barh(row, speed.estimate, color=colour(row), height=0.6)
        axes.errorbar(speed.estimate, row, xerr=reach, color="black", capsize=4, linewidth=1)
        label = "baseline" if row == 0 else f"{ratio.estimate:.2f}x ({interval_text(summary)})"
        axes.annotate(
            label,
            (speed.high, row),
            xytext=(6, 0),
            textcoords="offset points",
            verticalalignment="center",
            fontsize=8,
        )
    axes.set_yticks(range(len(summaries)), [summary.arm.name for summary in summaries])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(summary.tokens_per_s.high for summary in summaries))
    axes.set_xlabel("tokens per second, prefill included (95% interval)")


def draw_survival(axes: Axes, summaries: Sequence[ArmSummary]) -> None:
    """Draw the share of steps accepted through each position."""
    for row, summary in enumerate(summaries):
        survival = summary.acceptance.survival
        if survival:
            positions = range(1, len(survival) + 1)
            axes.plot(positions, survival, marker="o", color=colour(row), label=summary.arm.name)
    axes.set_ylim(0, 1)
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted through it")
    axes.set_xticks(range(1, 1 + max(s.acceptance.max_depth for s in summaries)))
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def colour(row: int) -> str:
    """Return the colour of an arm, which is the same in both panels."""
    return ARM_COLOURS[row % len(ARM_COLOURS)]


def interval_text(summary: ArmSummary) -> str:
    """Return the interval of the speedup as text."""
    return f"{summary.speedup.low:.2f}–{summary.speedup.high:.2f}"
