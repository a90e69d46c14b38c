"""The torch runner, whose passes are recorded as CUDA graphs on CUDA, and its kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.models.base import ModelOutput, RowBatch
from forerun.models.decoder import Decoder, ReadTensor
from forerun.models.kv_store import ContiguousKVStore, StoredModel, chain_by_forward
from forerun.models.memory import KVGeometry
from forerun.models.runner.graphs.layers import Elementwise, TorchElementwise, Weights, read_weights
from forerun.models.runner.graphs.passes import AttendRows, RectanglePass, ragged_pass
from forerun.models.runner.graphs.programs import CudaRecorder, GraphRecorder, Programs
from forerun.models.runner.graphs.rectangle import ShapeLimits
from forerun.models.runner.graphs.torch_attention import torch_attention

__all__ = [
    "Kernels",
    "TorchModel",
    "build_torch_model",
    "kernels_for",
    "torch_kernels",
    "working_or_torch",
]

Kernels = tuple[AttendRows, Elementwise]

logger = logging.getLogger("forerun.graphs")


def kernels_for(device: torch.device) -> Kernels:
    """Return Triton's kernels on CUDA if they work there, otherwise torch's."""
    if device.type != "cuda" or find_spec("triton") is None:
        return torch_kernels()
    return working_or_torch(triton_kernels, device)


def torch_kernels() -> Kernels:
    """Return kernels made of torch operations, for any device."""
    return torch_attention, TorchElementwise()


def triton_kernels() -> Kernels:
    """Return Triton kernels, which fuse several torch operations into one launch."""
    from forerun.models.runner.graphs.triton_rows import TritonElementwise, triton_attention

    return triton_attention, TritonElementwise()


def working_or_torch(make: Callable[[], Kernels], device: torch.device) -> Kernels:
    """Return kernels after a test run on `device`; log a warning and return torch's if it fails."""
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
        return torch_kernels()
    return attend_rows, elementwise


class TorchModel(StoredModel):
    """A LanguageModel over a decoder's weights; see `build_torch_model`.

    Which bits a row's logits have depends on how many rows share its pass, since matrix products
    choose their kernels by that: rounding differs, in fp32 too little to turn a choice but at ties.

    Args:
        weights: of the model.
        store: KV of the sequences, on the device of the weights.
        programs: recorded passes; None where the device records nothing.
    """

    def __init__(
        self, *, weights: Weights, store: ContiguousKVStore, programs: Programs | None
    ) -> None:
        sizes = weights.decoder.architecture
        super().__init__(replace(sizes, num_layers=len(weights.layers)), store)
        self.weights = weights
        self.programs = programs

    @property
    def num_parameters(self) -> int:
        """Size of the model, tied parameters counted once."""
        return self.weights.num_parameters

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass. Stages the KV of every row; the caller commits.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: rows overwrite committed ones or leave a gap.
        """
        self._check_features(batch.feature_layers)
        if self.programs is not None:
            self._claim(batch)
            output = self.programs.forward(batch)
            if output is not None:
                return output
        return ragged_pass(self.weights, self._store, batch)

    @torch.inference_mode()
    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Return the embeddings of tokens."""
        return F.embedding(tokens, self.weights.ends.embedding)

    @torch.inference_mode()
    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the RMS norm behind the last layer."""
        eps = self.weights.decoder.norm_eps
        return F.rms_norm(hidden, hidden.shape[-1:], self.weights.ends.norm, eps)

    @torch.inference_mode()
    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits of rows after the final norm."""
        return F.linear(hidden, self.weights.ends.head)

    @torch.inference_mode()
    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its most likely tokens.

        One launch where chains are recorded. Nothing here waits for the device.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: rows overwrite committed ones or leave a gap.
        """
        if self.programs is not None:
            self._claim(batch, num_tokens - 1)
            chain = self.programs.greedy_chain(batch, num_tokens, vocab_size)
            if chain is not None:
                return chain
        return chain_by_forward(self, batch, num_tokens, vocab_size)

    def first_layers(self, num_layers: int) -> TorchModel:
        """The model without the layers above; weights and store are shared, recordings are not."""
        weights = replace(self.weights, layers=self.weights.layers[:num_layers])
        programs = None
        if self.programs is not None:
            programs = programs_over(weights, self._store, self.programs.recorder)
        return TorchModel(weights=weights, store=self._store, programs=programs)


def build_torch_model(
    decoder: Decoder,
    read: ReadTensor,
    geometry: KVGeometry,
    device: torch.device,
    *,
    recorder: GraphRecorder | None = None,
) -> TorchModel:
    """Read the weights and make room for the KV.

    Args:
        decoder: sizes and constants.
        read: parameters in the dtype of the geometry, on `device`.
        geometry: of the KV store.
        device: any torch has.
        recorder: how passes are recorded; by default as CUDA graphs on CUDA and not at all
            elsewhere.
    """
    weights = read_weights(decoder, read, device)
    store = ContiguousKVStore(geometry, device)
    if recorder is None and device.type == "cuda":
        recorder = CudaRecorder(device)
    programs = None if recorder is None else programs_over(weights, store, recorder)
    return TorchModel(weights=weights, store=store, programs=programs)


def programs_over(weights: Weights, store: ContiguousKVStore, recorder: GraphRecorder) -> Programs:
    """Create the recorded passes of a model."""
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
        unrecorded=partial(ragged_pass, weights, store),
    )
