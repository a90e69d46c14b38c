"""Several cycles in one call of the kernels: draft a chain, run the target over it, verify, go on.

What the cycles stage is committed by the caller, who may also discard it: the same noise draws the
same tokens again.
"""

from __future__ import annotations

import ctypes
import struct
from array import array
from ctypes import addressof, byref

import torch

from forerun.models.architecture import Architecture
from forerun.models.base import CycleBatch, CycleMember, ModelCycle, StoredModel
from forerun.models.kv_store import BlockedKVStore
from forerun.models.runner.packed import PackedWeights
from forerun.native.library import CyclesStruct, StoreStruct

MAX_CALL_S = 0.02
"""Most seconds of a call of several cycles: interrupts, deadlines and new requests wait for it."""
MEMBER = struct.Struct("12q2d3f4x")
"""`ForerunMember` in kernels/interface.h."""
OUTCOME = struct.Struct("qqd")
"""`ForerunOutcome`."""
RULES = {"greedy": 0, "walk": 1, "block": 2, "token": 3}
"""`ForerunRule`."""


class KernelModel(StoredModel):
    """A model whose weights and store the kernels read, so that they can run cycles of it.

    Attributes:
        store_struct: the store as the kernels see it.
    """

    store: BlockedKVStore
    in_kernels = True

    def __init__(
        self, weights: PackedWeights, store: BlockedKVStore, architecture: Architecture
    ) -> None:
        super().__init__(architecture, store)
        self.weights = weights
        self.store_struct = describe_store(store)
        self._calls: CycleCalls | None = None

    @property
    def projection(self) -> PackedWeights | None:
        """The matrix from the target's features to the input states of a head; else None."""
        return None

    def run_cycles(self, batch: CycleBatch, most: int) -> list[ModelCycle]:
        if self._calls is None:
            self._calls = CycleCalls(self)
        return self._calls.run(batch, most)


def describe_store(store: BlockedKVStore) -> StoreStruct:
    """Return a store as the kernels see it."""
    _, num_slots, _, width, _ = store.data.shape
    return StoreStruct(store.data.data_ptr(), num_slots, width)


class Chains:
    """Drafted chains of one length, as proposals keep them and as the kernels write them.

    A tensor per chain is made for many cycles at once: made singly it takes longer than the rest
    of a cycle's bookkeeping.
    """

    num_cycles = 64

    def __init__(self, num_members: int, depth: int) -> None:
        self.num_members, self.depth = num_members, depth
        together = torch.empty((self.num_cycles * num_members, depth), dtype=torch.int64)
        self.tensors = together.unbind()
        self.address = together.data_ptr()
        self.bytes = memoryview((ctypes.c_char * (8 * together.numel())).from_address(self.address))
        self.format = struct.Struct(f"{depth}q")
        self.num_used = 0


