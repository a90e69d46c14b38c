"""Recurrent layers of transformers' models over packed rows: Mamba, gated delta nets, convolutions.

Keys and values of rejected rows can be dropped, but a recurrent state cannot be undone. So a layer
keeps its state after every row that a commit may end with, and a commit chooses one of them. A row
starts from the state of the row before it, which is its parent in a tree. Rows of equal depth run
as one batch over all sequences. The rows of a long chain that no commit can end with run as one
sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import transformers
from jaxtyping import Float
from torch import Tensor, nn

from forerun.errors import InvalidModel
from forerun.models.architecture import Architecture
from forerun.models.base import Span
from forerun.models.families import find_family
from forerun.models.kv_store import MIN_SHARED_TOKENS, ContiguousKVStore, KVPrefix, Prefix
from forerun.models.memory import KVGeometry

LayerState = Mapping[tuple[str, int], Tensor]
"""The tensors of one layer, [1, ...] each, by what they are ("conv", "recurrent") and a number."""

RowState = dict[int, LayerState]
"""The states of all recurrent layers after one row, by layer."""

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""Names that transformers gives the parameter for the states; `cache` since 5.24."""

NUM_CHAIN_STATES = 2
"""Rows at the end of a chain that keep their states: the last one is committed, and a drafter that
grows a tree level by level feeds it again."""


class RecurrentStore(ContiguousKVStore):
    """A KV store that also holds recurrent states, after the last committed and every staged row.

    A state is valid at one length. So a text is shared as a whole, or up to the one length at which
    there is a snapshot of its states. Snapshots are taken where a text parts from another one, as
    after a common system prompt. A text cut at any other length is read again from its beginning.

    Attributes:
        due: length at which the next snapshot is taken, by slot.
    """

    def __init__(self, geometry: KVGeometry, device: torch.device) -> None:
        super().__init__(geometry, device)
        self.due: dict[int, int] = {}
        self.snapshot_lengths = {}
        self._snapshots: list[RowState] = [{} for _ in range(geometry.num_slots)]
        self._states: list[RowState] = [{} for _ in range(geometry.num_slots)]
        self._staged: list[dict[int, RowState]] = [{} for _ in range(geometry.num_slots)]

    def state_before(self, slot: int, row: int, layer: int) -> LayerState:
        """Return the state that a row of a slot starts from; empty at the beginning of a text."""
        if row == self.length(slot):
            return self._states[slot].get(layer, {})
        return self._staged[slot][row - 1][layer]

    def put_state(self, slot: int, row: int, layer: int, state: LayerState) -> None:
        self._staged[slot].setdefault(row, {})[layer] = state

    def commit(self, slot: int, rows: Sequence[int]) -> None:
        """Commit staged rows, and the states after the last of them."""
        start = self.length(slot)
        if rows and start + rows[-1] not in self._staged[slot]:
            raise ValueError(f"row {rows[-1]} of slot {slot} has no recurrent state to commit")
        super().commit(slot, rows)
        if rows:
            last = self._staged[slot][start + rows[-1]]
            self._states[slot] = {layer: _copy_views(state) for layer, state in last.items()}
        if start < (length := self.due.get(slot, 0)) <= self.length(slot):
            at = self._staged[slot][start + rows[length - start - 1]]
            self._snapshots[slot] = {layer: _copy_views(state) for layer, state in at.items()}
            self._snapshot_lengths[slot] = self.due.pop(slot)
        self._staged[slot] = {}

    @property
    def _snapshot_lengths(self) -> dict[int, int]:
        assert self.snapshot_lengths is not None
        return self.snapshot_lengths

    def reserve(self) -> int:
        return self._forget_states(super().reserve())

    def begin(self, wanted: Prefix) -> int:
        """Reserve a slot with a stored text that `wanted` continues, or with its beginning."""
        shared = min(self.most_common(wanted), len(wanted.ids) - 1)
        shared -= shared % MIN_SHARED_TOKENS
        slot = super().begin(wanted)
        length = self.length(slot)
        if not length:
            self._forget_states(slot)
        elif length == self._snapshot_lengths.get(slot):
            self._states[slot] = self._snapshots[slot]
        self.due.pop(slot, None)  # of a request that ended before it came so far
        if shared > length:
            self.due[slot] = shared
        return slot

    def _forget_states(self, slot: int) -> int:
        self._states[slot], self._staged[slot], self._snapshots[slot] = {}, {}, {}
        self._snapshot_lengths.pop(slot, None)
        self.due.pop(slot, None)
        return slot

    def keep(self, slot: int, num_tokens: int) -> None:
        """Free `slot`, but keep its text for `begin` if `num_tokens` is all of it."""
        super().keep(slot, num_tokens if num_tokens == self.length(slot) else 0)
        self._staged[slot] = {}

    def cut(self, slot: int, num_tokens: int) -> None:
        """Drop all tokens of `slot`, unless it has states after exactly `num_tokens`."""
        if num_tokens in (self.length(slot), self._snapshot_lengths.get(slot)):
            if num_tokens < self.length(slot):
                self._states[slot] = self._snapshots[slot]
            super().cut(slot, num_tokens)
            self._staged[slot] = {}
        else:
            self.check_prefix(slot, num_tokens)
            super().cut(slot, 0)
            self._forget_states(slot)

    def fork(self, slot: int, num_tokens: int | None = None) -> int:
        """Copy all committed tokens of `slot`, or those before its snapshot, into a new slot."""
        held = self.count_held(slot)
        if num_tokens not in (None, held, self._snapshot_lengths.get(slot)):
            raise ValueError(
                f"a prefix of {num_tokens} tokens of slot {slot}, which holds {held} and whose "
                "recurrent states belong to all of them"
            )
        copy = super().fork(slot, num_tokens)
        self._states[copy] = self._states[slot]
        if (length := self._snapshot_lengths.get(slot)) is not None:
            self._snapshot_lengths[copy], self._snapshots[copy] = length, self._snapshots[slot]
            if num_tokens == length:
                self._states[copy] = self._snapshots[slot]
        return copy

    def export_prefix(self, slot: int, num_tokens: int) -> KVPrefix:
        """Raise InvalidModel, because a state is valid at one length only."""
        raise InvalidModel(
            "a profile needs prefixes of several lengths, and the recurrent layers of this model "
            "have a state for one only: it cannot be profiled"
        )


