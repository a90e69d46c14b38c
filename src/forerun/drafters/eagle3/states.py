"""Input states of the rows of an EAGLE-3 head, and the store of its keys and values.

Row t holds token t + 1 of the sequence. Rows of committed tokens get their states from the target's
features, in a `HeadBatch`. The input state of a draft token's row is the output state of the row
before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.eagle3.config import Eagle3Config
from forerun.drafters.eagle3.head import rotary_sizes
from forerun.models.base import LanguageModel, RowBatch, Span
from forerun.models.kv_store import ContiguousKVStore
from forerun.models.memory import geometry_of
from forerun.theory.tree import TokenTree

__all__ = ["HeadBatch", "RowStates", "store_for"]

MAX_STAGED_ROWS = 64
"""Rows past the target's context; drafting stops at its end anyway."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadBatch(RowBatch):
    """A pass of a head over rows whose states come from the target.

    Attributes:
        states: of every row, `Eagle3Head.fuse` of the target's features.
    """

    states: Float[Tensor, "rows width"]

    @classmethod
    def of(cls, batch: RowBatch, states: Float[Tensor, "rows width"]) -> HeadBatch:
        """Return a copy of a pass with the input states of its rows."""
        return cls(
            tokens=batch.tokens,
            positions=batch.positions,
            spans=batch.spans,
            logit_rows=batch.logit_rows,
            states=states,
        )


def store_for(config: Eagle3Config, target: LanguageModel, dtype: torch.dtype) -> ContiguousKVStore:
    """Return an empty KV store with as many slots as the target's.

    Raises:
        NotEnoughMemory: there is no room for it.
    """
    geometry = geometry_of(
        rotary_sizes(config)[0],
        num_slots=target.store.num_free,
        capacity=target.max_context,
        max_staged_rows=MAX_STAGED_ROWS,
        dtype=dtype,
    )
    return ContiguousKVStore(geometry, target.device)


class RowStates:
    """Input states per slot that the last pass leaves for the next one.

    Args:
        num_slots: sequences.
        width: of the head.
        dtype: of the states.
        device: where they are.
    """

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

        Raises:
            ValueError: no earlier pass computed the row before one of the rows.
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
            for path in paths_of(span.tree, tokens[len(rows) :]):
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
        """Store the input states of the rows that may follow the rows with logits of a pass.

        Args:
            batch: the pass, which wants the last chain row of every span or nodes of its tree.
            states: the input states of its rows.
            fed_back: input states of the rows that follow `batch.logit_rows`.
        """
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
        places = node_places(batch.spans, batch.tokens.tolist())
        for row, state in zip(batch.logit_rows.tolist(), fed_back, strict=True):
            slot, path = places[row]
            self._nodes[slot][path] = state


def node_places(
    spans: Sequence[Span], tokens: Sequence[int]
) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Map each row of a tree node to its slot and the draft tokens on the path to the node."""
    places: dict[int, tuple[int, tuple[int, ...]]] = {}
    row = 0
    for span in spans:
        row += span.num_chain
        for path in paths_of(span.tree, tokens[row:]):
            places[row] = (span.slot, path)
            row += 1
    return places


def paths_of(tree: TokenTree, tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each node of a tree; surplus `tokens` are ignored."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tokens, strict=False):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths
