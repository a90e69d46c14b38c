"""Whether a draft's weight matrices were trained: what they hold, and whether it looks drawn.

An initialiser draws every entry by itself from one law. Training leaves rows and columns of unlike
size, and directions that stand out. So a matrix is held against three things that are known of
independent draws, whatever their law: how the sizes of its rows scatter, those of its columns, and
how large its largest singular value gets (Johnstone 2001).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from forerun.diagnose.evidence import Evidence
from forerun.models.checkpoint import read_checkpoint

__all__ = ["add_weights", "looks_drawn"]

MIN_SIZE = 64
"""Rows and columns of a matrix that is large enough to tell."""
MAX_Z = 3.0
POWER_STEPS = 20
"""Where a direction stands out, this many passes find it; where none does, any will do."""


def add_weights(evidence: Evidence, draft: Path) -> None:
    """Matrices that are no weights, and the share of those that nobody seems to have trained."""
    wrong: list[str] = []
    drawn: list[str] = []
    num_large = 0
    for name, matrix in matrices(draft):
        if not bool(matrix.isfinite().all()) or bool((matrix == matrix[0, 0]).all()):
            wrong.append(name)
        elif min(matrix.shape) >= MIN_SIZE:
            num_large += 1
            if looks_drawn(matrix):
                drawn.append(name)
    if wrong:
        words = f"{len(wrong)} matrices are not finite or constant: {', '.join(wrong[:3])}"
        evidence.add("weights_incomplete", True, words)
    if num_large:
        words = f"{len(drawn)} of {num_large} matrices: {', '.join(drawn[:3]) or 'none'}"
        evidence.add("drawn_share", len(drawn) / num_large, words)


def matrices(folder: Path) -> Iterator[tuple[str, Float[Tensor, "rows columns"]]]:
    """Weight matrices, one at a time."""
    for path in read_checkpoint(folder).weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and tensor.is_floating_point():
                    yield name, tensor.float()


def looks_drawn(matrix: Float[Tensor, "rows columns"]) -> bool:
    """Whether all entries may have been drawn independently from one law.

    Args:
        matrix: finite, not constant, with some dozens of rows and columns.
    """
    centred = matrix - matrix.mean()
    squares = centred.square()
    scatter = max(abs(dispersion(squares)), abs(dispersion(squares.T)))
    return scatter < MAX_Z and edge_excess(centred) < MAX_Z


def dispersion(squares: Float[Tensor, "rows columns"]) -> float:
    """How far the scatter of row sums is from that of independent entries, in standard errors."""
    num_rows, num_columns = squares.shape
    expected = squares.var() / num_columns
    ratio = float(squares.mean(1).var() / expected)
    return (ratio - 1.0) / math.sqrt(2.0 / (num_rows - 1))


def edge_excess(centred: Float[Tensor, "rows columns"]) -> float:
    """By how much the largest singular value passes that of independent entries, in its scale."""
    long, short = max(centred.shape), min(centred.shape)
    generator = torch.Generator().manual_seed(0)
    vector = torch.empty(centred.shape[1]).normal_(generator=generator)
    for _ in range(POWER_STEPS):
        vector = centred.T @ (centred @ (vector / vector.norm()))
    sides = math.sqrt(long - 1), math.sqrt(short)
    centre = sum(sides) ** 2
    scale: float = sum(sides) * (1.0 / sides[0] + 1.0 / sides[1]) ** (1.0 / 3.0)
    square = float(vector.norm() / centred.var())
    return (square - centre) / scale
