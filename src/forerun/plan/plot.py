"""Plots of plans: speedup over K, with one line per drafter."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forerun.pictures import BASELINE, COLOURS, picture
from forerun.plan.advice import Advice

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(advice: Advice, path: Path) -> None:
    """Draw the speedup over K at the batch of the plan, with its 95% interval."""
    with picture([path], width=6.4, height=4.0) as figure:
        draw(figure.subplots(), advice)


def draw(axes: Axes, advice: Advice) -> None:
    """Draw a line and a band per drafter, and mark the chosen option."""
    for index, (name, curve) in enumerate(advice.curves):
        colour = COLOURS[index % len(COLOURS)]
        ks = [option.num_speculative_tokens for option in curve]
        found = [option.speedup for option in curve]
        axes.plot(
            ks, [s.estimate for s in found], marker="o", markersize=3, color=colour, label=name
        )
        axes.fill_between(
            ks,
            [s.low for s in found],
            [s.high for s in found],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    best = advice.best
    axes.plot(
        best.num_speculative_tokens,
        best.speedup.estimate,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        color="black",
        linestyle="none",
        label="plan",
    )
    axes.axhline(1.0, color=BASELINE, linewidth=1, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K: most drafted tokens per step")
    axes.set_ylabel(f"predicted speedup at batch {best.batch} (95% interval)")
    axes.legend()
