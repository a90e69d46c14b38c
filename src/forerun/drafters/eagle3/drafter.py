"""Drafting with an EAGLE-3 head, and the head as a language model.

Row t holds token t + 1 of the sequence. Rows of committed tokens get their states from the target's
features, in a `HeadBatch`, never from the head's own states: what the head computed while it
drafted is thrown away after every step. The input state of a draft token's row is the output state
of the row before it. A step costs one pass over the tokens committed since the last draft, then
K - 1 passes of one row per sequence, each through one decoder layer and an output matrix over the
draft vocabulary.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from forerun.control.base import Plan
from forerun.drafters.base import ChainDraft, DraftRequest, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.draft_sequence import PREFILL_CHUNK, DraftSequence
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.heads import HeadModule, over_target_vocabulary, rotary_sizes
from forerun.drafters.tree_growth import token_paths
from forerun.errors import RunnerUnavailable
from forerun.models.architecture import Architecture, WeightFormat
from forerun.models.attention import attend_blocks, plan_pass
from forerun.models.base import Context, LanguageModel, ModelOutput, RowBatch, Span, StoredModel
from forerun.models.decoder import Decoder, LayerWeights
from forerun.models.kv_store import BlockedKVStore, ContiguousKVStore
from forerun.models.memory import KVGeometry, geometry_of
from forerun.models.runner.native import NativeModel
from forerun.models.runner.packed import PackedWeights, choose_formats, create_decoder
from forerun.native.library import MatrixKind, PassStruct, VectorKind
from forerun.sampling.proposal import Proposal

MAX_STAGED_ROWS = 64
"""Rows past the target's context; drafting stops at its end anyway."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadBatch(RowBatch):
    """A pass of a head over rows whose states are `Eagle3Head.fuse` of the target's features."""

    states: Float[Tensor, "rows width"]

    @classmethod
    def of(cls, batch: RowBatch, states: Float[Tensor, "rows width"]) -> HeadBatch:
        return cls(
            tokens=batch.tokens,
            positions=batch.positions,
            spans=batch.spans,
            logit_rows=batch.logit_rows,
            states=states,
        )


def store_sizes(
    architecture: Architecture, target: LanguageModel, dtype: torch.dtype
) -> KVGeometry:
    """Return the sizes of a head's KV store, with as many slots as the target's."""
    return geometry_of(
        architecture,
        num_slots=target.store.num_free,
        capacity=target.max_context,
        max_staged_rows=MAX_STAGED_ROWS,
        dtype=dtype,
    )


