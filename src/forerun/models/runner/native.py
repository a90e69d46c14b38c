"""The CPU runner: a whole pass in one call of the kernels.

One copy of the weights serves passes of every size, in huge pages where the system has them. A
row's logits are the same to the bit whatever else is in the pass: verification in bf16 sees exactly
the numbers plain decoding would have seen.

Cost per pass: the weights are read once; activations take memory of the largest pass seen, about
4 x (hidden + heads) + 2 x intermediate bytes per row; logits are fp32.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from ctypes import byref, c_char
from dataclasses import replace
from itertools import chain

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.errors import NotEnoughMemory
from forerun.models.architecture import Architecture, WeightFormat
from forerun.models.base import LikelyTree, ModelOutput, RowBatch, SampledTokens
from forerun.models.decoder import (
    Decoder,
    QuantisedMatrix,
    ReadTensor,
    StoredWeights,
    join_formats,
    parameter_shapes,
    read_ends,
    read_layer,
)
from forerun.models.kv_store import BlockedKVStore
from forerun.models.memory import KVGeometry, available_bytes, readable, weights_bytes
from forerun.models.runner.cycles import KernelModel
from forerun.models.runner.packed import (
    BLOCK_FORMATS,
    PackedWeights,
    ReadBlocks,
    choose_formats,
    create_decoder,
)
from forerun.native.library import (
    Kernels,
    MatrixFormat,
    MatrixKind,
    PassStruct,
    VectorKind,
)
from forerun.theory.tree import NO_TREE, TokenTree

TREE_NODE = struct.Struct("qqqd")
"""`ForerunTreeNode` in kernels/interface.h."""


class NativeModel(KernelModel):
    """A LanguageModel whose passes run in the kernels; see `build_native_model`.

    Args:
        num_parameters: size of the model, tied parameters counted once.
    """

    drafts_in_one_call = True

    def __init__(
        self,
        *,
        weights: PackedWeights,
        store: BlockedKVStore,
        architecture: Architecture,
        num_parameters: int,
    ) -> None:
        super().__init__(weights, store, architecture)
        self.num_parameters = num_parameters

    def forward(self, batch: RowBatch) -> ModelOutput:
        self._check_features(batch.feature_layers)
        self._claim(batch)
        logits = torch.empty((batch.logit_rows.shape[0], self.architecture.vocab_size))
        features = None
        if batch.feature_layers:
            shape = (batch.tokens.shape[0], len(batch.feature_layers), self.hidden_size)
            features = torch.empty(shape, dtype=self.dtype)
        self._call(batch, "forward", logits.data_ptr(), features=features)
        return ModelOutput(logits=logits, features=features)

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        ids = tokens.contiguous()
        embedded = torch.empty((len(ids), self.hidden_size), dtype=self.dtype)
        self.weights.kernels.library.forerun_decoder_embed(
            self.weights.handle, ids.data_ptr(), len(ids), embedded.data_ptr()
        )
        return embedded

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        weights = self.weights
        return F.rms_norm(
            hidden.float(), hidden.shape[-1:], weights.last_norm, weights.norm_eps
        ).to(self.dtype)

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float32[Tensor, "rows vocab"]:
        return self.weights.apply_head(hidden.to(self.dtype), self.architecture.vocab_size)

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        self._claim(batch, num_tokens - 1)
        drafted = torch.empty((len(batch.spans), num_tokens), dtype=torch.int64)
        most = min(vocab_size, self.vocab_size)
        self._call(batch, "greedy_chain", num_tokens, most, drafted.data_ptr())
        return drafted

    def sampled_chain(
        self,
        batch: RowBatch,
        keys: Int64[Tensor, "num_tokens sequences"],
        temperatures: Float32[Tensor, " sequences"],
        vocab_size: int,
        *,
        by_race: bool,
    ) -> SampledTokens:
        num_tokens, num_sequences = keys.shape
        self._claim(batch, num_tokens - 1)
        probs = torch.empty(num_tokens, num_sequences, vocab_size)
        drafted = torch.empty((num_sequences, num_tokens), dtype=torch.int64)
        keys = keys.contiguous()
        sampling = (temperatures.data_ptr(), keys.data_ptr(), by_race)
        results = (probs.data_ptr(), drafted.data_ptr())
        self._call(batch, "sampled_chain", num_tokens, vocab_size, *sampling, *results)
        return SampledTokens(drafted.t(), probs)

    def likely_trees(
        self,
        batch: RowBatch,
        shapes: Sequence[tuple[int, int, int]],
        temperatures: Sequence[float],
        vocab_size: int,
    ) -> list[LikelyTree]:
        for span, (num_nodes, _, _) in zip(batch.spans, shapes, strict=True):
            # The last pass may read every node of a full tree.
            self.store.claim(span.slot, span.start, span.num_rows + num_nodes)
        most = max(num_nodes for num_nodes, _, _ in shapes)
        nodes = bytearray(TREE_NODE.size * most * len(shapes))
        counts = array("q", bytes(8 * len(shapes)))
        limits = array("i", chain.from_iterable(shapes))
        heats = array("f", temperatures)
        asked = (vocab_size, limits.buffer_info()[0], heats.buffer_info()[0], most)
        results = ((c_char * len(nodes)).from_buffer(nodes), counts.buffer_info()[0])
        self._call(batch, "likely_trees", *asked, *results)
        found = [*TREE_NODE.iter_unpack(nodes)]
        return [
            _build_tree(found[place * most : place * most + count])
            for place, count in enumerate(counts)
        ]

    def first_layers(self, num_layers: int) -> NativeModel:
        dropped = range(num_layers, self.num_layers)
        return NativeModel(
            weights=self.weights,
            store=self.store,
            architecture=replace(self.architecture, num_layers=num_layers),
            num_parameters=self.num_parameters - sum(self.weights.layer_sizes[i] for i in dropped),
        )

    @property
    def bytes_read(self) -> int:
        library = self.weights.kernels.library
        return int(library.forerun_decoder_bytes_read(self.weights.handle, self.num_layers))

    def in_fewer_bits(self, weights: WeightFormat) -> NativeModel:
        """Return a model of the same weights quantised, which shares this one's store.

        Raises:
            NotEnoughMemory: there is no memory for a second copy of the weights.
        """
        needed = weights_bytes(self.num_parameters, self.architecture, self.dtype, weights)
        if needed > (available := available_bytes(self.device)):
            raise NotEnoughMemory(
                f"the weights in {weights} need {readable(needed)} beside the model's own; "
                f"{readable(available)} are available"
            )
        return NativeModel(
            weights=self.weights.requantised(weights, len(self.weights.layer_sizes)),
            store=self.store,
            architecture=self.architecture,
            num_parameters=self.num_parameters,
        )

    def _call(
        self, batch: RowBatch, name: str, *arguments: object, features: Tensor | None = None
    ) -> None:
        """Describe a batch to the C++ kernels and call forerun_decoder_`name` on it."""
        # These stay referenced here for as long as the kernels read them.
        spans, parents = array("i"), array("i")
        for span in batch.spans:
            nodes = span.tree.parents
            spans.extend((span.slot, span.start, span.num_chain, len(nodes)))
            parents.extend(nodes)
        tokens, wanted = batch.tokens.contiguous(), batch.logit_rows.contiguous()
        num_rows = tokens.shape[0]
        layers = array("i", batch.feature_layers) if features is not None else None
        rows = PassStruct(
            len(batch.spans),
            num_rows,
            wanted.shape[0],
            self.num_layers,
            0 if layers is None else len(layers),
            0,
            spans.buffer_info()[0],
            parents.buffer_info()[0],
            tokens.data_ptr(),
            wanted.data_ptr(),
            None if layers is None else layers.buffer_info()[0],
            None if features is None else features.data_ptr(),
        )
        self._add_states(rows, batch)
        function = getattr(self.weights.kernels.library, f"forerun_decoder_{name}")
        if not function(self.weights.handle, byref(rows), byref(self.store_struct), *arguments):
            raise NotEnoughMemory(
                f"no memory for a pass of {num_rows} rows; feed less at once "
                "(prefill_chunk, max_step_rows, max_batch)"
            )

    def _add_states(self, rows: PassStruct, batch: RowBatch) -> None:
        """Add the input states of an attached head's rows to a pass; other models have none."""


