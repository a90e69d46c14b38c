"""Interfaces of language models: RowBatch in, ModelOutput out, with a KVStore in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.models.slots import Prefix
from forerun.theory.stop_rule import StopRule
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = [
    "KVPrefix",
    "KVStore",
    "LanguageModel",
    "LayeredModel",
    "ModelOutput",
    "RowBatch",
    "SampledChains",
    "SampledTokens",
    "Span",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows of one sequence in a pass.

    The first `num_chain` rows are a causal chain (pending tokens or a prefill chunk); the rows of
    `tree` follow, their roots hanging off the last chain row. Row i is written at index `start + i`
    of the slot. It sees indices [0, start), the chain rows up to itself and, in the tree, its
    ancestors.

    Attributes:
        slot: KV slot of the sequence.
        start: index of the first row; normally the committed length, more when earlier rows of the
            same step are staged but not yet committed (a drafter feeding one token at a time).
        num_chain: number of chain rows, at least 1.
        tree: draft nodes verified in this pass (may be empty).
        causal: False lets the chain rows of this span see each other in both directions, as block
            drafters need; such a span has no tree.
    """

    slot: int
    start: int
    num_chain: int
    tree: TokenTree = NO_TREE
    causal: bool = True

    def __post_init__(self) -> None:
        """Refuse a draft tree whose preceding rows are not a causal chain.

        Raises:
            ValueError: `causal` is False and there is a tree.
        """
        if not self.causal and self.tree.parents:
            raise ValueError("a span with causal=False cannot have a tree")

    @property
    def num_rows(self) -> int:
        """Rows this sequence contributes to the pass."""
        return self.num_chain + len(self.tree.parents)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """One packed pass: the rows of all sequences one after another, in the order of `spans`.

    Attributes:
        tokens: token id per row.
        positions: absolute position per row (`start + offset` in the chain, then plus tree depth).
        spans: structure, one entry per sequence.
        logit_rows: rows whose logits are wanted, in the order they are wanted; may be empty.
        feature_layers: layers whose input is wanted for every row, see `ModelOutput.features`.
    """

    tokens: Int64[Tensor, " rows"]
    positions: Int64[Tensor, " rows"]
    spans: tuple[Span, ...]
    logit_rows: Int64[Tensor, " wanted"]
    feature_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelOutput:
    """Logits and features returned by one pass.

    Attributes:
        logits: one row per entry of `RowBatch.logit_rows`, in the model's dtype or a wider one.
        features: for every row of the pass, in order, the residual stream entering each layer of
            `RowBatch.feature_layers`, in the model's dtype. Layer 0 means the embeddings;
            `num_layers` means what leaves the last layer, before the final norm. None when no layer
            was asked for.
    """

    logits: Float[Tensor, "wanted vocab"]
    features: Float[Tensor, "rows layers width"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVPrefix:
    """A copy of a committed prefix, which only stores of the same class can import."""

    num_tokens: int
    tensors: tuple[Tensor, ...]


@runtime_checkable
class KVStore(Protocol):
    """Per-sequence state of a model; its layout is private.

    Rows past the committed length are staged: they are there until the next commit.
    """

    @property
    def num_free(self) -> int:
        """Number of slots that are not reserved."""

    def reserve(self) -> int:
        """Take a free slot with committed length 0. Raises NotEnoughMemory when none is left."""

    def length(self, slot: int) -> int:
        """Number of committed tokens in `slot`."""

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged rows listed in `rows` and drop the other staged rows.

        They are ascending offsets from the committed length.
        """

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot that already contains the longest stored prefix of `wanted`.

        The last token is never among them. Until it is given back, others find in this slot what it
        has committed. Raises NotEnoughMemory when no slot is left.
        """

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot`, but store its first tokens for `begin` until the memory is needed."""

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot."""

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Return a copy of the KV of the first `num_tokens` committed tokens."""

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix."""

    def free(self, slot: int) -> None:
        """Free `slot` and discard its contents."""

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Layers whose features the store holds; see `keep_features`."""

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Store features of these layers with the KV from now on; an empty sequence ends this.

        From then on every commit needs the features of its rows, so that no row is ever without
        them. Kept prefixes of earlier sequences are forgotten.

        Raises:
            ValueError: a slot is reserved.
            NotEnoughMemory: there is no room for them.
        """

    def stage_features(
        self, slot: int, start: int, features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Store the features that a pass returned for the staged rows from `start` on.

        Raises:
            ValueError: no features are kept, the shape is wrong, or the rows are not staged.
        """

    def features(self, slot: int, start: int, stop: int) -> Float[Tensor, "rows layers width"]:
        """A copy of the features of committed rows [start, stop).

        Raises:
            ValueError: no features are kept, or fewer rows are committed.
        """


@runtime_checkable
class LanguageModel(Protocol):
    """A causal language model over packed rows; it holds weights and a store, nothing else."""

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters; tied parameters are counted once."""

    @property
    def num_layers(self) -> int:
        """Number of layers of the model."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream, and so of features."""

    @property
    def max_context(self) -> int:
        """Largest number of tokens (prompt and output) one sequence may have."""

    @property
    def store(self) -> KVStore:
        """The store that holds this model's KV."""

    @property
    def device(self) -> torch.device:
        """Device of the inputs and of the logits."""

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass, which stages the KV of every row; the caller commits the rows.

        Raises:
            UnsupportedFeatures: a layer of `batch.feature_layers` does not exist.
        """

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings in the model's dtype, before positions are added to them.

        Raises:
            UnsupportedFeatures: the model has no embedding.
        """

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the final norm to rows that leave the last layer.

        Raises:
            UnsupportedFeatures: the model has no residual stream.
        """

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits of rows to which the final norm was applied, in the model's dtype or a wider one.

        Raises:
            UnsupportedFeatures: the model has no head.
        """

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its `num_tokens` most likely tokens.

        Stages the rows of `batch` and `num_tokens - 1` further ones per sequence, for the last
        token is not fed; the caller commits.

        Args:
            batch: without trees; its `logit_rows` are the last row of every span, in order.
            num_tokens: how many, at least 1.
            vocab_size: the argmax is taken over the first so many logits (over all where the model
                has fewer), lowest id on ties. Of NaN logits any id among them may come.

        Returns:
            The tokens on the model's device; nothing here waits for it.
        """


@runtime_checkable
class LayeredModel(LanguageModel, Protocol):
    """A language model that can also be run through its first layers alone."""

    def first_layers(self, num_layers: int) -> LanguageModel:
        """Return the model cut after its first layers, with its final norm and head.

        Weights and store are this model's own, not copies: what a pass of either stages in a slot
        is what the next pass of the other finds there, in the layers they have in common. So rows
        the shorter one has staged must not be committed, for the upper layers lack them.
        """


class SampledTokens(NamedTuple):
    """Token chains drawn in one call.

    Attributes:
        tokens: what was drawn.
        probs: the distribution each was drawn from.
        stop_values: what stop rules measured before each draw, -1 where nothing did; None without.
    """

    tokens: Int64[Tensor, "num_tokens sequences"]
    probs: Float32[Tensor, "num_tokens sequences vocab"]
    stop_values: Float32[Tensor, "num_tokens sequences"] | None = None


@runtime_checkable
class SampledChains(Protocol):
    """A model that draws a whole chain of tokens in one call."""

    def sampled_chain(
        self,
        batch: RowBatch,
        keys: Int64[Tensor, "num_tokens sequences"],
        temperatures: Float32[Tensor, " sequences"],
        vocab_size: int,
        *,
        by_race: bool,
        stops: Sequence[StopRule | None] = (),
    ) -> SampledTokens:
        """Feed `batch`, then continue every sequence with tokens drawn at its temperature.

        Stages rows as `LanguageModel.greedy_chain` does.

        Args:
            batch: without trees; its `logit_rows` are the last row of every span, in order.
            keys: of the noise every token is drawn with.
            temperatures: 0 is greedy.
            vocab_size: width of the distributions, 0 past the model's own vocabulary; one is NaN
                throughout where logits are NaN or infinite, and so are those after it.
            by_race: draw as `sampling.race` does instead of by the inverse of the distribution.
            stops: per sequence, when not to go on; drafting ends once all have stopped. Empty: none
                stops.
        """
