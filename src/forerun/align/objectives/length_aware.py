"""Weights of rows by their contribution to the expected accepted length.

Of K drafted tokens starting at row s, E_s = sum over k of a_s ... a_(s+k-1) are accepted on
average, with a the acceptance probability of a row: a position after an unlikely one is seldom
reached, and the first one decides about all that follow. The weight of row j is the sum, over the
windows that contain it, of d log E_s / d log a_j: the part of E_s that goes through j, over E_s.
With -log alpha as the objective, the weighted gradient is that of -sum log E_s. D-PACE (arXiv
2605.18810) weights by path too, and smooths instead.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

__all__ = ["length_weights"]

ALPHA_FLOOR = 1e-6
"""Acceptance counts as no less, so that a hopeless window still has shares: all of it its first."""


@torch.no_grad()
def length_weights(
    acceptance: Float[Tensor, " rows"],
    samples: Int64[Tensor, " rows"],
    positions: Int64[Tensor, " rows"],
    num_speculative_tokens: int,
) -> Float[Tensor, " rows"]:
    """Return the weight of every learned row, from 1 to (K + 1) / 2.

    A window starts at every row and ends after K rows, or where its text does.

    Args:
        acceptance: alpha of each row.
        samples: the text each row belongs to.
        positions: of each row in its text; where it skips, a window ends.
        num_speculative_tokens: K.
    """
    alphas = acceptance.clamp(min=ALPHA_FLOOR)
    reached = _reached(alphas, samples, positions, num_speculative_tokens)
    through = reached.flip(1).cumsum(1).flip(1)
    shares = through / through[:, :1]
    weights = torch.zeros_like(alphas)
    for offset in range(min(num_speculative_tokens, len(alphas))):
        weights[offset:] += shares[: len(alphas) - offset, offset]
    return weights


def _reached(alphas: Tensor, samples: Tensor, positions: Tensor, window: int) -> Tensor:
    """Return the probability that all tokens up to each offset from a row are accepted."""
    columns = []
    so_far = torch.ones_like(alphas)
    for offset in range(window):
        # Rows past the last one wrap around to the first, whose position or text differs.
        same = samples.roll(-offset) == samples
        follows = positions.roll(-offset) - positions == offset
        so_far = so_far * torch.where(same & follows, alphas.roll(-offset), 0.0)
        columns.append(so_far)
    return torch.stack(columns, 1)