def _build_tree(nodes: Sequence[tuple[int, int, int, float]]) -> LikelyTree:
    """Return the tree of nodes that the kernels list as token, parent, row and log-probability."""
    if not nodes:
        return LikelyTree(NO_TREE, (), (), ())
    tokens, parents, rows, log_probs = zip(*nodes, strict=True)
    return LikelyTree(TokenTree(parents), tokens, rows, log_probs)


EMBEDDING = "model.embed_tokens.weight"


class _Blocks:
    """The matrices that are packed as they are stored, by their places among all matrices."""

    def __init__(self, decoder: Decoder, stored: StoredWeights | None) -> None:
        self.stored = stored
        self.names = list_matrices(decoder)
        self.groups = [None if stored is None else join_formats(stored, n) for n in self.names]
        self.num_experts = 1 if decoder.experts is None else decoder.experts.num_experts
        kept = [names for names, groups in zip(self.names, self.groups, strict=True) if groups]
        self.unread = {name for names in kept for name in names} - {EMBEDDING}

    @property
    def formats(self) -> tuple[MatrixFormat, ...]:
        return tuple(
            MatrixFormat.ELEMENT if groups is None else BLOCK_FORMATS[groups]
            for groups in self.groups
        )

    def read(self, place: int, expert: int | None = None) -> QuantisedMatrix | None:
        """Return a matrix, of an expert or of all rows, in its format; None if it has none."""
        wanted, names = self.groups[place], self.names[place]
        if self.stored is None or wanted is None:
            return None
        if expert is not None:
            each = len(names) // self.num_experts
            names = names[expert * each : (expert + 1) * each]
        parts = []
        for name in names:
            groups = self.stored.groups(name)
            assert groups is not None
            parts.append(self.stored.quantised(name).widened(groups, wanted))
        values, scales, minima = zip(*parts, strict=True)
        joined = torch.cat(minima) if wanted.has_minima else None
        return QuantisedMatrix(torch.cat(values), torch.cat(scales), joined)

    def bind_layer(self, index: int) -> ReadBlocks:
        return lambda kind, expert: self.read(4 * index + kind, expert)


