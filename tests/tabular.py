"""A Markov model defined by a table of probabilities, for tests of exactness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Float32, Float64, Int64
from torch import Tensor

from forerun.errors import UnsupportedFeatures
from forerun.models.base import LanguageModel, ModelOutput, RowBatch, Span, chain_by_forward
from forerun.models.kv_store import KVPrefix, KVStore

NUM_LAYERS = 3
FEATURE_WIDTH = 4
# A prime below 2**23: every feature is an integer that fp32 represents exactly.
HASH_MODULUS = 8_388_593


def tabular_features(ids: Sequence[int], layer: int) -> tuple[float, ...]:
    """Features of a row of a TabularModel, which differ between rows with different prefixes."""
    digest = layer + 1
    for token in ids:
        digest = (digest * 31_337 + token + 1) % HASH_MODULUS
    return (float(layer), float(len(ids)), float(ids[-1]), float(digest))


def _stacked_features(
    rows: Sequence[Sequence[int]], batch: RowBatch
) -> Float32[Tensor, "rows layers width"] | None:
    """Features of all rows of a pass; None when the pass requests no layers."""
    if not batch.feature_layers:
        return None
    features = [[tabular_features(ids, layer) for layer in batch.feature_layers] for ids in rows]
    return torch.tensor(features, dtype=torch.float32)


def check_layers(layers: Sequence[int]) -> None:
    """Refuse layers that do not exist.

    Raises:
        UnsupportedFeatures: one is negative or above NUM_LAYERS.
    """
    for layer in layers:
        if not 0 <= layer <= NUM_LAYERS:
            raise UnsupportedFeatures(
                f"features of layer {layer} were asked for; a tabular model has 0 to {NUM_LAYERS}"
            )


class TokenStore(KVStore):
    """A KVStore that stores token ids instead of KV, so that a wrong commit changes the output."""

    def __init__(self, num_slots: int, capacity: int, max_staged_rows: int) -> None:
        super().__init__(num_slots, capacity, max_staged_rows)
        self._tokens: list[list[int]] = [[] for _ in range(num_slots)]

    def stage(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """Write and stage rows; `KVStore.claim` lists the errors."""
        self.claim(slot, start, len(tokens))
        self._tokens[slot][start:] = tokens

    def tokens(self, slot: int, end: int) -> list[int]:
        """Rows [0, end) of `slot`, committed and staged."""
        return self._tokens[slot][:end]

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit the staged rows listed in `rows` and drop the other staged rows."""
        start = self._commit(slot, rows)
        written = self._tokens[slot]
        written[start:] = [written[start + row] for row in rows]

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy the first `num_tokens` (None: all) committed tokens of `slot` into a new slot."""
        length = self.length(slot) if num_tokens is None else num_tokens
        prefix = self.export_prefix(slot, length)
        copy = self.reserve()
        self.import_prefix(copy, prefix)
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Return a copy of the first `num_tokens` committed tokens."""
        self.check_prefix(slot, num_tokens)
        tokens = torch.tensor(self._tokens[slot][:num_tokens], dtype=torch.int64)
        return self._export(slot, num_tokens, tokens)

    def import_prefix(self, slot: int, prefix: KVPrefix) -> None:
        """Fill an empty slot with an exported prefix."""
        self._tokens[slot] = self._import(slot, prefix).tolist()

    def keep_features(self, layers: tuple[int, ...]) -> None:
        """Store features of these layers with the tokens from now on; see `KVStore`."""
        self._renew_features(layers, FEATURE_WIDTH, torch.float32, torch.device("cpu"))


class TabularModel(LanguageModel):
    """A LanguageModel whose next token depends on the last `order` tokens through a table.

    Args:
        log_probs: one normalised row per state, see `state_of`; fp64.
        order: tokens that matter.
        store: where the tokens live.
        dtype: of the logits that `forward` returns; they are the log-probabilities.
    """

    def __init__(
        self,
        *,
        log_probs: Float64[Tensor, "states vocab"],
        order: int,
        store: TokenStore,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.log_probs = log_probs
        self.order = order
        self.store = store
        self.dtype = dtype
        self.vocab_size = log_probs.shape[1]
        self.num_parameters = log_probs.numel()
        self.num_layers = NUM_LAYERS
        self.hidden_size = FEATURE_WIDTH
        self.max_context = store.capacity
        self.device = log_probs.device

    @classmethod
    def from_seed(
        cls,
        seed: int,
        *,
        vocab_size: int,
        order: int = 2,
        num_slots: int = 8,
        max_context: int = 256,
        scale: float = 1.5,
    ) -> TabularModel:
        """Create a random table; the same seed and sizes give the same table."""
        generator = torch.Generator().manual_seed(seed)
        logits = torch.empty((vocab_size + 1) ** order, vocab_size, dtype=torch.float64)
        log_probs = logits.normal_(0.0, scale, generator=generator).log_softmax(-1)
        store = TokenStore(num_slots, max_context, max_staged_rows=64)
        return cls(log_probs=log_probs, order=order, store=store)

    def state_of(self, ids: Sequence[int]) -> int:
        """Return the row of the table for the last tokens; a start mark fills missing ones."""
        start_mark = self.vocab_size
        state = 0
        for token in [*[start_mark] * self.order, *ids][len(ids) :]:
            state = state * (self.vocab_size + 1) + token
        return state

    def probs(self, ids: Sequence[int]) -> Float64[Tensor, " vocab"]:
        """Exact distribution of the token after `ids`."""
        return self.log_probs[self.state_of(ids)].exp()

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass, which stages the token of every row; the caller commits the rows.

        Features are those of `tabular_features`.

        Raises:
            UnsupportedFeatures: a layer of `batch.feature_layers` does not exist.
        """
        check_layers(batch.feature_layers)
        tokens = batch.tokens.tolist()
        states: list[int] = []
        rows_seen: list[list[int]] = []
        first = 0
        for span in batch.spans:
            rows = tokens[first : first + span.num_rows]
            self.store.stage(span.slot, span.start, rows)
            histories = list(self.histories(span, rows))
            states += map(self.state_of, histories)
            if batch.feature_layers:
                rows_seen += histories
            first += span.num_rows
        wanted = torch.tensor(states, device=self.device)[batch.logit_rows]
        logits = self.log_probs[wanted].to(self.dtype)
        return ModelOutput(logits=logits, features=_stacked_features(rows_seen, batch))

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Raise an error: a table has no embedding."""
        raise UnsupportedFeatures("a tabular model has no embedding")

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """Raise an error: a table has no norm."""
        raise UnsupportedFeatures("a tabular model has no final norm")

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Raise an error: a table has no head."""
        raise UnsupportedFeatures("a tabular model has no head")

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its most likely tokens."""
        return chain_by_forward(self, batch, num_tokens, vocab_size)

    def histories(self, span: Span, rows: Sequence[int]) -> Iterator[list[int]]:
        """Yield the tokens visible to each row of a span, its own included, read from the store."""
        chain = self.store.tokens(span.slot, span.start + span.num_chain)
        for end in range(span.start + 1, len(chain) + 1):
            yield chain[:end]
        for node in range(len(span.tree.parents)):
            yield chain + [rows[span.num_chain + above] for above in span.tree.path(node)]
