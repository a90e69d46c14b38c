"""Plots of simulations: latency of every controller, and K over the phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.pictures import COLOURS, picture
from forerun.plan.simulation.comparison import Oracle
from forerun.plan.simulation.result import Result

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(results: Sequence[Result], oracle: Oracle | None, path: Path) -> None:
    """Draw seconds per token by phase beside mean K by phase, a line per controller.

    Args:
        results: results on the same workload.
        oracle: the best fixed K of every phase, where it was computed.
        path: output file; its suffix names the format.
    """
    with picture([path], width=9.6, height=4.0) as figure:
        left, right = figure.subplots(1, 2)
        _draw_latency(left, results, oracle)
        _draw_ks(right, results, oracle)


def _draw_latency(axes: Axes, results: Sequence[Result], oracle: Oracle | None) -> None:
    """Draw milliseconds of decoding per token, phase by phase."""
    for index, result in enumerate(results):
        latency = [1e3 * p.decode_s / p.num_tokens if p.num_tokens else 0.0 for p in result.phases]
        line(axes, latency, index, result.controller)
    if oracle is not None:
        tokens = [phase.num_tokens for phase in results[0].phases]
        best = [1e3 * s / n if n else 0.0 for s, n in zip(oracle.decode_s, tokens, strict=True)]
        axes.plot(range(1, len(best) + 1), best, "k_", markersize=16, label="best fixed K")
    axes.set_ylabel("ms per decoded token")
    finish(axes, len(results[0].phases))


def _draw_ks(axes: Axes, results: Sequence[Result], oracle: Oracle | None) -> None:
    """Draw drafted tokens per step, phase by phase."""
    for index, result in enumerate(results):
        line(axes, [phase.mean_k for phase in result.phases], index, result.controller)
    if oracle is not None:
        axes.plot(
            range(1, len(oracle.ks) + 1), oracle.ks, "k_", markersize=16, label="best fixed K"
        )
    axes.set_ylabel("drafted tokens per step")
    finish(axes, len(results[0].phases))


def line(axes: Axes, values: Sequence[float], index: int, label: str) -> None:
    style = ("-", "--", ":")[index // len(COLOURS) % 3]
    colour = COLOURS[index % len(COLOURS)]
    axes.plot(range(1, len(values) + 1), values, style, marker="o", color=colour, label=label)


def finish(axes: Axes, num_phases: int) -> None:
    """Set scales, labels and the legend."""
    axes.set_xticks(range(1, num_phases + 1))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("phase of the workload")
    axes.legend()
