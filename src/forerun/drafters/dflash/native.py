"""Blocks of a DFlash network in the CPU kernels of its target."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import byref
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.dflash.drafter import BlockRunner
from forerun.drafters.dflash.network import DFlashNetwork
from forerun.drafters.draft_sequence import PREFILL_CHUNK
from forerun.drafters.eagle3.drafter import create_weights, pack_matrix
from forerun.drafters.heads import rotary_sizes
from forerun.errors import NotEnoughMemory
from forerun.models.architecture import WeightFormat
from forerun.models.decoder import LayerWeights
from forerun.models.kv_store import BlockedKVStore
from forerun.models.memory import geometry_of
from forerun.models.runner.cycles import describe_store
from forerun.models.runner.native import NativeModel
from forerun.models.runner.packed import PackedWeights
from forerun.native.library import MatrixKind, PassStruct, VectorKind


class NativeBlocks(BlockRunner):
    """Runs blocks in the kernels, as one pass each.

    Keys and values lie in a store like the target's. Those of a block are written behind the
    context rows and are overwritten by the rows that come next.

    Args:
        weights: format of the network's matrices; "auto" is the target's dtype.

    Raises:
        RunnerUnavailable: the kernels are not written for the network's sizes.
    """

    def __init__(
        self, network: DFlashNetwork, target: NativeModel, weights: WeightFormat = "auto"
    ) -> None:
        config = self.config = network.config
        self.target = target
        self._num_outputs = config.draft_vocab_size if config.own_output else 0
        architecture = replace(rotary_sizes(config)[0], vocab_size=self._num_outputs)
        self.weights = create_weights(
            network,
            architecture,
            target,
            {"norm_output": True},
            weights,
            windows=config.windows,
            causal_blocks=config.causal,
        )
        _put_weights(self.weights, network)
        self._projection = pack_matrix(network, network.fc.weight, target, weights)
        geometry = geometry_of(
            architecture,
            num_slots=target.store.num_free,
            capacity=target.max_context,
            max_staged_rows=config.block_size,
            dtype=target.dtype,
        )
        self.store = BlockedKVStore(geometry, target.device)
        self._store_struct = describe_store(self.store)
        self._slots: dict[str, int] = {}

    def begin(self, request_id: str) -> None:
        self.forget(request_id)
        self._slots[request_id] = self.store.reserve()

    def count_rows(self, request_id: str) -> int | None:
        slot = self._slots.get(request_id)
        return None if slot is None else self.store.length(slot)

    def append(self, features: Mapping[str, Float[Tensor, "rows layers width"]]) -> None:
        for first in range(0, max(map(len, features.values())), PREFILL_CHUNK):
            parts = {
                self._slots[request_id]: rows[first : first + PREFILL_CHUNK]
                for request_id, rows in features.items()
                if len(rows) > first
            }
            spans = array("i")
            for slot, part in parts.items():
                start = self.store.length(slot)
                self.store.claim(slot, start, len(part))
                spans.extend((slot, start, len(part), 0))
            together = torch.cat([*parts.values()]).flatten(1)
            states = self._projection.apply_head(together, self.config.hidden_size)
            self._run(spans, states, array("q"))
            for slot, part in parts.items():
                self.store.commit(slot, range(len(part)))

    def predict(
        self,
        request_ids: Sequence[str],
        embedded: Float[Tensor, "requests block width"],
        num_positions: int,
    ) -> Float[Tensor, "rows vocab"]:
        num_requests, size, _ = embedded.shape
        spans = array("i")
        for request_id in request_ids:
            slot = self._slots[request_id]
            spans.extend((slot, self.store.length(slot), size, 0))
        places = range(0, num_requests * size, size)
        wanted = array("q", [first + n for n in range(1, 1 + num_positions) for first in places])
        return self._run(spans, embedded.flatten(0, 1), wanted)

    def _run(self, spans: array[int], states: Tensor, wanted: array[int]) -> Tensor:
        """Store the keys and values of context rows, or return the logits of rows of blocks."""
        logits = torch.empty(len(wanted), self._num_outputs)
        normed = torch.empty(len(wanted), self.config.hidden_size)
        states = states.float().contiguous()
        rows = PassStruct(
            num_spans=len(spans) // 4,
            num_rows=len(states),
            num_wanted=len(wanted),
            num_layers=self.config.num_layers,
            is_context=not wanted,
            spans=spans.buffer_info()[0],
            wanted=wanted.buffer_info()[0],
            states=states.data_ptr(),
            fed_back=normed.data_ptr(),
        )
        forward, store = self.weights.kernels.library.forerun_decoder_forward, self._store_struct
        if not forward(self.weights.handle, byref(rows), byref(store), logits.data_ptr()):
            raise NotEnoughMemory(f"no memory for a pass of {len(states)} rows; lower max_batch")
        return logits if self._num_outputs else self.target.head(normed)

    def forget(self, request_id: str) -> None:
        if (slot := self._slots.pop(request_id, None)) is not None:
            self.store.free(slot)


def _put_weights(packed: PackedWeights, network: DFlashNetwork) -> None:
    """Pack the layers, norms and output matrix of a network."""
    tensors = network.state_dict()
    for index in range(network.config.num_layers):

        def read(name: str, prefix: str = f"layers.{index}.") -> Tensor:
            tensor: Tensor = tensors[f"{prefix}{name}.weight"]
            return tensor

        qk_norm = network.config.qk_norm
        layer = LayerWeights(
            input_norm=read("input_layernorm"),
            qkv=torch.cat([read(f"self_attn.{kind}_proj") for kind in ("q", "k", "v")]),
            qkv_bias=None,
            query_norm=read("self_attn.q_norm") if qk_norm else None,
            key_norm=read("self_attn.k_norm") if qk_norm else None,
            output=read("self_attn.o_proj"),
            post_norm=read("post_attention_layernorm"),
            gate_up=torch.cat([read(f"mlp.{kind}_proj") for kind in ("gate", "up")]),
            down=read("mlp.down_proj"),
        )
        packed.put_layer(index, layer)
        packed.put_vector(VectorKind.HIDDEN_NORM, index, network.hidden_norm.weight)
    packed.put_vector(VectorKind.LAST_NORM, 0, network.norm.weight)
    if network.lm_head is not None:
        packed.put_matrix(MatrixKind.HEAD, 0, network.lm_head.weight)
