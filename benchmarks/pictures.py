"""Writes plots in a common style, with identical files for identical figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BASELINE = "#6e7781"
"""Colour of what everything else is compared with."""
COLOURS = ("#cf5b2e", "#1a7f64", "#4361a8", "#9a6bb0", "#b08900")
"""Told apart in greyscale and by colour-blind readers."""


@contextmanager
def picture(paths: Sequence[Path], *, width: float, height: float) -> Iterator[Figure]:
    """Yield a matplotlib figure, its size in inches, and write it to every path afterwards.

    The suffix of a path, such as .png or .svg, names the format.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    look = rc_context(
        {
            "axes.spines.top": False,
            "axes.spines.right": False,
            "legend.frameon": False,
            "legend.fontsize": 8,
            "svg.hashsalt": "forerun",  # else the ids in the file differ from run to run
        }
    )
    with look:
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            with atomic_write(path) as scratch:
                figure.savefig(scratch, format=path.suffix[1:], dpi=160, metadata=metadata)
