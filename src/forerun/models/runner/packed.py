"""Weights of a decoder, packed once in memory of the CPU kernels."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from types import MappingProxyType

import torch
from jaxtyping import Float, Float32
from torch import Tensor

from forerun.errors import NotEnoughMemory, RunnerUnavailable
from forerun.models.architecture import QUANTISED, WeightFormat
from forerun.models.decoder import (
    BlockFormat,
    Decoder,
    Experts,
    LayerWeights,
    QuantisedMatrix,
)
from forerun.native.library import ELEMENTS, Kernels, MatrixFormat, MatrixKind, Sizes, VectorKind

BLOCK_FORMATS: Mapping[BlockFormat, MatrixFormat] = MappingProxyType(
    {
        BlockFormat(8): MatrixFormat.INT8_GROUPS_32,
        BlockFormat(8, has_minima=True): MatrixFormat.INT8_MINIMA_32,
        BlockFormat(8, group=16): MatrixFormat.INT8_GROUPS_16,
        BlockFormat(8, group=16, has_minima=True): MatrixFormat.INT8_MINIMA_16,
        BlockFormat(4): MatrixFormat.INT4_GROUPS_32,
        BlockFormat(4, has_minima=True): MatrixFormat.INT4_MINIMA_32,
    }
)
"""Formats of the kernels for matrices that are stored in groups."""
ReadBlocks = Callable[[MatrixKind, int | None], QuantisedMatrix | None]
"""Reads a quantised matrix of a layer, of an expert or of all rows; None for other matrices."""


class PackedWeights:
    """Packed weights in memory of the kernels, freed with this object."""

    last_norm: Tensor

    def __init__(
        self,
        kernels: Kernels,
        handle: int,
        norm_eps: float,
        dtype: torch.dtype,
        *,
        embedding_of: PackedWeights | None = None,
    ) -> None:
        self.embedding_of = embedding_of  # kept alive, since the kernels read it
        self.norm_eps, self.dtype = norm_eps, dtype
        self.kernels = kernels
        self.handle = handle
        self.layer_sizes: list[int] = []

    def __del__(self) -> None:
        self.kernels.library.forerun_decoder_delete(self.handle)

    @property
    def num_bytes(self) -> int:
        return int(self.kernels.library.forerun_decoder_bytes(self.handle))

    def requantised(self, weights: WeightFormat, num_layers: int) -> PackedWeights:
        """Pack the same weights in fewer bits; the result reads this one's embedding.

        Raises:
            NotEnoughMemory: there is no memory for them.
        """
        formats = array("i", choose_formats(weights, num_layers))
        address = formats.buffer_info()[0]
        handle = self.kernels.library.forerun_decoder_requantised(self.handle, address)
        if not handle:
            raise NotEnoughMemory(f"no memory for another copy of the weights in {weights}")
        made = PackedWeights(self.kernels, handle, self.norm_eps, self.dtype, embedding_of=self)
        made.layer_sizes, made.last_norm = self.layer_sizes, self.last_norm
        return made

    def put_vector(self, kind: VectorKind, layer: int, vector: Tensor | None) -> int:
        """Copy a vector in; returns its number of elements."""
        if vector is None or not vector.numel():
            return 0
        values = vector.float().contiguous()
        self.kernels.library.forerun_decoder_put_vector(self.handle, kind, layer, values.data_ptr())
        return values.numel()

    def put_matrix(
        self, kind: MatrixKind, layer: int, matrix: Tensor, expert: int | None = None
    ) -> int:
        """Pack a matrix, of an expert or of all rows; returns its number of elements."""
        values = matrix.to(self.dtype).contiguous()
        self.kernels.library.forerun_decoder_put_matrix(
            self.handle, kind, layer, -1 if expert is None else expert, values.data_ptr()
        )
        return values.numel()

    def put_quantised(
        self, kind: MatrixKind, layer: int, matrix: QuantisedMatrix, expert: int | None = None
    ) -> int:
        """Pack integers, scales and minima as they are; returns the number of weights."""
        parts = [None if part is None else part.contiguous() for part in matrix]
        addresses = [None if part is None else part.data_ptr() for part in parts]
        put, values = self.kernels.library.forerun_decoder_put_quantised, matrix.values
        if not put(self.handle, kind, layer, -1 if expert is None else expert, *addresses):
            raise ValueError(f"{kind.name} of layer {layer} is not packed in groups of its width")
        return values.numel()

    def apply_head(
        self, rows: Float[Tensor, "rows width"], num_outputs: int
    ) -> Float32[Tensor, "rows num_outputs"]:
        """Multiply rows with the output matrix (NotEnoughMemory)."""
        rows = rows.to(self.dtype).contiguous()
        products = torch.empty((len(rows), num_outputs))
        if not self.kernels.library.forerun_decoder_head(
            self.handle, rows.data_ptr(), len(rows), products.data_ptr()
        ):
            raise NotEnoughMemory(f"no memory for the head over {len(rows)} rows; pass fewer")
        return products

    def put_layer(
        self,
        index: int,
        layer: LayerWeights,
        read_blocks: ReadBlocks = lambda kind, expert: None,
    ) -> int:
        """Pack a layer, with some matrices already quantised; returns its number of elements."""

        def put(kind: MatrixKind, matrix: Tensor, expert: int | None = None) -> int:
            if kind != MatrixKind.ROUTER and (blocks := read_blocks(kind, expert)) is not None:
                return self.put_quantised(kind, index, blocks, expert)
            return self.put_matrix(kind, index, matrix, expert)

        vectors = {
            VectorKind.INPUT_NORM: layer.input_norm,
            VectorKind.POST_NORM: layer.post_norm,
            VectorKind.QUERY_NORM: layer.query_norm,
            VectorKind.KEY_NORM: layer.key_norm,
            VectorKind.QKV_BIAS: layer.qkv_bias,
            VectorKind.ATTENTION_NORM: layer.attention_norm,
            VectorKind.FEED_FORWARD_NORM: layer.feed_forward_norm,
        }
        matrices = {MatrixKind.QKV: layer.qkv, MatrixKind.OUTPUT: layer.output}
        if layer.experts is None:
            matrices |= {MatrixKind.GATE_UP: layer.gate_up, MatrixKind.DOWN: layer.down}
        else:
            matrices[MatrixKind.ROUTER] = layer.experts.router
        size = sum(self.put_vector(kind, index, v) for kind, v in vectors.items())
        size += sum(put(kind, matrix) for kind, matrix in matrices.items())
        experts = () if layer.experts is None else layer.experts.matrices
        for expert, (gate_up, down) in enumerate(experts):
            size += put(MatrixKind.GATE_UP, gate_up, expert) + put(MatrixKind.DOWN, down, expert)
        self.layer_sizes.append(size)
        return size


FORMATS = {8: MatrixFormat.INT8_GROUPS_64, 4: MatrixFormat.INT4_GROUPS_32}
"""Matrix format by bits; inputs per group are `GROUP_SIZES` in models/memory.py."""


def choose_formats(weights: WeightFormat, num_layers: int) -> tuple[MatrixFormat, ...]:
    """Return the formats of the four matrices of every layer, then of the output layer."""
    if weights not in QUANTISED:
        return ()
    body, head = (FORMATS[bits] for bits in QUANTISED[weights])
    return (*([body] * 4 * num_layers), head)


def _list_layers(decoder: Decoder) -> array[int]:
    """Return `ForerunLayer` of every layer, one after another."""
    num_layers = decoder.architecture.num_layers
    windows = decoder.windows or (None,) * num_layers
    rotations = decoder.rotations or (0,) * num_layers
    mixed = (False,) * num_layers if decoder.experts is None else decoder.experts.layers
    blocks = [2 - is_causal for is_causal in decoder.causal_blocks] or [0] * num_layers
    listed = array("i")
    for window, *others in zip(windows, rotations, mixed, blocks, strict=True):
        listed.extend((window or 0, *others))
    return listed


def _list_rotations(decoder: Decoder) -> tuple[Tensor, array[float]]:
    """Return the rotations that layers choose from, and their scales."""
    rotations = [(decoder.inv_freq, decoder.rope_scale)]
    if decoder.sliding_rotation is not None:
        rotations.append(decoder.sliding_rotation)
    inv_freq, scales = zip(*rotations, strict=True)
    return torch.stack(inv_freq), array("f", scales)


def create_decoder(
    decoder: Decoder,
    dtype: torch.dtype,
    kernels: Kernels,
    flags: Mapping[str, bool] = MappingProxyType({}),
    formats: Sequence[MatrixFormat] = (),
) -> int:
    """Create a decoder without weights in the kernels.

    Args:
        flags: of an attached head, by their names in `Sizes`.
        formats: of the matrices of every layer and of the output layer; none: `dtype`.
    """
    architecture = decoder.architecture
    inv_freq, rope_scales = _list_rotations(decoder)
    listed = array("i", formats)
    layers, experts = _list_layers(decoder), decoder.experts or Experts()
    # transformers rounds the factor of Gemma's embeddings to their dtype.
    embedding_scale = float(torch.tensor(decoder.embedding_scale, dtype=dtype))
    sizes = Sizes(
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        num_heads=architecture.num_heads,
        num_kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        intermediate_size=decoder.intermediate_size,
        vocab_size=architecture.vocab_size,
        tied=decoder.tied,
        whole_qk_norm=decoder.variant.qk_norm == "whole",
        interleaved=decoder.variant.interleaved,
        gelu=decoder.gelu,
        num_ropes=len(rope_scales),
        num_pairs=inv_freq.shape[1],
        num_experts=experts.num_experts,
        experts_per_row=experts.num_used,
        expert_size=experts.intermediate_size,
        normalise_experts=experts.normalised,
        norm_eps=decoder.norm_eps,
        embedding_scale=embedding_scale,
        residual_scale=decoder.residual_scale,
        score_scale=decoder.score_scale or architecture.head_dim**-0.5,
        logit_divisor=decoder.logit_divisor,
        score_cap=decoder.score_cap,
        logit_cap=decoder.logit_cap,
        inv_freq=inv_freq.data_ptr(),
        rope_scales=rope_scales.buffer_info()[0],
        layers=layers.buffer_info()[0],
        formats=listed.buffer_info()[0] if listed else None,
        **flags,
    )
    if dtype not in ELEMENTS:
        raise RunnerUnavailable(f"the CPU kernels compute in bf16 and fp32, not in {dtype}")
    handle = kernels.library.forerun_decoder_new(kernels.crew, ELEMENTS[dtype], byref(sizes))
    if not handle:
        raise RunnerUnavailable(
            f"the CPU kernels are not written for hidden_size {architecture.hidden_size} with "
            f"head_dim {architecture.head_dim} (both must be multiples of 16, the latter at most "
            "256), or memory is short"
        )
    return int(handle)
