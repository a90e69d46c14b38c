"""A transformers model as a LanguageModel: packed rows in, logits of the wanted rows out."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.architecture import Architecture, read_architecture
from forerun.models.attention import ATTENTION_NAME, plan_pass, register
from forerun.models.base import ModelOutput, RowBatch
from forerun.models.checkpoint import Checkpoint
from forerun.models.greedy import chain_by_forward
from forerun.models.kv_store import ContiguousKVStore, geometry_of
from forerun.models.stored import StoredModel

__all__ = ["HuggingFaceModel", "adapt", "quiet_transformers", "read_weights"]


class HuggingFaceModel(StoredModel):
    """A LanguageModel over a transformers model; see `adapt`.

    Args:
        network: token ids to logits, attending through `packed_attention`. It scales and caps its
            logits itself, where its family does.
        store: KV of the sequences.
        architecture: sizes of the model.
    """

    def __init__(
        self, *, network: nn.Module, store: ContiguousKVStore, architecture: Architecture
    ) -> None:
        super().__init__(architecture, store)
        self.network = network

    @property
    def num_parameters(self) -> int:
        """Size of the model, tied parameters counted once."""
        return sum(parameter.numel() for parameter in self.network.parameters())

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass. Stages the KV of every row; committing is the caller's business.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: rows overwrite committed ones or leave a gap.
        """
        sizes = self.architecture
        positions = batch.positions
        if sizes.learned_positions:
            # Rows staged past the end of the table can never be committed: any position does.
            positions = positions.clamp(max=sizes.max_positions - 1)
        groups = sizes.num_heads // sizes.num_kv_heads
        outputs = self.network(
            input_ids=batch.tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            attention_pass=plan_pass(batch.spans, self._store, groups),
        )
        return ModelOutput(logits=outputs.logits[0])

    @torch.inference_mode()
    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its most likely tokens.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: rows overwrite committed ones or leave a gap.
        """
        return chain_by_forward(self, batch, num_tokens, vocab_size)

    def first_layers(self, num_layers: int) -> HuggingFaceModel:
        """The model without the layers above; weights and store are shared."""
        return HuggingFaceModel(
            network=without_upper_layers(self.network, self.num_layers, num_layers),
            store=self._store,
            architecture=replace(self.architecture, num_layers=num_layers),
        )


def without_upper_layers(network: nn.Module, num_layers: int, num_kept: int) -> nn.Module:
    """A copy of the modules of a network with its first layers only, over the same tensors."""
    tensors = [*network.parameters(), *network.buffers()]
    shorter = copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})
    # Whatever a family calls it, the outermost list with as many members is that of the layers.
    lists = (module for module in shorter.modules() if isinstance(module, nn.ModuleList))
    layers = next(found for found in lists if len(found) == num_layers)
    del layers[num_kept:]
    return shorter


def adapt(
    model: PreTrainedModel, *, num_slots: int, max_context: int, max_staged_rows: int = 64
) -> HuggingFaceModel:
    """Take over a transformers model: its attention is replaced, in place.

    Args:
        model: a model of a supported architecture, on its device and in its dtype.
        num_slots: sequences at once.
        max_context: tokens a sequence may have.
        max_staged_rows: rows that may be staged past the context (nodes of the largest tree).

    Raises:
        InvalidModel: the model is not supported.
        InvalidRequest: its table of positions ends before `max_context`.
    """
    architecture = read_architecture(type(model).__name__, model.config.to_dict())
    if architecture.learned_positions and max_context > architecture.max_positions:
        raise InvalidRequest(
            f"max_context is {max_context}; {architecture.name} has {architecture.max_positions} "
            "positions and no more"
        )
    geometry = geometry_of(
        architecture,
        num_slots=num_slots,
        capacity=max_context,
        max_staged_rows=max_staged_rows,
        dtype=model.dtype,
    )
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    untyped: Any = model  # the methods below carry no annotations
    untyped.eval().requires_grad_(False)
    return HuggingFaceModel(
        network=model,
        store=ContiguousKVStore(geometry, model.device),
        architecture=architecture,
    )


def read_weights(
    checkpoint: Checkpoint, dtype: torch.dtype, *, device_map: str | None = None
) -> Any:
    """The transformers model, with every parameter from the checkpoint.

    transformers fills what is missing or misshapen with random numbers and reports it; here that
    is an error.

    Args:
        checkpoint: where they are.
        dtype: to convert them to.
        device_map: "auto" spreads layers over all GPUs, by accelerate; None loads to the CPU.

    Raises:
        InvalidModel: parameters are missing, unknown or have the wrong shape.
    """
    untyped: Any = AutoModelForCausalLM
    try:
        with quiet_transformers():
            model, info = untyped.from_pretrained(
                checkpoint.folder,
                dtype=dtype,
                device_map=device_map,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:
        raise InvalidModel(f"{checkpoint.folder} cannot be loaded: {error}") from error
    for problem in ("missing", "unexpected", "mismatched"):
        names = sorted(str(name) for name in info[f"{problem}_keys"])
        if names:
            raise InvalidModel(
                f"the weights in {checkpoint.folder} do not fit its configuration: "
                f"{len(names)} {problem}, the first {names[0]}"
            )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and reports on stderr: what matters is raised."""
    untyped: Any = transformers_logging
    verbosity, had_bars = untyped.get_verbosity(), untyped.is_progress_bar_enabled()
    untyped.set_verbosity(untyped.CRITICAL)
    untyped.disable_progress_bar()
    try:
        yield
    finally:
        untyped.set_verbosity(verbosity)
        if had_bars:
            untyped.enable_progress_bar()
