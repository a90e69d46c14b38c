"""The torch runner, whose passes are recorded as CUDA graphs on CUDA, and its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from forerun.models.attention import attend
from forerun.models.base import ModelOutput, RowBatch, StoredModel
from forerun.models.decoder import Decoder, LayerWeights, ReadTensor
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.memory import KVGeometry
from forerun.models.runner.graphs.layers import (
    Elementwise,
    Rotation,
    Weights,
    compute_rotation,
    read_weights,
    split_heads,
)
from forerun.models.runner.graphs.programs import (
    AttendRows,
    CudaRecorder,
    GraphRecorder,
    Programs,
    RectanglePass,
    run_ragged,
)
from forerun.models.runner.graphs.rectangle import Rows, ShapeLimits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TorchAttention:
    """Attention over a padded rectangle of rows by torch operations.

    Attributes:
        places: where each row's heads lie in a layer of the store, counted in heads.
        unwritten: keys past each sequence's own.
        bias: 0 where a row, heads of a group folded in, sees a key, -inf where not.
    """

    decoder: Decoder
    store: ContiguousKVStore
    rows: Rows
    rotation: Rotation
    places: Int64[Tensor, " written_heads"]
    unwritten: Bool[Tensor, "sequences 1 keys 1"]
    bias: Float[Tensor, "sequences 1 folded keys"]

    def __call__(
        self, index: int, layer: LayerWeights, qkv: Float[Tensor, "rows qkv_rows"]
    ) -> Float[Tensor, "rows query_rows"]:
        query, key, value = split_heads(self.decoder, layer, qkv, self.rotation)
        keys, values = self.store.layer(index)
        for stored, new in ((keys, key), (values, value)):
            stored.view(-1, new.shape[-1]).index_copy_(0, self.places, new.flatten(0, 1))
        bucket = self.rows.bucket
        queries = query.view(bucket.num_sequences, bucket.num_rows, *query.shape[1:])
        scaling = self.decoder.architecture.head_dim**-0.5
        own = (self.own(keys), self.own(values))
        return attend(queries.transpose(1, 2), *own, self.bias, scaling).reshape(len(qkv), -1)

    def own(
        self, stored: Float[Tensor, "slots kv_heads width head_dim"]
    ) -> Float[Tensor, "sequences kv_heads keys head_dim"]:
        """Copy the sequences' keys or values, with 0 at positions not written yet."""
        cut = stored.narrow(2, 0, self.rows.bucket.num_keys)
        return cut.index_select(0, self.rows.slot).masked_fill_(self.unwritten, 0)


