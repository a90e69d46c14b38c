"""A picture of a trace: how far drafts are accepted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.pictures import COLOURS, picture
from forerun.trace.summary import GroupSummary, TraceSummary

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

MAX_LINES = len(COLOURS)


def plot(summary: TraceSummary, title: str, path: Path) -> None:
    """Draw survival by position, of all steps and of the tags with the most steps.

    Args:
        summary: of a trace.
        title: above the picture.
        path: its suffix names the format.
    """
    with picture([path], width=6.4, height=4.0) as figure:
        axes = figure.subplots()
        axes.set_title(title, fontsize=10)
        draw(axes, lines_of(summary))


def lines_of(summary: TraceSummary) -> Mapping[str, GroupSummary]:
    """What is drawn, by label."""
    drafting = [(tag, group) for tag, group in summary.tags.items() if group.positions]
    drafting.sort(key=lambda entry: -entry[1].acceptance.num_steps)
    lines = {"all": summary.overall} if summary.overall.positions else {}
    if len(drafting) > 1:
        lines |= dict(drafting[: MAX_LINES - 1])
    return lines


def draw(axes: Axes, lines: Mapping[str, GroupSummary]) -> None:
    """Survival as lines; beta with its interval as points where there is one line only."""
    deepest = 1
    for colour, (label, group) in zip(COLOURS, lines.items(), strict=False):
        positions = range(1, len(group.positions) + 1)
        deepest = max(deepest, len(positions))
        survival = [position.survival for position in group.positions]
        axes.plot(positions, survival, marker="o", color=colour, label=f"{label}: survival")
        if len(lines) == 1:
            draw_rates(axes, group)
    axes.set_ylim(0, 1.02)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_xlabel("drafted position")
    axes.set_ylabel("accepted through it")
    if lines:
        axes.legend()
    else:
        axes.annotate("nothing was drafted", (0.5, 0.5), xycoords="axes fraction", ha="center")


def draw_rates(axes: Axes, group: GroupSummary) -> None:
    """Acceptance rate per position with its 95% interval."""
    rates = [position.rate for position in group.positions]
    reach = [[r.estimate - r.low for r in rates], [r.high - r.estimate for r in rates]]
    axes.errorbar(
        range(1, len(rates) + 1),
        [rate.estimate for rate in rates],
        yerr=reach,
        color="black",
        linestyle="none",
        marker="_",
        capsize=3,
        linewidth=1,
        label="beta (95% interval)",
    )
