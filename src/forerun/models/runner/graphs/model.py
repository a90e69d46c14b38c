"""The torch runner, whose passes are recorded as CUDA graphs on CUDA."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.base import ModelOutput, RowBatch, StoredModel
from forerun.models.decoder import Decoder, ReadTensor
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.memory import KVGeometry
from forerun.models.runner.graphs.layers import Weights, read_weights
from forerun.models.runner.graphs.programs import (
    CudaRecorder,
    GraphRecorder,
    Programs,
    run_ragged,
)
from forerun.models.runner.graphs.rectangle import ShapeLimits


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
    limits = ShapeLimits(
        num_sequences=geometry.num_slots, num_keys=geometry.capacity + geometry.max_staged_rows
    )
    return Programs(weights=weights, store=store, recorder=recorder, limits=limits)