def _copy_views(state: LayerState) -> LayerState:
    """Copy tensors that are views of a batch or of a chunk, whose memory is then freed."""
    return {
        key: part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
        for key, part in state.items()
    }


class _Rows(NamedTuple):
    """Rows that run as one sequence from one state.

    Attributes:
        start: index in the slot that the first row continues after: its parent's index plus one.
    """

    first: int
    num_rows: int
    slot: int
    start: int
    end: int


def _schedule(spans: Sequence[Span], due: Mapping[int, int]) -> list[list[_Rows]]:
    """Return the batches of a pass, in the order in which they run.

    A batch holds several rows in sequence, or single rows that do not depend on each other. Rows in
    sequence end where a snapshot of their slot is due.
    """
    chunks: list[list[_Rows]] = []
    levels: list[list[_Rows]] = []

    first = 0
    for span in spans:
        num_early = max(0, span.num_chain - NUM_CHAIN_STATES)
        ends = [due.get(span.slot, 0) - span.start, num_early]
        for begin, end in pairwise([0, *(end for end in ends if 0 < end <= num_early)]):
            if begin < end:
                start, last = span.start + begin, span.start + end - 1
                chunks.append([_Rows(first + begin, end - begin, span.slot, start, last)])
        for row in range(num_early, span.num_rows):
            node = row - span.num_chain
            before = row - 1 if node < 0 else span.num_chain + span.tree.parents[node]
            level = row - num_early
            if node >= 0:
                level = span.num_chain - num_early - 1 + span.tree.depths[node]
                before = before if span.tree.parents[node] >= 0 else span.num_chain - 1
            if level == len(levels):
                levels.append([])
            start, end = span.start + before + 1, span.start + row
            levels[level].append(_Rows(first + row, 1, span.slot, start, end))
        first += span.num_rows
    return chunks + levels


class RecurrentPass:
    """The batches of rows that the recurrent layers run in the current pass."""

    def __init__(self, store: RecurrentStore) -> None:
        self.store = store
        self.batches: list[list[_Rows]] = []

    def begin(self, spans: Sequence[Span]) -> None:
        self.batches = _schedule(spans, self.store.due)

    def __deepcopy__(self, memo: object) -> RecurrentPass:
        """Return itself: a model cut after its first layers works on the same store."""
        return self


