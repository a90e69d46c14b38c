"""Language models: RowBatch in, ModelOutput out, a KVStore between, a Context per sequence.

Subclasses of `WrappedModel` change the passes of another model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from forerun.errors import UnsupportedFeatures
from forerun.models.architecture import Architecture, WeightFormat
from forerun.models.kv_store import KVStore, Prefix, TensorKVStore, count_common
from forerun.theory.tree import NO_TREE, TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows of one sequence in a pass.

    The first `num_chain` rows are a causal chain (pending tokens or a prefill chunk); the rows of
    `tree` follow, their roots hanging off the last chain row. Row i is written at index `start + i`
    of the slot. It sees indices [0, start), the chain rows up to itself and, in the tree, its
    ancestors.

    Attributes:
        start: index of the first row; normally the committed length, more when earlier rows of the
            same step are staged but not yet committed (a drafter feeding one token at a time).
    """

    slot: int
    start: int
    num_chain: int
    tree: TokenTree = NO_TREE

    @property
    def num_rows(self) -> int:
        """Rows this sequence contributes to the pass."""
        return self.num_chain + len(self.tree.parents)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowBatch:
    """One packed pass: the rows of all sequences one after another, in the order of `spans`.

    Attributes:
        positions: absolute position per row (`start + offset` in the chain, then plus tree depth).
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


class SampledTokens(NamedTuple):
    """Token chains drawn in one call.

    Attributes:
        probs: the distribution each was drawn from.
    """

    tokens: Int64[Tensor, "num_tokens sequences"]
    probs: Float32[Tensor, "num_tokens sequences vocab"]


class LikelyTree(NamedTuple):
    """The nodes with the most probable paths, depth-first.

    Attributes:
        rows: rows of the nodes' KV after the row of the last committed token; -1 where a node was
            not fed.
        log_probs: of the path down to every node.
    """

    tree: TokenTree
    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    log_probs: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CycleMember:
    """One sequence in the cycles of a call.

    Attributes:
        num_committed: its tokens; the last of them has no row in the target's slot.
        num_left: tokens that it may still emit.
        unread: committed tokens without a row in the draft's slot; the last token where nothing is
            drafted.
        num_drafted: per cycle; 0 decodes plainly.
        rule: "greedy" compares with the argmax; "walk", "block" and "token" are those of
            `sampling.config`.
        is_coupled: the draft is drawn with the target's noise.
        ends: tokens that may end the sequence.
        truncation: min_p, top_k (0: none) and 1 - top_p of both distributions.
    """

    noise_key: int
    num_committed: int
    num_left: int
    slot: int
    unread: Sequence[int]
    draft_slot: int = 0
    num_draft_rows: int = 0
    num_drafted: int = 0
    rule: str
    is_coupled: bool = False
    ends: Collection[int]
    temperature: float
    draft_temperature: float = 0.0
    truncation: tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CycleBatch:
    """The sequences of a call of `LanguageModel.run_cycles`, and the model that drafts for them.

    Attributes:
        is_drawn: whether some chain is drawn, and not the most likely one.
        by_race: draw as `sampling.walk.race` does.
    """

    members: Sequence[CycleMember]
    draft: LanguageModel | None = None
    is_drawn: bool = False
    by_race: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelCycle:
    """One step of all members, whose rows are written but not committed.

    Attributes:
        started_s: when it began, in seconds after the call.
        other_s: beyond drafting and the target pass.
        outcomes: of every member how many drafted tokens are accepted, the token after them, and
            the expected number (of "walk" it follows from `matches`).
        chains: the drafted tokens of every member, as many as the longest chain has; `ids` are the
            same as numbers.
        matches: P(node equals the target's draw) of every member and level, one after another.
    """

    started_s: float
    draft_s: float
    verify_s: float
    other_s: float
    outcomes: Sequence[tuple[int, int, float]]
    chains: Sequence[Int64[Tensor, " depth"]]
    ids: Sequence[tuple[int, ...]]
    matches: Sequence[float]


class LanguageModel(ABC):
    """A causal language model that runs packed rows; its only state is its weights and KV store.

    Attributes:
        vocab_size: width of the logits.
        num_parameters: tied parameters are counted once.
        hidden_size: width of the residual stream, and so of features.
        max_context: largest number of tokens (prompt and output) one sequence may have.
        device: of the inputs and of the logits.
        dtype: of embeddings and features.
        drafts_in_one_call: whether `sampled_chain` and `likely_trees` can be called.
        in_kernels: whether its passes run in the kernels, so that `run_cycles` of another model
            may draft with it.
    """

    vocab_size: int
    num_parameters: int
    num_layers: int
    hidden_size: int
    max_context: int
    store: KVStore
    device: torch.device
    dtype: torch.dtype = torch.float32
    drafts_in_one_call = False
    in_kernels = False

    @abstractmethod
    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass, which stages the KV of every row; the caller commits the rows.

        Raises:
            UnsupportedFeatures: a layer of `batch.feature_layers` does not exist.
        """

    @abstractmethod
    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings in the model's dtype, before positions are added.

        Raises UnsupportedFeatures where the model has no embedding.
        """

    @abstractmethod
    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Apply the final norm to rows that leave the last layer.

        Raises UnsupportedFeatures where the model has no residual stream.
        """

    @abstractmethod
    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits of rows to which the final norm was applied, in the model's dtype or a wider one.

        Raises UnsupportedFeatures where the model has no head.
        """

    @torch.inference_mode()
    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its `num_tokens` most likely tokens.

        Stages the rows of `batch`, which has no trees and wants the logits of the last row of every
        span, and `num_tokens - 1` further ones per sequence, for the last token is not fed; the
        caller commits. The argmax is taken over the first `vocab_size` logits, lowest id on ties;
        of NaN logits any id among them may come. Nothing waits for the device. By default one pass
        per token.
        """
        return chain_by_forward(self, batch, num_tokens, vocab_size)

    def sampled_chain(
        self,
        batch: RowBatch,
        keys: Int64[Tensor, "num_tokens sequences"],
        temperatures: Float32[Tensor, " sequences"],
        vocab_size: int,
        *,
        by_race: bool,
    ) -> SampledTokens:
        """Feed `batch`, then continue every sequence with tokens drawn at its temperature.

        Stages rows as `greedy_chain` does. Only where `drafts_in_one_call`.

        Args:
            temperatures: 0 is greedy.
            vocab_size: width of the distributions, 0 past the model's own vocabulary; one is NaN
                throughout where logits are NaN or infinite, and so are those after it.
            by_race: draw as `sampling.walk.race` does, not by the inverse of the distribution.
        """
        raise NotImplementedError

    def likely_trees(
        self,
        batch: RowBatch,
        shapes: Sequence[tuple[int, int, int]],
        temperatures: Sequence[float],
        vocab_size: int,
    ) -> list[LikelyTree]:
        """Feed `batch`, then grow a tree of the most probable paths after every sequence.

        One pass per level feeds the last row of every sequence once more, and the nodes that may
        have children (EAGLE-2, 2406.16858). Stages the rows of `batch`, as `greedy_chain` takes it,
        and those of the last pass over each tree; the caller commits. A tree has no nodes where the
        first distribution is not valid. Only where `drafts_in_one_call`.

        Args:
            shapes: per sequence the most nodes, levels and children of a node.
            temperatures: of the distributions that rank the paths, above 0.
            vocab_size: tokens from here on are left out.
        """
        raise NotImplementedError

    def run_cycles(self, batch: CycleBatch, most: int) -> list[ModelCycle]:
        """Draft, run and verify up to `most` steps of all members in one call.

        It ends after a cycle in which a member may have ended. Nothing is committed, and the same
        noise draws the same tokens again. None by default: the caller takes the step by its parts.
        """
        return []

    def first_layers(self, num_layers: int) -> LanguageModel | None:
        """Return the model cut after its first layers, with its final norm and head.

        Weights and store are shared: what one stages in a slot, the other finds there in the layers
        they have in common. Rows that the shorter one staged must not be committed, for the upper
        layers lack them. None where the model cannot be cut.
        """
        return None

    @property
    def bytes_read(self) -> int | None:
        """Bytes of weights that a pass reads, where they are known."""
        return None

    def in_fewer_bits(self, weights: WeightFormat) -> LanguageModel | None:
        """Return a model of the same weights quantised, on the same store; None if it cannot be.

        Rows that it stages must not be committed: they are not those of this model.
        """
        return None


class StoredModel(LanguageModel):
    """A LanguageModel whose sizes, device and dtype follow from its architecture and its store."""

    def __init__(self, architecture: Architecture, store: TensorKVStore) -> None:
        self.architecture = architecture
        self.store = store
        self.vocab_size = architecture.vocab_size
        self.num_layers = architecture.num_layers
        self.hidden_size = architecture.hidden_size
        self.max_context = store.geometry.capacity
        self.device = store.device
        self.dtype = store.geometry.dtype

    def _check_features(self, layers: tuple[int, ...]) -> None:
        """Refuse layers the model does not have."""
        for layer in layers:
            if not 0 <= layer <= self.num_layers:
                raise UnsupportedFeatures(
                    f"features of layer {layer} were asked for; {self.architecture.name} has "
                    f"layers 0 to {self.num_layers} (what leaves the last one)"
                )

    def _claim(self, batch: RowBatch, num_later: int = 0) -> None:
        """Stage the rows of a pass, and `num_later` further rows for every sequence."""
        for span in batch.spans:
            self.store.claim(span.slot, span.start, span.num_rows + num_later)


def chain_by_forward(
    model: LanguageModel, batch: RowBatch, num_tokens: int, vocab_size: int
) -> Int64[Tensor, "sequences num_tokens"]:
    """`LanguageModel.greedy_chain`, level by level: one pass per token, one row per sequence."""
    levels = [_most_likely(model, batch, vocab_size)]
    positions = batch.positions[batch.logit_rows]
    rows = torch.arange(len(batch.spans), device=batch.tokens.device)
    for depth in range(num_tokens - 1):
        level = RowBatch(
            tokens=levels[-1],
            positions=positions + (depth + 1),
            spans=tuple(
                Span(slot=s.slot, start=s.start + s.num_chain + depth, num_chain=1)
                for s in batch.spans
            ),
            logit_rows=rows,
        )
        levels.append(_most_likely(model, level, vocab_size))
    return torch.stack(levels, dim=1)


def _most_likely(model: LanguageModel, batch: RowBatch, vocab_size: int) -> Tensor:
    return model.forward(batch).logits[:, :vocab_size].argmax(dim=-1)


class Context:
    """The committed tokens of a request, and the slot that holds their KV in one model.

    `ids` is owned by the request and only ever appended to; what this model has not cached of it is
    pending and is fed by the next pass, so neither drafters nor the step do catch-up arithmetic.

    Args:
        scope: sequences of one scope share what is cached of tokens they begin with; None begins
            with nothing and shares nothing.
    """

    def __init__(self, store: KVStore, ids: list[int], scope: str | None = None) -> None:
        self.store = store
        self.ids = ids
        if scope is None:
            self.slot = store.reserve()
        else:
            self.slot = store.begin(Prefix(ids=ids, scope=scope))

    @property
    def num_cached(self) -> int:
        """Committed tokens whose KV this model holds."""
        return self.store.length(self.slot)

    @property
    def num_pending(self) -> int:
        """Committed tokens whose KV is not cached yet."""
        return len(self.ids) - self.num_cached

    def pending(self, limit: int | None = None) -> list[int]:
        """Return the next committed tokens to feed, at most `limit`."""
        start = self.num_cached
        return self.ids[start : len(self.ids) if limit is None else start + limit]

    def span(self, num_chain: int, tree: TokenTree = NO_TREE, num_staged: int = 0) -> Span:
        """Return a span of a chain and a tree after the cached and `num_staged` staged rows."""
        start = self.num_cached + num_staged
        return Span(slot=self.slot, start=start, num_chain=num_chain, tree=tree)

    def commit(self, rows: Sequence[int]) -> None:
        """Commit the given staged rows and drop all other staged rows."""
        self.store.commit(self.slot, rows)

    def replace_ids(self, ids: Sequence[int]) -> None:
        """Take other tokens as the sequence's, and drop what is cached from the first change on.

        The last token is always pending then, since its logits are wanted.
        """
        same = count_common(self.ids, ids)
        self.ids[same:] = ids[same:]
        if self.num_cached > (num_kept := max(0, min(same, len(ids) - 1))):
            self.store.cut(self.slot, num_kept)

    def close(self, num_kept: int = 0) -> None:
        """Free the slot, but keep its first `num_kept` tokens for requests with the same prefix."""
        self.store.keep(self.slot, num_kept)


def positions_of(span: Span) -> list[int]:
    """Return the absolute position of every row of a span."""
    last = span.start + span.num_chain - 1
    return [*range(span.start, last + 1), *[last + depth for depth in span.tree.depths]]


def pack(
    spans: Sequence[Span],
    tokens: Sequence[int] | Tensor,
    logit_rows: Sequence[int],
    device: torch.device,
) -> RowBatch:
    """Pack spans, their tokens and the rows to score into a RowBatch; one copy to the device.

    Tokens that are a tensor already may be on any device.
    """
    positions = [position for span in spans for position in positions_of(span)]
    ids = [] if isinstance(tokens, Tensor) else tokens
    numbers = torch.tensor([*ids, *positions, *logit_rows], dtype=torch.int64)
    sizes = [len(ids), len(positions), len(logit_rows)]
    parts = numbers.to(device, non_blocking=True).split_with_sizes(sizes)
    return RowBatch(
        tokens=tokens.to(device, non_blocking=True) if isinstance(tokens, Tensor) else parts[0],
        positions=parts[1],
        spans=tuple(spans),
        logit_rows=parts[2],
    )


class WrappedModel(LanguageModel):
    """A LanguageModel that passes every call on to another one."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.vocab_size = model.vocab_size
        self.num_parameters = model.num_parameters
        self.num_layers = model.num_layers
        self.hidden_size = model.hidden_size
        self.max_context = model.max_context
        self.store = model.store
        self.device = model.device
        self.dtype = model.dtype

    def forward(self, batch: RowBatch) -> ModelOutput:
        return self.model.forward(batch)

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        return self.model.greedy_chain(batch, num_tokens, vocab_size)

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        return self.model.embed(tokens)

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        return self.model.final_norm(hidden)

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        return self.model.head(hidden)
