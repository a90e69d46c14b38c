"""An EAGLE-3 head as a LanguageModel with its own KV: in torch, and in kernels on a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.eagle3.drafter import RowStates, store_sizes
from forerun.drafters.eagle3.head import Eagle3Head, over_target_vocabulary, rotary_sizes
from forerun.errors import RunnerUnavailable
from forerun.models.architecture import Architecture
from forerun.models.attention import attend_blocks, plan_pass
from forerun.models.base import LanguageModel, ModelOutput, RowBatch, StoredModel
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import BlockedKVStore, ContiguousKVStore
from forerun.models.runner.native import NativeModel
from forerun.models.runner.packed import PackedWeights, new_decoder
from forerun.native.library import MatrixKind, PassStruct, VectorKind


class Eagle3Model(StoredModel):
    """A LanguageModel over an EAGLE-3 head; logits of tokens it cannot draft are -inf."""

    store: ContiguousKVStore

    def __init__(self, head: Eagle3Head, target: LanguageModel) -> None:
        config, dtype = head.config, head.fc.weight.dtype
        sizes = rotary_sizes(config)[0]
        store = ContiguousKVStore(store_sizes(sizes, target, dtype), target.device)
        super().__init__(sizes, store)
        self.vocab_size = config.target_vocab_size
        self.network = head
        self.target = target
        self.num_parameters = sum(parameter.numel() for parameter in head.parameters())
        self._target_ids = head.target_ids
        self._groups = config.num_heads // config.num_kv_heads
        self._scaling = config.head_dim**-0.5
        num_slots = self.store.geometry.num_slots
        self._states = RowStates(num_slots, config.hidden_size, dtype, self.device)

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        return self.network.fuse(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        states = self._states.of(batch)
        plan = plan_pass(batch.spans, self.store, self._groups)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            plan.write(0, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            attended = attend_blocks(
                0, queries.transpose(0, 1)[None], plan.blocks(None), self._scaling
            )
            return attended[0].flatten(1, 2)

        output = self.network(self.embed(batch.tokens), states, batch.positions, attend)
        wanted = output.index_select(0, batch.logit_rows)
        self._states.note(batch, states, self.network.fed_back(wanted))
        return ModelOutput(logits=self.head(self.final_norm(wanted)))

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings: the head's own or the target's."""
        if self.network.embed_tokens is None:
            return self.target.embed(tokens).to(self.dtype)
        embedded: Tensor = self.network.embed_tokens(tokens)
        return embedded

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the norm before the head's output matrix."""
        normed: Tensor = self.network.norm(hidden)
        return normed

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return over_target_vocabulary(
            self.network.lm_head(hidden), self._target_ids, self.vocab_size
        )


class NativeEagle3Model(NativeModel):
    """An EAGLE-3 head whose passes run in the CPU kernels, as those of its target do."""

    def __init__(self, head: Eagle3Head, target: NativeModel) -> None:
        config = head.config
        if head.embed_tokens is not None:
            raise RunnerUnavailable("the CPU kernels use the target's embedding, not the head's")
        weights, num_parameters = packed(head, target)
        super().__init__(
            weights=weights,
            store=BlockedKVStore(
                store_sizes(rotary_sizes(config)[0], target, target.dtype), target.device
            ),
            architecture=rotary_sizes(config)[0],
            num_parameters=num_parameters,
        )
        self.vocab_size = config.target_vocab_size
        self.network = head
        self._projection = _packed_projection(head, target)
        self.target = target  # whose embedding the kernels read
        self._target_ids = head.target_ids
        num_slots = self.store.geometry.num_slots
        self._states = RowStates(num_slots, config.hidden_size, torch.float32, self.device)
        # Read and written by the kernels, which do not keep them alive.
        self._given = self._fed_back = torch.empty(0)

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        return self._projection.times_head(self.network.joined(features), self.hidden_size)

    def forward(self, batch: RowBatch) -> ModelOutput:
        logits = super().forward(batch).logits
        self._states.note(batch, self._given, self._fed_back)
        return ModelOutput(logits=self._over_target(logits))

    def _add_states(self, rows: PassStruct, batch: RowBatch) -> None:
        self._given = self._states.of(batch).contiguous()
        self._fed_back = torch.empty(len(batch.logit_rows), self.hidden_size)
        rows.states, rows.fed_back = self._given.data_ptr(), self._fed_back.data_ptr()

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        return self.target.embed(tokens)

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return self._over_target(super().head(hidden))

    def _over_target(self, logits: Tensor) -> Tensor:
        return over_target_vocabulary(logits, self._target_ids, self.vocab_size)


def packed(head: Eagle3Head, target: NativeModel) -> tuple[PackedWeights, int]:
    config, kernels = head.config, target.weights.kernels
    flags = {
        "is_attached": True,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
    weights = _empty_weights(head, rotary_sizes(config)[0], target, flags)
    num_parameters = weights.put_layer(0, _layer_of(head))
    norm = head.state_dict()["layers.0.hidden_norm.weight"]
    num_parameters += weights.put_vector(VectorKind.HIDDEN_NORM, 0, norm)
    num_parameters += weights.put_vector(VectorKind.LAST_NORM, 0, head.norm.weight)
    weights.last_norm = head.norm.weight.float()
    num_parameters += weights.put_matrix(MatrixKind.HEAD, 0, head.lm_head.weight)
    target_ids = head.target_ids.contiguous()
    kernels.library.forerun_decoder_attach(
        weights.handle, target.weights.handle, target_ids.data_ptr()
    )
    return weights, num_parameters + head.fc.weight.numel()


def _packed_projection(head: Eagle3Head, target: NativeModel) -> PackedWeights:
    """Pack the matrix from features to states as the output matrix of a decoder without layers."""
    num_outputs, num_inputs = head.fc.weight.shape
    no_layers = replace(
        rotary_sizes(head.config)[0], num_layers=0, hidden_size=num_inputs, vocab_size=num_outputs
    )
    weights = _empty_weights(head, no_layers, target)
    weights.put_matrix(MatrixKind.HEAD, 0, head.fc.weight)
    return weights


def _empty_weights(
    head: Eagle3Head,
    architecture: Architecture,
    target: NativeModel,
    flags: Mapping[str, bool] = MappingProxyType({}),
) -> PackedWeights:
    """Create a decoder of these sizes, without weights, in the target's kernels."""
    decoder = Decoder(
        architecture=architecture,
        intermediate_size=head.config.intermediate_size,
        norm_eps=head.config.norm_eps,
        inv_freq=head.inv_freq,
        rope_scale=head.rope_scale,
        tied=True,
    )
    kernels = target.weights.kernels
    handle = new_decoder(decoder, target.dtype, kernels, flags)
    return PackedWeights(kernels, handle, head.config.norm_eps)


def _layer_of(head: Eagle3Head) -> LayerWeights:
    """Return the weights of the head's layer; matrices with the same input are concatenated."""
    tensors = {name.removeprefix("layers.0."): tensor for name, tensor in head.state_dict().items()}
    projections = [tensors[f"self_attn.{kind}_proj.weight"] for kind in ("q", "k", "v")]
    return LayerWeights(
        input_norm=tensors["input_layernorm.weight"],
        qkv=torch.cat(projections),
        qkv_bias=None,
        query_norm=None,
        key_norm=None,
        output=tensors["self_attn.o_proj.weight"],
        post_norm=tensors["post_attention_layernorm.weight"],
        gate_up=torch.cat([tensors[f"mlp.{kind}_proj.weight"] for kind in ("gate", "up")]),
        down=tensors["mlp.down_proj.weight"],
    )