class PackedRecurrence(nn.Module):
    """A recurrent module of transformers that takes packed rows of several sequences.

    Args:
        by_row: the module takes several rows only at the beginning of a text.

    Raises:
        InvalidModel: the module takes its states in no way that is known here.
    """

    def __init__(
        self, inner: nn.Module, layer: int, current: RecurrentPass, *, by_row: bool
    ) -> None:
        super().__init__()
        self.inner = inner
        self.by_row = by_row
        self.layer = layer
        self.current = current
        takes = inspect.signature(inner.forward).parameters
        self.cache_name = next((name for name in CACHE_NAMES if name in takes), "")
        if not self.cache_name:
            raise InvalidModel(
                f"{type(inner).__name__} of transformers {transformers.__version__} takes its "
                f"states by none of the names {', '.join(CACHE_NAMES)}: use another version"
            )

    def forward(
        self, hidden_states: Float[Tensor, "1 rows width"], **_: Any
    ) -> Float[Tensor, "1 rows width"]:
        """Run every row from the state of the row before it, and keep the states after them."""
        store, layer = self.current.store, self.layer
        outputs = torch.empty_like(hidden_states)
        for batch in self.current.batches:
            before = [store.state_before(row.slot, row.start, layer) for row in batch]
            states = StackedStates(before)
            places = [slice(row.first, row.first + row.num_rows) for row in batch]
            given = torch.cat([hidden_states[:, place] for place in places])
            # A module that cannot continue a text by several rows takes them one by one.
            by_row = self.by_row and before[0]
            parts = [*torch.split(given, 1, dim=1)] if by_row else [given]
            given_states: dict[str, Any] = {self.cache_name: states, "attention_mask": None}
            out = torch.cat([self.inner(part, **given_states) for part in parts], dim=1)
            for index, (row, place) in enumerate(zip(batch, places, strict=True)):
                outputs[:, place] = out[index]
                state = states.of(index)
                if not state:
                    raise InvalidModel(
                        f"{type(self.inner).__name__} of transformers {transformers.__version__} "
                        "kept no state after a row: its text would be wrong"
                    )
                store.put_state(
                    row.slot, row.end, layer, _copy_views(state) if row.num_rows > 1 else state
                )
        return outputs


class StackedStates:
    """States of one layer for a batch of sequences, in the place of transformers' cache.

    An empty state stands for the beginning of a text.
    """

    def __init__(self, states: Sequence[LayerState]) -> None:
        self._tensors: dict[tuple[str, int], Tensor] = {}
        for key, like in max(states, key=len).items():
            parts = [state.get(key, torch.zeros_like(like)) for state in states]
            self._tensors[key] = torch.cat(parts)  # a copy: modules write into what they are given

    def of(self, index: int) -> LayerState:
        return {key: tensor[index : index + 1] for key, tensor in self._tensors.items()}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the last inputs of the convolution; None at the beginning of all texts."""
        return self._tensors.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the recurrent state; None at the beginning of all texts."""
        return self._tensors.get(("recurrent", state_idx))

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        return ("conv", state_idx) in self._tensors

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return False: states are kept row by row instead."""
        return False

    def update_conv_state(
        self,
        conv_states: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: object,
    ) -> Tensor:
        """Append inputs of the convolution, and return them after those it saw before."""
        key = ("conv", state_idx)
        before = self._tensors.get(key)
        if before is None:
            width = conv_kernel_size or conv_states.shape[-1]
            before = conv_states.new_zeros((*conv_states.shape[:-1], width))
        seen = torch.cat([before, conv_states], dim=-1)
        self._tensors[key] = seen[..., -before.shape[-1] :]
        return seen

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: object
    ) -> Tensor:
        self._tensors["recurrent", state_idx] = recurrent_states
        return recurrent_states


def pack_recurrent_layers(
    network: nn.Module, architecture: Architecture, store: RecurrentStore
) -> RecurrentPass:
    """Put `PackedRecurrence` in the place of every recurrent module.

    Every pass is announced to the object that is returned.
    """
    current = RecurrentPass(store)
    states = find_family(architecture.name).states
    by_row = states is not None and states.is_scanned_from_zero
    for parent in [*network.modules()]:
        if isinstance(parent, PackedRecurrence):
            parent.current = current
            continue
        for name, child in [*parent.named_children()]:
            if type(child).__name__ == architecture.recurrent:
                untyped: Any = child
                packed = PackedRecurrence(child, untyped.layer_idx, current, by_row=by_row)
                setattr(parent, name, packed)
    return current
