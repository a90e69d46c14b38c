"""One picture of a training: acceptance while it learns, and the speedup it came to promise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.align.training.metrics import StepMetrics
from forerun.pictures import BASELINE, COLOURS, picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["plot_training"]

TRAINED, JUDGED = "#9fb3c8", COLOURS[0]


def plot_training(
    steps: Sequence[StepMetrics],
    alphas: Mapping[int, float],
    speedups: Mapping[int, float],
    paths: Sequence[Path],
) -> None:
    """Draw a training and write the picture to every path; the suffix names the format.

    Args:
        steps: what was measured while training.
        alphas: acceptance probability on held-out prompts, by steps done.
        speedups: predicted, by steps done; empty without a cost table.
        paths: for example a .png and a .svg.
    """
    with picture(paths, width=9.0, height=3.4) as figure:
        left, right = figure.subplots(1, 2)
        draw_acceptance(left, steps, alphas)
        draw_speedup(right, speedups)
        for axes in (left, right):
            axes.set_xlabel("optimiser steps")


def draw_acceptance(axes: Axes, steps: Sequence[StepMetrics], alphas: Mapping[int, float]) -> None:
    """Alpha of the texts that are learned, step by step, and of those that are not."""
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


def draw_speedup(axes: Axes, speedups: Mapping[int, float]) -> None:
    """Predicted speedup at the best K, and where drafting pays."""
    axes.axhline(1.0, color=BASELINE, linewidth=1, linestyle="--")
    axes.plot(list(speedups), list(speedups.values()), "o-", color=JUDGED)
    axes.set_ylabel("predicted speedup over plain decoding")
    if not speedups:
        axes.annotate("no cost table", (0.5, 0.5), xycoords="axes fraction", ha="center")