def build_native_model(
    decoder: Decoder,
    read: ReadTensor,
    geometry: KVGeometry,
    kernels: Kernels,
    stored_as: WeightFormat = "auto",
    stored: StoredWeights | None = None,
) -> NativeModel:
    """Pack a decoder's weights layer by layer, in as many bits as wanted, and return the model."""
    blocks = _Blocks(decoder, stored)
    num_layers = decoder.architecture.num_layers
    formats = blocks.formats if stored else choose_formats(stored_as, num_layers)
    handle = create_decoder(decoder, geometry.dtype, kernels, formats=formats)
    weights = PackedWeights(kernels, handle, decoder.norm_eps, geometry.dtype)

    shapes = parameter_shapes(decoder)

    def read_rest(name: str) -> Tensor:
        if name not in blocks.unread:
            return read(name)
        # Blocks take the place of these, which hold nothing. Meta tensors would do too, but joining
        # them imports a compiler, which takes seconds.
        rows, columns = shapes[name]
        return torch.empty(1, 1).expand(rows, columns if name == "lm_head.weight" else 0)

    num_parameters = 0
    for index in range(num_layers):
        layer = read_layer(decoder, index, read_rest)
        num_parameters += weights.put_layer(index, layer, blocks.bind_layer(index))
    ends = read_ends(decoder, read_rest)
    num_parameters += weights.put_vector(VectorKind.LAST_NORM, 0, ends.norm)
    weights.last_norm = ends.norm.float()
    if (head := blocks.read(-1)) is not None:
        num_parameters += weights.put_quantised(MatrixKind.HEAD, 0, head)
    else:
        num_parameters += weights.put_matrix(MatrixKind.HEAD, 0, ends.head)
    if not decoder.tied:
        num_parameters += weights.put_matrix(MatrixKind.EMBEDDING, 0, ends.embedding)
    elif formats and formats[-1] != MatrixFormat.ELEMENT:
        # A head in fewer bits has no embeddings to read.
        weights.put_matrix(MatrixKind.EMBEDDING, 0, ends.embedding)
    return NativeModel(
        weights=weights,
        store=BlockedKVStore(geometry, torch.device("cpu")),
        architecture=decoder.architecture,
        num_parameters=num_parameters,
    )


def list_matrices(decoder: Decoder) -> list[tuple[str, ...]]:
    """Return the names of the parameters of every matrix, the output layer's last.

    Matrices of experts that are of one kind are one after another in one place.
    """
    names: list[tuple[str, ...]] = []
    for index in range(decoder.architecture.num_layers):
        groups = decoder.variant.parts
        experts, named = decoder.experts, decoder.variant.experts
        if experts is not None and named is not None and decoder.has_experts(index):
            numbers = range(experts.num_experts)
            gate_up = [part.format(n) for n in numbers for part in named.parts[:2]]
            down = [named.parts[2].format(n) for n in numbers]
            groups = (*groups[:2], tuple(gate_up), tuple(down))
        prefix = f"model.layers.{index}"
        names += [tuple(f"{prefix}.{part}.weight" for part in parts) for parts in groups]
    return [*names, (EMBEDDING if decoder.tied else "lm_head.weight",)]