class CycleCalls:
    """Calls of the kernels for one target, with their buffers, which grow to the largest call."""

    def __init__(self, target: KernelModel) -> None:
        self.target = target
        self._struct = CyclesStruct()
        self._struct.target = target.weights.handle
        self._struct.store = addressof(target.store_struct)
        self._struct.num_layers = target.num_layers
        self._struct.vocab_size = target.vocab_size
        self._struct.budget_s = MAX_CALL_S
        self._logits = torch.empty(0)
        self._draft_probs = torch.empty(0)
        self._layers = array("i")
        self._chains = Chains(0, 0)
        self._matches = array("d")
        self._times = array("d")
        self._outcomes = bytearray()

    def run(self, batch: CycleBatch, most: int) -> list[ModelCycle]:
        """Run up to `most` cycles, as `LanguageModel.run_cycles` says."""
        members, asked = batch.members, self._struct
        depth = max([member.num_drafted for member in members])
        # These stay referenced here for as long as the kernels read them.
        ends = [array("q", member.ends) for member in members]
        packed, unread = bytearray(), array("q")
        for member, its_ends in zip(members, ends, strict=True):
            packed += _pack_member(member, its_ends)
            unread.extend(member.unread)
        asked.members = addressof(ctypes.c_char.from_buffer(packed))
        asked.unread = unread.buffer_info()[0]
        asked.num_members, asked.max_cycles, asked.depth = len(members), most, depth
        asked.by_race = batch.by_race
        num_rows = len(members) + sum([member.num_drafted for member in members])
        first = self._fit_buffers(num_rows, len(members), depth, most)
        self._put_features()
        asked.draft = asked.draft_store = None
        if batch.draft is not None:
            assert isinstance(batch.draft, KernelModel)
            self._put_draft(batch.draft, len(members) * depth if batch.is_drawn else 0)
        num_cycles = self.target.weights.kernels.library.forerun_cycles(byref(asked))
        self._chains.num_used += num_cycles
        return self._read_cycles(num_cycles, len(members), depth, first)

    def _fit_buffers(self, num_rows: int, num_members: int, depth: int, most: int) -> int:
        """Make room for a call; returns the place of its first chain."""
        asked, size = self._struct, num_rows * self.target.vocab_size
        if self._logits.numel() < size:
            self._logits = torch.empty(size)
            asked.logits = self._logits.data_ptr()
        if len(self._times) < 4 * most:
            self._times = array("d", bytes(8 * 4 * most))
            asked.times = self._times.buffer_info()[0]
        if len(self._outcomes) < (size := OUTCOME.size * most * num_members):
            self._outcomes = bytearray(size)
            asked.outcomes = addressof(ctypes.c_char.from_buffer(self._outcomes))
        if len(self._matches) < (size := most * num_members * depth):
            self._matches = array("d", bytes(8 * size))
            asked.matches = self._matches.buffer_info()[0]
        if not depth:
            return 0
        chains = self._chains
        is_full = chains.num_used + most > chains.num_cycles
        if is_full or (chains.num_members, chains.depth) != (num_members, depth):
            chains = self._chains = Chains(num_members, depth)
        first = chains.num_used * num_members
        asked.drafted = chains.address + 8 * depth * first
        return first

    def _put_draft(self, model: KernelModel, num_drawn: int) -> None:
        """Let the kernels draft with a model, and draw so many tokens of a cycle."""
        asked = self._struct
        asked.draft, asked.draft_store = model.weights.handle, addressof(model.store_struct)
        asked.num_draft_layers, asked.draft_context = model.num_layers, model.max_context
        asked.draft_probs = None
        if num_drawn:
            if self._draft_probs.numel() < (size := num_drawn * self.target.vocab_size):
                self._draft_probs = torch.empty(size)
            asked.draft_probs = self._draft_probs.data_ptr()
        if (projection := model.projection) is not None:
            asked.features.projection = projection.handle
            asked.features.state_size = model.hidden_size

    def _put_features(self) -> None:
        """Let the kernels write the features that the target's store keeps."""
        asked, store = self._struct.features, self.target.store
        asked.rows = asked.projection = None
        if (rows := store.feature_rows) is not None:
            self._layers = array("i", store.feature_layers)
            asked.rows, asked.num_rows = rows.data_ptr(), rows.shape[1]
            asked.row_bytes = rows.stride(1) * rows.itemsize
            asked.layers, asked.num_layers = self._layers.buffer_info()

    def _read_cycles(
        self, num_cycles: int, num_members: int, depth: int, first: int
    ) -> list[ModelCycle]:
        num_read, chains = num_cycles * num_members, self._chains
        outcomes = [*OUTCOME.iter_unpack(memoryview(self._outcomes)[: OUTCOME.size * num_read])]
        ids: list[tuple[int, ...]] = []
        if depth:
            size = chains.format.size
            drafted = chains.bytes[size * first : size * (first + num_read)]
            ids = [*chains.format.iter_unpack(drafted)]
        cycles = []
        for at in range(num_cycles):
            started_s, draft_s, verify_s, other_s = self._times[4 * at : 4 * at + 4]
            begin, end = at * num_members, (at + 1) * num_members
            cycle = ModelCycle(
                started_s=started_s - self._times[0],
                draft_s=draft_s,
                verify_s=verify_s,
                other_s=other_s,
                outcomes=outcomes[begin:end],
                chains=chains.tensors[first + begin : first + end] if depth else (),
                ids=ids[begin:end],
                matches=self._matches[begin * depth : end * depth],
            )
            cycles.append(cycle)
        return cycles


def _pack_member(member: CycleMember, ends: array[int]) -> bytes:
    return MEMBER.pack(
        member.noise_key,
        member.num_committed,
        member.num_left,
        member.slot,
        member.draft_slot,
        member.num_draft_rows,
        len(member.unread),
        member.num_drafted,
        RULES[member.rule],
        member.is_coupled,
        ends.buffer_info()[0],
        len(ends),
        member.temperature,
        member.draft_temperature,
        *member.truncation,
    )
