"""Integers, scales and minima of the GGUF types that the native runner keeps in packed blocks.

Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1 are kept without any rounding, those of five bits as int8. The
scales of Q4_K, Q5_K and Q6_K are products of two numbers and are rounded to fp16, by at most 2^-11
of themselves; the integers of the last two are kept as int8.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np

from forerun.models.decoder import BlockFormat

Parts = tuple[np.ndarray, ...]
"""Integers (outputs, inputs), scales (outputs, groups) and, for some types, minima like scales."""

FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        "Q8_0": BlockFormat(8),
        "Q4_0": BlockFormat(4),
        "Q4_1": BlockFormat(4, has_minima=True),
        "Q5_0": BlockFormat(8),
        "Q5_1": BlockFormat(8, has_minima=True),
        "Q4_K": BlockFormat(4, has_minima=True),
        "Q5_K": BlockFormat(8, has_minima=True),
        "Q6_K": BlockFormat(8, group=16),
    }
)
"""Format in which the blocks of a type are kept."""
ROUNDED = ("Q4_K", "Q5_K", "Q6_K")
"""Types whose scales are rounded to fp16."""


def unpack_integers(rows: np.ndarray, type_name: str, shape: tuple[int, ...]) -> Parts:
    """Return the integers, scales and minima in rows of bytes of one of `FORMATS`.

    Scales that fp16 cannot hold become infinite.
    """
    outputs, inputs = shape
    per_block = 256 if type_name in ROUNDED else 32
    blocks = rows.reshape(outputs * (inputs // per_block), -1)
    with np.errstate(over="ignore", invalid="ignore"):
        values, *scales = READERS[type_name](blocks)
    halves = [part.astype(np.float16).reshape(outputs, -1) for part in scales]
    return (values.astype(np.int8).reshape(outputs, inputs), *halves)


def _read_halves(blocks: np.ndarray, *places: int) -> list[np.ndarray]:
    """Return the fp16 numbers at some bytes of every block, one column each."""
    return [blocks[:, place : place + 2].copy().view(np.float16) for place in places]


def _split_nibbles(packed: np.ndarray) -> np.ndarray:
    """Return the low halves of bytes and, behind them, the high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _read_fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Return 16 times each of the 32 bits in four bytes."""
    return np.unpackbits(packed, axis=-1, bitorder="little") << 4


def _read_q8_0(blocks: np.ndarray) -> Parts:
    return blocks[:, 2:].view(np.int8), *_read_halves(blocks, 0)


def _read_q4_0(blocks: np.ndarray) -> Parts:
    return _split_nibbles(blocks[:, 2:]).astype(np.int8) - 8, *_read_halves(blocks, 0)


def _read_q4_1(blocks: np.ndarray) -> Parts:
    return _split_nibbles(blocks[:, 4:]), *_read_halves(blocks, 0, 2)


def _read_q5_0(blocks: np.ndarray) -> Parts:
    values = _split_nibbles(blocks[:, 6:]) | _read_fifth_bits(blocks[:, 2:6])
    return values.astype(np.int8) - 16, *_read_halves(blocks, 0)


def _read_q5_1(blocks: np.ndarray) -> Parts:
    return _split_nibbles(blocks[:, 8:]) | _read_fifth_bits(blocks[:, 4:8]), *_read_halves(
        blocks, 0, 2
    )


def _read_scales_and_minima(blocks: np.ndarray) -> list[np.ndarray]:
    """Return the scale and the minimum of each of eight groups, from numbers of six bits."""
    scale, minimum = (half.astype(np.float32) for half in _read_halves(blocks, 0, 2))
    low, middle, high = (blocks[:, place : place + 4] for place in (4, 8, 12))
    times = np.concatenate([low & 63, high & 15 | low >> 2 & 48], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 2 & 48], axis=-1)
    return [scale * times, -minimum * minima]


def _read_q4_k(blocks: np.ndarray) -> Parts:
    values = _split_nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return values, *_read_scales_and_minima(blocks)


def _read_q5_k(blocks: np.ndarray) -> Parts:
    low = _split_nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    bits = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return low | bits << 4, *_read_scales_and_minima(blocks)


def _read_q6_k(blocks: np.ndarray) -> Parts:
    low = _split_nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    places = np.array([0, 2, 4, 6], dtype=np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> places & 3
    scales = blocks[:, 192:208].view(np.int8) * _read_halves(blocks, 208)[0].astype(np.float32)
    return (low | high << 4).astype(np.int8) - 32, scales


READERS: Mapping[str, Callable[[np.ndarray], Parts]] = MappingProxyType(
    {
        "Q8_0": _read_q8_0,
        "Q4_0": _read_q4_0,
        "Q4_1": _read_q4_1,
        "Q5_0": _read_q5_0,
        "Q5_1": _read_q5_1,
        "Q4_K": _read_q4_k,
        "Q5_K": _read_q5_k,
        "Q6_K": _read_q6_k,
    }
)
