"""Counter-based noise: every random number is a pure function of a key.

A key names one draw of one request. Target draws of the walk are keyed by position, so that the
text of a seed does not depend on how it was drafted. Every other draw is keyed by the number of
committed tokens at the start of the step, too: a rejected position is drawn again in the next step,
and noise that has already decided a rejection is no longer uniform (`forerun exact` shows the
bias).

Keys are mixed by `theory.splitmix` in Python, clocks by the same function in wrapping int64
arithmetic on tensors, so that any device draws the same bits.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for, row_chunks
from forerun.theory.splitmix import FACTORS, INCREMENT, SHIFTS, finalise


class Purpose(IntEnum):
    """Purpose of a random draw, which is part of its noise key."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVERED = 3
    BONUS = 4


PURPOSE_BITS = 3


def request_key(seed: int, sample_index: int) -> int:
    """Noise key, in int64, of sample 0 to n - 1 of a request; the seed is taken modulo 2^64."""
    return _signed(_absorb(_absorb(0, seed), sample_index))


def position_key(request_key: int, position: int) -> int:
    """Key for drawing the target's (or a coupled draft's) token at an index in prompt + output."""
    return _signed(_absorb(request_key, position << PURPOSE_BITS | Purpose.TARGET))


def step_key(request_key: int, num_committed: int, node: int, purpose: Purpose) -> int:
    """Return the key of a draw in one step, for any purpose except the target's own draw.

    `num_committed` counts prompt + output at the start of the step. `node` is 0 for the one final
    token of a step.
    """
    (key,) = step_keys(request_key, num_committed, range(node, node + 1), purpose)
    return key


def step_keys(request_key: int, num_committed: int, nodes: range, purpose: Purpose) -> list[int]:
    """Return `step_key` of several nodes, whose common beginning is mixed once."""
    step = _absorb(request_key, num_committed << PURPOSE_BITS | purpose)
    bits = [finalise(step + (node + 1) * INCREMENT) for node in nodes]
    return [key - (1 << 64) if key >> 63 else key for key in bits]


def chain_keys(request_key: int, num_committed: int, num_nodes: int) -> list[int]:
    """Return all keys of `verify_chains` for one row: ACCEPT per node, RECOVERED, BONUS."""
    return [
        *step_keys(request_key, num_committed, range(num_nodes), Purpose.ACCEPT),
        step_key(request_key, num_committed, 0, Purpose.RECOVERED),
        step_key(request_key, num_committed, 0, Purpose.BONUS),
    ]


def uniform(keys: Int64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """Return one uniform number in [0, 1) per key, from the upper 53 bits of its hash."""
    return _logical_shift(keys, 11).to(torch.float64).mul_(2.0**-53)


def exponential(keys: Int64[Tensor, " rows"], num_clocks: int) -> Float32[Tensor, "rows clocks"]:
    """Return standard exponential variates: -log1p(-u) of uniforms on the open interval.

    The uniform is an odd multiple of 2^-53: neither 0 nor 1, so no clock is 0 or infinite, and
    small clocks, the ones that win races, keep full relative precision.
    """
    clocks = torch.empty(len(keys), num_clocks, dtype=torch.float32, device=keys.device)
    steps = torch.arange(1, num_clocks + 1, device=keys.device).mul_(_signed(INCREMENT))
    for rows in row_chunks(len(keys), num_clocks):
        bits = _logical_shift(_mix(keys[rows, None] + steps), 12)
        uniforms = bits.to(torch.float64).add_(0.5).mul_(-(2.0**-52))
        clocks[rows] = uniforms.log1p_().neg_()
    return clocks


def draw(
    weights: Float[Tensor, "rows vocab"], uniforms: Float64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw one token per row from unnormalised weights by the inverse CDF.

    Token x is drawn when u * total lies in [W(x - 1), W(x)), W the running sum, so that only tokens
    of positive weight can be: u * total rounds to less than total, for u is at most 1 - 2^-53.

    Args:
        weights: non-negative, at least one positive per row; they need not sum to 1.
    """
    if kernels := kernels_for(weights):
        return kernels.draw(weights, uniforms)
    sums = weights.cumsum(-1, dtype=torch.float64)
    if scans_in_order(weights.device):
        found = torch.searchsorted(sums, (sums[:, -1] * uniforms)[:, None], right=True)
        return found[:, 0].clamp_(max=weights.shape[-1] - 1)  # of NaN: any token
    # A parallel scan may round the sum at a weight of zero above its neighbours'.
    sums.mul_(weights > 0)
    reached = sums > (sums.amax(-1) * uniforms)[:, None]
    return reached.view(torch.uint8).argmax(-1)  # argmax: the first of the equal ones


def scans_in_order(device: torch.device) -> bool:
    return device.type == "cpu"


def _absorb(key: int, word: int) -> int:
    return finalise(key + (word + 1) * INCREMENT)


def _signed(bits: int) -> int:
    return bits - (1 << 64) if bits >> 63 else bits


def _logical_shift(bits: Int64[Tensor, "*shape"], count: int) -> Int64[Tensor, "*shape"]:
    return (bits >> count).bitwise_and_((1 << (64 - count)) - 1)


def _mix(bits: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    for shift, factor in zip(SHIFTS, FACTORS, strict=False):
        bits.bitwise_xor_(_logical_shift(bits, shift)).mul_(_signed(factor))
    return bits.bitwise_xor_(_logical_shift(bits, SHIFTS[-1]))