class RowStates:
    """Input states per slot that the last pass leaves for the next one."""

    def __init__(
        self, num_slots: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        # The input state of a row after the last chain row, and the input state of that chain row.
        self._last = torch.zeros((num_slots, width), dtype=dtype, device=device)
        self._origins = torch.zeros_like(self._last)
        # What rows behind draft nodes continue from, by the draft tokens down to the node.
        self._nodes: dict[int, dict[tuple[int, ...], Tensor]] = {}

    def of(self, batch: RowBatch) -> Float[Tensor, "rows width"]:
        """Return the input state of every row of a pass.

        A pass over a tree reads the last committed row once more, ahead of the nodes.
        """
        if isinstance(batch, HeadBatch):
            return batch.states
        if all(span.num_rows == 1 for span in batch.spans):
            return self._last[[span.slot for span in batch.spans]]
        rows: list[Tensor] = []
        tokens = batch.tokens.tolist()
        for span in batch.spans:
            if span.num_chain > 1:
                raise ValueError(f"rows of slot {span.slot} need states from the target's features")
            rows.append(self._origins[span.slot])
            nodes = self._nodes[span.slot]
            for path in token_paths(span.tree, tokens[len(rows) :]):
                if path[:-1] not in nodes:
                    raise ValueError(f"slot {span.slot} has no state behind tokens {path[:-1]}")
                rows.append(nodes[path[:-1]])
        return torch.stack(rows)

    def note(
        self,
        batch: RowBatch,
        states: Float[Tensor, "rows width"],
        fed_back: Float[Tensor, "wanted width"],
    ) -> None:
        """Store the input states of the rows that may follow the rows with logits of a pass."""
        if not len(batch.logit_rows):
            return
        slots = [span.slot for span in batch.spans]
        if isinstance(batch, HeadBatch):
            self._origins[slots] = states[batch.logit_rows]
            for slot, state in zip(slots, fed_back, strict=True):
                self._nodes[slot] = {(): state}
        if not any(span.tree.parents for span in batch.spans):
            self._last[slots] = fed_back
            return
        places = _node_places(batch.spans, batch.tokens.tolist())
        for row, state in zip(batch.logit_rows.tolist(), fed_back, strict=True):
            slot, path = places[row]
            self._nodes[slot][path] = state


def _node_places(
    spans: Sequence[Span], tokens: Sequence[int]
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Map each row of a tree node to its slot and the draft tokens on the path to the node."""
    places: dict[int, tuple[int, tuple[int, ...]]] = {}
    row = 0
    for span in spans:
        row += span.num_chain
        for path in token_paths(span.tree, tokens[row:]):
            places[row] = (span.slot, path)
            row += 1
    return places


logger = logging.getLogger("forerun.drafting")


class AttachedModel(LanguageModel):
    """A draft model whose rows read the target's hidden states, such as `Eagle3Model`."""

    @property
    def projection(self) -> PackedWeights | None:
        """The matrix from features to input states if the kernels can apply it, else None."""
        return None

    @abstractmethod
    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        """Return the input states of rows, computed from the target's features."""


class ShiftedContext(Context):
    """Tokens of a sequence without the first: row t of an EAGLE-3 head reads token t + 1."""

    @property
    def num_pending(self) -> int:
        """Number of rows that are not cached yet although the target's features for them exist."""
        return len(self.ids) - 1 - self.num_cached

    def pending(self, limit: int | None = None) -> list[int]:
        start = self.num_cached + 1
        return self.ids[start : len(self.ids) if limit is None else start + limit]


class Eagle3Drafter(DraftModel):
    """Drafts chains and trees with an EAGLE-3 head."""

    method = "eagle3"
    drafts_in_cycles = True

    def __init__(
        self, model: AttachedModel, feature_layers: tuple[int, ...], vocab_size: int
    ) -> None:
        super().__init__(model, vocab_size)
        self.attached = model
        self.feature_layers = feature_layers
        self.required_features = tuple(sorted(set(feature_layers)))
        columns = [self.required_features.index(layer) for layer in feature_layers]
        self._columns = None if columns == [*range(len(self.required_features))] else columns
        self._warned = False

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft for requests whose rows have features; other requests are decoded plainly."""
        sequences = [self._sequence(request) for request in requests]
        able = [at for at, s in enumerate(sequences) if s.num_features and not s.lacks_features]
        drafted = super().propose([requests[at] for at in able], [plans[at] for at in able])
        proposals: list[Proposal | None] = [None] * len(requests)
        for at, proposal in zip(able, drafted, strict=True):
            proposals[at] = proposal
        return proposals

    def _open(self, request: DraftRequest) -> Context:
        return ShiftedContext(self.model.store, request.ids)

    def _batch(self, spans: Sequence[Span], sequences: Sequence[DraftSequence]) -> RowBatch:
        """Return a pass over pending rows with input states computed from the target's features."""
        batch = super()._batch(spans, sequences)
        features: list[Tensor] = []
        for span, sequence in zip(spans, sequences, strict=True):
            features.append(sequence.next_features(span.num_chain))
        together = features[0] if len(features) == 1 else torch.cat(features)
        return HeadBatch.of(batch, self.attached.fuse(together))

    def chain_draft(self, request_id: str, plan: Plan) -> ChainDraft | None:
        """Return how cycles draft: they can project, and all pending rows have features."""
        sequence = self._sequences.get(request_id)
        is_cyclic = self._is_cyclic() and self._columns is None
        if sequence is None or not is_cyclic or self.attached.projection is None:
            return None
        if sequence.num_features != sequence.context.num_pending:
            return None
        return sequence.chain_draft(self.model, self.required_features)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Receive the features of committed rows; many are fed at once, few with the next draft."""
        for outcome in outcomes:
            sequence = self._sequence(outcome.request)
            sequence.keep_rows(sequence.num_chain)
            if outcome.features is None:
                self._warn(sequence)
            elif not sequence.lacks_features:
                features = outcome.features
                if self._columns is not None:
                    features = features[:, self._columns]
                sequence.features.append(features)
        with torch.inference_mode():
            self._prefill([self._sequence(outcome.request) for outcome in outcomes])

    def _prefill(self, sequences: Sequence[DraftSequence]) -> None:
        """Feed pending rows in chunks until at most one chunk of features is left per sequence."""
        while waiting := [s for s in sequences if s.num_features > PREFILL_CHUNK]:
            batch = self._batch([s.context.span(PREFILL_CHUNK) for s in waiting], waiting)
            self.model.forward(replace(batch, logit_rows=batch.logit_rows[:0]))
            for sequence in waiting:
                sequence.keep_rows(PREFILL_CHUNK)

    def _warn(self, sequence: DraftSequence) -> None:
        sequence.lacks_features, sequence.features = True, []
        if not self._warned:
            self._warned = True
            logger.warning(
                "request %s decodes plainly: the target gave no features of layers %s, which the "
                "drafter %s reads; later requests without features are not reported",
                sequence.name,
                self.required_features,
                self.method,
            )


class TorchHead(StoredModel, AttachedModel):
    """A LanguageModel over a module of torch whose rows continue from states of the target."""

    store: ContiguousKVStore

    def __init__(
        self, module: nn.Module, architecture: Architecture, target: LanguageModel
    ) -> None:
        parameters = [*module.parameters()]
        dtype = parameters[0].dtype
        store = ContiguousKVStore(store_sizes(architecture, target, dtype), target.device)
        super().__init__(architecture, store)
        self.vocab_size = target.vocab_size
        self.target = target
        self.num_parameters = sum(parameter.numel() for parameter in parameters)
        num_slots = store.geometry.num_slots
        self._states = RowStates(num_slots, self.hidden_size, dtype, self.device)
        self._groups = architecture.num_heads // architecture.num_kv_heads


class Eagle3Model(TorchHead):
    """A LanguageModel over an EAGLE-3 head; logits of tokens it cannot draft are -inf."""

    def __init__(self, head: Eagle3Head, target: LanguageModel) -> None:
        super().__init__(head, rotary_sizes(head.config)[0], target)
        self.vocab_size = head.config.target_vocab_size
        self.network = head
        self._target_ids = head.target_ids
        self._scaling = head.config.head_dim**-0.5

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
        normed: Tensor = self.network.norm(hidden)
        return normed

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return over_target_vocabulary(
            self.network.lm_head(hidden), self._target_ids, self.vocab_size
        )


class NativeEagle3Model(NativeModel, AttachedModel):
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
        self._projection = pack_matrix(head, head.fc.weight, target)
        self.target = target  # whose embedding the kernels read
        self._target_ids = head.target_ids
        num_slots = self.store.geometry.num_slots
        self._states = RowStates(num_slots, config.hidden_size, torch.float32, self.device)
        # Read and written by the kernels, which do not keep them alive.
        self._given = self._fed_back = torch.empty(0)

    @property
    def projection(self) -> PackedWeights | None:
        """The matrix from features to input states; None where norms come before it."""
        config = self.network.config
        return None if config.norm_before_fc or config.fc_norm else self._projection

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        return self._projection.apply_head(self.network.joined(features), self.hidden_size)

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
    weights = create_weights(head, rotary_sizes(config)[0], target, flags)
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


def pack_matrix(
    head: HeadModule,
    matrix: Float[Tensor, "outputs inputs"],
    target: NativeModel,
    stored_as: WeightFormat = "auto",
) -> PackedWeights:
    """Pack a matrix of a head as the output matrix of a decoder without layers."""
    num_outputs, num_inputs = matrix.shape
    no_layers = replace(
        rotary_sizes(head.config)[0], num_layers=0, hidden_size=num_inputs, vocab_size=num_outputs
    )
    weights = create_weights(head, no_layers, target, stored_as=stored_as)
    weights.put_matrix(MatrixKind.HEAD, 0, matrix)
    return weights


def create_weights(
    head: HeadModule,
    architecture: Architecture,
    target: NativeModel,
    flags: Mapping[str, bool] = MappingProxyType({}),
    stored_as: WeightFormat = "auto",
    **options: Any,
) -> PackedWeights:
    """Create a decoder of these sizes, without weights and embedding, in the target's kernels.

    Args:
        flags: as for `create_decoder`.
        options: further fields of `Decoder`.

    Raises:
        RunnerUnavailable: the kernels are not written for these sizes.
    """
    decoder = Decoder(
        architecture=architecture,
        intermediate_size=head.config.intermediate_size,
        norm_eps=head.config.norm_eps,
        inv_freq=head.inv_freq,
        rope_scale=head.rope_scale,
        tied=True,
        **options,
    )
    kernels = target.weights.kernels
    formats = choose_formats(stored_as, architecture.num_layers)
    flags = {"borrows_embedding": True, **flags}
    handle = create_decoder(decoder, target.dtype, kernels, flags, formats)
    return PackedWeights(kernels, handle, head.config.norm_eps, target.dtype)


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