def torch_attention(decoder: Decoder, store: ContiguousKVStore, rows: Rows) -> TorchAttention:
    """Compute the inputs of attention that are the same in all layers of a pass."""
    sizes = decoder.architecture
    keys = torch.arange(rows.bucket.num_keys, device=rows.slot.device)
    seen = _mask_visible(rows, keys).repeat(1, sizes.num_heads // sizes.num_kv_heads, 1)
    bias = torch.zeros_like(seen, dtype=store.geometry.dtype).masked_fill_(~seen, float("-inf"))
    return TorchAttention(
        decoder=decoder,
        store=store,
        rows=rows,
        rotation=compute_rotation(decoder, rows.positions.flatten()),
        places=_list_places(store, rows),
        unwritten=(keys >= rows.end[:, None])[:, None, :, None],
        bias=bias[:, None],
    )


def _mask_visible(rows: Rows, keys: Int64[Tensor, " keys"]) -> Bool[Tensor, "sequences rows keys"]:
    """Mask of visible keys per row: all before the span, and within it those set in `visible`."""
    offsets = keys - rows.start[:, None]
    bits = rows.visible[:, :, None] >> offsets.clamp(0, 63)[:, None]
    own = (offsets >= 0) & (keys < rows.end[:, None])
    return torch.where(own[:, None], bits & 1 != 0, (offsets < 0)[:, None])


def _list_places(store: ContiguousKVStore, rows: Rows) -> Int64[Tensor, " written_heads"]:
    """Return the flat index at which each head of each row is stored in a layer."""
    _, _, num_kv_heads, width, _ = store.geometry.shape
    heads = torch.arange(num_kv_heads, device=rows.slot.device)
    first = rows.slot[:, None, None] * num_kv_heads + heads
    return (first * width + rows.index[:, :, None]).flatten()


Kernels = tuple[AttendRows, Elementwise]

logger = logging.getLogger("forerun.graphs")


def kernels_for(device: torch.device) -> Kernels:
    """Return Triton's kernels on CUDA if they work there, otherwise torch's."""
    if device.type != "cuda" or find_spec("triton") is None:
        return torch_attention, Elementwise()
    return choose_working(triton_kernels, device)


def triton_kernels() -> Kernels:
    from forerun.models.runner.graphs.triton_rows import TritonElementwise, triton_attention

    return triton_attention, TritonElementwise()


def choose_working(make: Callable[[], Kernels], device: torch.device) -> Kernels:
    """Test kernels on `device`; return them, or if they fail log a warning and return torch's."""
    try:
        attend_rows, elementwise = make()
        rows = torch.ones((1, 16), device=device)
        elementwise.add_norm(rows, rows, rows[0], 1e-5)
    except Exception as error:  # noqa: BLE001 (no compiler, no driver, an older GPU: any of it)
        logger.warning(
            "Triton does not work here (%s: %s): passes use torch's kernels, which are slower",
            type(error).__name__,
            error,
        )
        return torch_attention, Elementwise()
    return attend_rows, elementwise


class TorchModel(StoredModel):
    """A LanguageModel over a decoder's weights; see `build_torch_model`.

    Which bits a row's logits have depends on how many rows share its pass, since matrix products
    choose their kernels by that: rounding differs, in fp32 too little to turn a choice but at ties.

    Args:
        programs: recorded passes; None where the device records nothing.
    """

    store: ContiguousKVStore

    def __init__(
        self, *, weights: Weights, store: ContiguousKVStore, programs: Programs | None
    ) -> None:
        sizes = weights.decoder.architecture
        super().__init__(replace(sizes, num_layers=len(weights.layers)), store)
        self.num_parameters = weights.num_parameters
        self.weights = weights
        self.programs = programs

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        self._check_features(batch.feature_layers)
        if self.programs is not None:
            self._claim(batch)
            output = self.programs.forward(batch)
            if output is not None:
                return output
        return run_ragged(self.weights, self.store, batch)

    @torch.inference_mode()
    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        return F.embedding(tokens, self.weights.ends.embedding)

    @torch.inference_mode()
    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        eps = self.weights.decoder.norm_eps
        return F.rms_norm(hidden, hidden.shape[-1:], self.weights.ends.norm, eps)

    @torch.inference_mode()
    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return F.linear(hidden, self.weights.ends.head)

    @torch.inference_mode()
    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Continue every sequence with its most likely tokens, recorded chains in one launch."""
        if self.programs is not None:
            self._claim(batch, num_tokens - 1)
            chain = self.programs.greedy_chain(batch, num_tokens, vocab_size)
            if chain is not None:
                return chain
        return super().greedy_chain(batch, num_tokens, vocab_size)

    def first_layers(self, num_layers: int) -> TorchModel:
        """Return the model cut after its first layers; it shares weights and store, not graphs."""
        weights = replace(self.weights, layers=self.weights.layers[:num_layers])
        programs = None
        if self.programs is not None:
            programs = _build_programs(weights, self.store, self.programs.recorder)
        return TorchModel(weights=weights, store=self.store, programs=programs)


def build_torch_model(
    decoder: Decoder,
    read: ReadTensor,
    geometry: KVGeometry,
    device: torch.device,
    *,
    recorder: GraphRecorder | None = None,
) -> TorchModel:
    """Read the weights, allocate the KV store and return the model."""
    weights = read_weights(decoder, read, device)
    store = ContiguousKVStore(geometry, device)
    if recorder is None and device.type == "cuda":
        recorder = CudaRecorder(device)
    programs = None if recorder is None else _build_programs(weights, store, recorder)
    return TorchModel(weights=weights, store=store, programs=programs)


def _build_programs(
    weights: Weights, store: ContiguousKVStore, recorder: GraphRecorder
) -> Programs:
    geometry = store.geometry
    attend_rows, elementwise = kernels_for(store.device)
    passes = RectanglePass(
        weights=weights, store=store, attend_rows=attend_rows, elementwise=elementwise
    )
    limits = ShapeLimits(
        num_sequences=geometry.num_slots, num_keys=geometry.capacity + geometry.max_staged_rows
    )
    return Programs(
        passes=passes,
        recorder=recorder,
        limits=limits,
        unrecorded=partial(run_ragged, weights, store),
    )
