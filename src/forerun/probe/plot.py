"""Draws the cost of a target pass over n rows, in plain steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.pictures import COLOURS, picture
from forerun.probe.config import Quantity
from forerun.probe.profile import Profile
from forerun.theory.cost_line import CostLine
from forerun.theory.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot"]

STYLES = ("-", "--", ":", "-.")
"""By context."""
WIDTH, HEIGHT = 6.4, 4.0
"""Of a panel, in inches."""


def plot(profiles: Sequence[Profile], paths: Sequence[Path]) -> None:
    """Draw v(n) with error bars between its two limits, and write the plot to every path."""
    with picture(paths, width=WIDTH * len(profiles), height=HEIGHT) as figure:
        panels = figure.subplots(1, len(profiles), squeeze=False)[0]
        for axes, profile in zip(panels, profiles, strict=True):
            axes.set_title(title(profile), fontsize=9)
            draw_costs(axes, profile)
            draw_limits(axes, profile)
            finish(axes, profile)


def draw_costs(axes: Axes, profile: Profile) -> None:
    """Draw one monotone line per batch and context through the measured points."""
    table = profile.greedy
    for line in table.lines:
        colour = COLOURS[table.batches.index(line.batch) % len(COLOURS)]
        style = STYLES[table.contexts.index(line.context) % len(STYLES)]
        points = list(points_of(profile, line))
        reach = [[p.estimate - p.low for p in points], [p.high - p.estimate for p in points]]
        axes.errorbar(
            line.rows,
            [point.estimate for point in points],
            yerr=reach,
            color=colour,
            linestyle="none",
            marker="o",
            markersize=3,
            capsize=2,
            linewidth=1,
        )
        fitted = [line.verify(rows).s / line.plain_s for rows in line.rows]
        label = f"batch {line.batch}, {line.context} tokens each"
        axes.plot(line.rows, fitted, color=colour, linestyle=style, linewidth=1.4, label=label)


def points_of(profile: Profile, line: CostLine) -> Iterator[Interval]:
    """Return measured passes in plain steps, with the plain step's error ignored."""
    for rows in line.rows:
        found = profile.seconds(Quantity.TARGET_PASS, line.batch, line.context, rows)
        yield Interval(
            estimate=found.estimate / line.plain_s,
            low=found.low / line.plain_s,
            high=found.high / line.plain_s,
        )


def draw_limits(axes: Axes, profile: Profile) -> None:
    """Draw the two limits of v(n): one pass per row, and a single read of all weights."""
    line = min(profile.greedy.lines, key=lambda line: (line.batch, line.context))
    floor = profile.limit.pass_s(line.batch, line.context) / line.plain_s
    axes.axhline(floor, color="black", linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        "reading the weights once",
        (line.rows[-1], floor),
        xytext=(0, 3),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=8,
    )
    axes.plot(line.rows, line.rows, color="#6e7781", linewidth=1, label="one pass per row")


def finish(axes: Axes, profile: Profile) -> None:
    """Set scales, labels and legend."""
    lines = profile.greedy.lines
    ticks = [rows for rows in (1, 2, 4, 8, 16, 32, 64) if rows <= max(x.rows[-1] for x in lines)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(rows) for rows in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 1.15 * max(line.verify(line.rows[-1]).s / line.plain_s for line in lines))
    axes.set_xlabel("n: rows per sequence in one target pass (K + 1)")
    axes.set_ylabel("v(n), in plain steps (95% interval)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")


def title(profile: Profile) -> str:
    """Return a title with models and machine."""
    setup = profile.setup
    threads = f"{setup.num_threads} thread{'s' * (setup.num_threads > 1)}"
    machine = f"{setup.cpu}, {threads}" if setup.device == "cpu" else setup.device
    return f"{Path(profile.target).name}, {setup.dtype}, {setup.target_runner}\n{machine}"
