"""An EAGLE-3 head as a model that drafts: its own KV, its own states, the target's token ids.

Row t holds token t + 1 of the sequence. The rows of a `HeadBatch` get their states from the
target's features; a row of any other pass continues from what the row before it gave, which this
model keeps per slot until the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.drafters.eagle3.head import Eagle3Head, rotary_sizes
from forerun.models.attention import attend_blocks, plan_pass
from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.kv_store import ContiguousKVStore, StoredModel, chain_by_forward
from forerun.models.memory import geometry_of
from forerun.theory.tree import TokenTree

__all__ = ["Eagle3Model", "HeadBatch", "store_for"]

MAX_STAGED_ROWS = 64
"""Rows past the target's context; drafting stops at its end anyway."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadBatch(RowBatch):
    """A pass of a head over rows whose states come from the target.

    Attributes:
        states: of every row, `Eagle3Head.fuse` of the target's features.
    """

    states: Float[Tensor, "rows width"]


def store_for(head: Eagle3Head, target: LanguageModel, dtype: torch.dtype) -> ContiguousKVStore:
    """Return an empty KV store for the sequences that the target has slots for.

    Raises:
        NotEnoughMemory: there is no room for it.
    """
    geometry = geometry_of(
        rotary_sizes(head.config)[0],
        num_slots=target.store.num_free,
        capacity=target.max_context,
        max_staged_rows=MAX_STAGED_ROWS,
        dtype=dtype,
    )
    return ContiguousKVStore(geometry, target.device)


class Eagle3Model(StoredModel):
    """A LanguageModel over an EAGLE-3 head; logits of tokens it cannot draft are -inf.

    Args:
        head: on the target's device, in the dtype to compute in.
        target: gives the embedding, where the head has none.
        store: of the head's own keys and values.
    """

    def __init__(self, head: Eagle3Head, target: LanguageModel, store: ContiguousKVStore) -> None:
        super().__init__(rotary_sizes(head.config)[0], store)
        self.head_module = head
        self.target = target
        self.num_parameters = sum(parameter.numel() for parameter in head.parameters())
        self._target_ids = head.target_ids
        config = head.config
        self._groups = config.num_heads // config.num_kv_heads
        self._scaling = config.head_dim**-0.5
        # Per slot: what a row behind the last chain row continues from, ...
        self._last = torch.zeros(
            (store.geometry.num_slots, config.hidden_size), dtype=self.dtype, device=self.device
        )
        # ... what that chain row itself was computed from, and what rows behind draft nodes
        # continue from, by the tokens down to the node.
        self._origins: dict[int, Tensor] = {}
        self._nodes: dict[int, dict[tuple[int, ...], Tensor]] = {}

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which is the target's."""
        return self.head_module.config.target_vocab_size

    def fuse(
        self, features: Float[Tensor, "rows layers target_width"]
    ) -> Float[Tensor, "rows width"]:
        """Return the states of rows for a `HeadBatch`."""
        return self.head_module.fuse(features.to(self.device, self.dtype))

    @torch.inference_mode()
    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass. Stages the KV of every row; the caller commits.

        Raises:
            NotEnoughMemory: rows do not fit into their slot.
            ValueError: a row continues from a row that was not computed.
        """
        states = batch.states if isinstance(batch, HeadBatch) else self._states(batch)
        plan = plan_pass(batch.spans, self._store, self._groups)

        def attend(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            plan.write(0, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            attended = attend_blocks(
                0, queries.transpose(0, 1)[None], plan.blocks(None), self._scaling
            )
            return attended[0].flatten(1, 2)

        head = self.head_module
        output = head(self.embed(batch.tokens), states, batch.positions, attend)
        wanted = output.index_select(0, batch.logit_rows)
        self._note(batch, states, head.fed_back(output))
        return ModelOutput(logits=self._scattered(head.logits(wanted)))

    def _scattered(
        self, logits: Float[Tensor, "rows draft_vocab"]
    ) -> Float[Tensor, "rows target_vocab"]:
        """Return logits over the target's tokens."""
        if logits.shape[1] == self.vocab_size:
            return logits
        full = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return full.index_copy_(1, self._target_ids, logits)

    def _states(self, batch: RowBatch) -> Float[Tensor, "rows width"]:
        """Return what every row continues from: the output of the row before it.

        Raises:
            ValueError: that row was not computed by an earlier pass.
        """
        if all(span.num_rows == 1 for span in batch.spans):
            return self._last[[span.slot for span in batch.spans]]
        rows: list[Tensor] = []
        tokens = batch.tokens.tolist()
        for span in batch.spans:
            if span.num_chain > 1 or span.slot not in self._origins:
                raise ValueError(f"rows of slot {span.slot} need states from the target's features")
            nodes = {(): self._last[span.slot], **self._nodes[span.slot]}
            first = len(rows) + 1
            rows.append(self._origins[span.slot])
            for path in paths_of(span.tree, tokens[first : first + len(span.tree.parents)]):
                if path[:-1] not in nodes:
                    raise ValueError(f"slot {span.slot} has no state behind tokens {path[:-1]}")
                rows.append(nodes[path[:-1]])
        return torch.stack(rows)

    def _note(self, batch: RowBatch, states: Tensor, fed_back: Tensor) -> None:
        """Keep what later rows continue from."""
        tokens: list[int] | None = None
        row = -1
        for span in batch.spans:
            row += span.num_chain
            self._last[span.slot] = fed_back[row]
            if isinstance(batch, HeadBatch):
                self._origins[span.slot] = states[row]
                self._nodes[span.slot] = {}
            if not span.tree.parents:
                continue
            tokens = tokens or batch.tokens.tolist()
            num_nodes = len(span.tree.parents)
            for path in paths_of(span.tree, tokens[row + 1 : row + 1 + num_nodes]):
                row += 1
                self._nodes[span.slot][path] = fed_back[row]

    def embed(self, tokens: Int64[Tensor, " rows"]) -> Float[Tensor, "rows width"]:
        """Token embeddings: the head's own or the target's."""
        if self.head_module.embed_tokens is None:
            return self.target.embed(tokens).to(self.dtype)
        embedded: Tensor = self.head_module.embed_tokens(tokens)
        return embedded

    def final_norm(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows width"]:
        """The norm ahead of the head's output matrix."""
        normed: Tensor = self.head_module.norm(hidden)
        return normed

    def head(self, hidden: Float[Tensor, "rows width"]) -> Float[Tensor, "rows vocab"]:
        """Logits over the target's tokens of rows after the final norm."""
        return self._scattered(self.head_module.lm_head(hidden))

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Feed `batch`, then continue every sequence with its `num_tokens` most likely tokens."""
        return chain_by_forward(self, batch, num_tokens, vocab_size)


def paths_of(tree: TokenTree, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens down to every node of a tree, given those of the nodes."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
