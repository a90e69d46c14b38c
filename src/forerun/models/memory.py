"""Memory estimates, compared with the available memory before any allocation; freed memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import psutil
import torch

from forerun.errors import NotEnoughMemory
from forerun.models.architecture import QUANTISED, Architecture, WeightFormat

BLOCK_ROWS = 16
"""Rows of a slot whose keys the C++ kernels read together; a slot has room for whole blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVGeometry:
    """Sizes of a KV store.

    Attributes:
        num_layers: attention layers.
        capacity: tokens a sequence may commit.
        max_staged_rows: rows that may be staged past the capacity.
        hidden_size: width of the residual stream; 0: features cannot be kept.
        state_bytes: of the recurrent states of all layers after one token.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_slots: int
    capacity: int
    max_staged_rows: int
    dtype: torch.dtype
    hidden_size: int = 0
    state_bytes: int = 0

    @property
    def states_bytes(self) -> int:
        """Largest size of all recurrent states: of the slots, and of the rows of a pass.

        A slot keeps the state after its last committed row, after every row that may be staged, at
        two places in a chunk of a prompt, and after the beginning that it shares with others.
        """
        return self.num_slots * (self.max_staged_rows + 4) * self.state_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the one tensor: keys of layer l at 2l, values at 2l + 1; then slots."""
        num_blocks = -(-(self.capacity + self.max_staged_rows) // BLOCK_ROWS)
        width = num_blocks * BLOCK_ROWS
        return (2 * self.num_layers, self.num_slots, self.num_kv_heads, width, self.head_dim)


def geometry_of(
    architecture: Architecture,
    *,
    num_slots: int,
    capacity: int,
    max_staged_rows: int,
    dtype: torch.dtype,
) -> KVGeometry:
    """Return the sizes of the KV store for a model of this architecture."""
    convolution, recurrence = architecture.state_sizes
    return KVGeometry(
        num_layers=architecture.num_attention_layers,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        num_slots=num_slots,
        capacity=capacity,
        max_staged_rows=max_staged_rows,
        dtype=dtype,
        hidden_size=architecture.hidden_size,
        state_bytes=convolution * dtype.itemsize + recurrence * torch.float32.itemsize,
    )


def count_bytes(geometry: KVGeometry) -> int:
    return torch.Size(geometry.shape).numel() * geometry.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Bytes that a model needs, by purpose.

    Attributes:
        logits_bytes: one fp32 row per token a full batch may verify at once.
        states_bytes: recurrent states.
    """

    weights_bytes: int
    kv_bytes: int
    logits_bytes: int
    states_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.logits_bytes + self.states_bytes


GROUP_SIZES: Mapping[int, int] = MappingProxyType({8: 64, 4: 32})
"""Inputs with a common fp16 scale, by the bits of the weights."""


def weights_bytes(
    num_parameters: int,
    architecture: Architecture,
    dtype: torch.dtype,
    weights: WeightFormat = "auto",
    *,
    is_tied: bool = False,
) -> int:
    """Return the bytes of a model's weights; embeddings and norms stay in `dtype`."""
    if weights not in QUANTISED:
        return num_parameters * dtype.itemsize
    body_bits, head_bits = (bits + 16 / GROUP_SIZES[bits] for bits in QUANTISED[weights])
    embedding = architecture.vocab_size * architecture.hidden_size
    body = num_parameters - embedding * (1 if is_tied else 2)
    return embedding * dtype.itemsize + math.ceil((body * body_bits + embedding * head_bits) / 8)


def estimate(
    num_parameters: int,
    architecture: Architecture,
    geometry: KVGeometry,
    weights: WeightFormat = "auto",
    *,
    is_tied: bool = False,
) -> MemoryEstimate:
    """Estimate the memory of a model with a KV store of these sizes."""
    num_logit_rows = geometry.num_slots * (geometry.max_staged_rows + 1)
    return MemoryEstimate(
        weights_bytes=weights_bytes(
            num_parameters, architecture, geometry.dtype, weights, is_tied=is_tied
        ),
        kv_bytes=count_bytes(geometry),
        logits_bytes=num_logit_rows * architecture.vocab_size * torch.float32.itemsize,
        states_bytes=geometry.states_bytes,
    )


def available_bytes(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def check_fits(
    name: str, needed: MemoryEstimate, geometry: KVGeometry, device: torch.device
) -> None:
    """Refuse a model that does not fit into the available memory."""
    available = available_bytes(device)
    if needed.total_bytes <= available:
        return
    states = ""
    if needed.states_bytes:
        states = (
            f", recurrent states {readable(needed.states_bytes)} "
            f"({readable(geometry.state_bytes)} each, for up to {geometry.max_staged_rows} rows "
            "of a step of each sequence)"
        )
    raise NotEnoughMemory(
        f"{name} needs {readable(needed.total_bytes)} on {device}, {readable(available)} are "
        f"available: weights {readable(needed.weights_bytes)}, KV {readable(needed.kv_bytes)} for "
        f"{geometry.num_slots} sequences of {geometry.capacity} tokens, logits "
        f"{readable(needed.logits_bytes)}{states}. {remedy(needed, geometry, available)}"
    )


def remedy(needed: MemoryEstimate, geometry: KVGeometry, available: int) -> str:
    """Suggest the largest context that would fit, or a smaller model if none would."""
    spare = available - (needed.total_bytes - needed.kv_bytes)
    bytes_per_row = needed.kv_bytes // (geometry.capacity + geometry.max_staged_rows)
    capacity = spare // bytes_per_row - geometry.max_staged_rows if bytes_per_row else 0
    if capacity > 0:
        return f"max_context={capacity} would fit; or lower max_batch"
    if needed.states_bytes:
        return "Lower max_batch, K or max_tree_nodes, or use a smaller model"
    return "Lower max_batch, load in bf16, or use a smaller model"


def readable(num_bytes: int) -> str:
    """Format a number of bytes, for example "5.6 GiB"."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def return_freed_memory() -> None:
    """Return freed memory that the C library (glibc) keeps to the system.

    The logits have another size at almost every step, and freed blocks of many sizes leave holes
    that glibc keeps: an engine with 64 sequences grew by a gigabyte in three minutes.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
