"""Cycles computed ahead: one call of the kernels runs several, and the steps take them one by one.

Everything around a step stays as it is: plans, records, observers, streams, stops. Cycles that do
not fit the step that would take them (another batch, another plan) are dropped: what they staged
was never committed, and the same noise draws the same tokens again.
"""

from __future__ import annotations

import ctypes
import struct
import time
from array import array
from collections.abc import Sequence as Seq
from ctypes import addressof, byref
from dataclasses import dataclass

import torch

from forerun.control.base import Chain
from forerun.drafters.draft_model import PREFILL_CHUNK, DraftModel
from forerun.drafters.draft_sequence import DraftSequence
from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.drafters.registry import IN_KERNELS, SeveralDrafters
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.engine.verification import verdict_of
from forerun.models.base import Context, LanguageModel
from forerun.models.runner.native import NativeModel
from forerun.native.library import CyclesStruct
from forerun.sampling.config import Choice, SamplingParams, resolve_verification
from forerun.sampling.walk import expected_accepted

MAX_CALL_S = 0.02
"""Most seconds of a call of several cycles: interrupts, deadlines and new requests wait for it."""
MEMBER = struct.Struct("12q2d3f4x")
"""`ForerunMember` in kernels/interface.h."""
OUTCOME = struct.Struct("qqd")
"""`ForerunOutcome`."""
GREEDY, WALK = 0, 1
RULES = {"walk": WALK, "coupled": WALK, "block": 2, "token": 3}
"""`ForerunRule` by the method of verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadTimes:
    """Seconds of a cycle that was computed ahead.

    Attributes:
        started_s: when it began, by `time.monotonic`.
        other_s: of the cycle beyond drafting and the target pass.
        call_s: of the whole call if this step made it, else 0.
    """

    started_s: float
    draft_s: float
    verify_s: float
    other_s: float
    call_s: float


class _Chains:
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
        self._ids = (ctypes.c_char * (8 * together.numel())).from_address(self.address)
        self._format = struct.Struct(f"{depth}q")
        self.num_used = 0

    def ids(self, place: int) -> tuple[int, ...]:
        return self._format.unpack_from(self._ids, self._format.size * place)


@dataclass(slots=True, kw_only=True, eq=False)
class _Member:
    """A sequence in the calls: what of it stays the same from call to call.

    Attributes:
        ends: tokens that may end it.
        plain_rule: how it is verified where nothing is drafted.
        depth: K of the cycles computed last.
        num_committed: tokens that it has when the next of them is taken.
    """

    sequence: Sequence
    context: Context
    ends: array[int]
    plain_rule: int
    draft: DraftSequence | None = None
    depth: int = 0
    rule: int = GREEDY
    is_coupled: bool = False
    num_committed: int = 0


class CycleRunner:
    """Computes cycles ahead for batches that need nothing from Python between two steps.

    These are decoded plainly or with chains of a draft model or an EAGLE-3 head; the sampling
    parameters are a temperature, min_p, top_k and top_p, and no log-probabilities are asked for.
    """

    def __init__(
        self, target: NativeModel, drafter: GuardedDrafter | None, max_cycles: int
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.max_cycles = max_cycles
        self._members: list[_Member] = []
        self._batch: list[Sequence] = []
        self._num_left = 0
        self._struct = CyclesStruct()
        self._struct.target = target.weights.handle
        self._struct.store = addressof(target.store_struct)
        self._struct.num_layers = target.num_layers
        self._struct.vocab_size = target.vocab_size
        self._struct.budget_s = MAX_CALL_S
        self._logits = torch.empty(0)
        self._draft_probs = torch.empty(0)
        self._layers = array("i")
        self._chains = _Chains(0, 0)
        self._first_chain = 0
        self._matches = array("d")
        self._times = array("d", bytes(8 * 4 * max_cycles))
        self._struct.times = self._times.buffer_info()[0]
        self._outcomes = bytearray()
        self._taken = 0
        self._call_s = self._called_s = 0.0

    @classmethod
    def over(
        cls, target: LanguageModel, drafter: GuardedDrafter | None, config: EngineConfig
    ) -> CycleRunner | None:
        """Return a runner; None where steps are to be taken one by one."""
        learns = drafter is not None and drafter.required_top_k
        if config.cycles_per_call == 1 or type(target) is not NativeModel or learns:
            return None
        return cls(target, drafter, config.cycles_per_call)

    def is_ahead_of(self, running: Seq[Sequence]) -> bool:
        """Whether cycles are left for this batch."""
        return self._num_left > 0 and self._batch == running

    def take(self, scheduled: Seq[ScheduledSequence], num_same: int) -> AheadTimes | None:
        """Give the sequences of a step their proposals and verdicts; None if it must be run.

        Args:
            scheduled: with their plans.
            num_same: steps for which these plans are expected to stay, this one included.
        """
        call_s = 0.0
        if not self._fit(scheduled):
            # Requests join the batch when no cycles are left. If cycles had to be discarded, only
            # one is computed, so that requests that wait can join at the next step.
            most = 1 if self._num_left else max(1, min(num_same, self.max_cycles))
            self._num_left = 0
            if not self._compute(scheduled, most):
                return None
            call_s = self._call_s
        at, count = self._taken, len(scheduled)
        self._taken += 1
        self._num_left -= 1
        for place, entry in enumerate(scheduled, at * count):
            self._give(entry, self._members[place - at * count], place)
        first, *_ = times = self._times[4 * at : 4 * at + 4]
        return AheadTimes(
            started_s=self._called_s + first - self._times[0],
            draft_s=times[1],
            verify_s=times[2],
            other_s=times[3],
            call_s=call_s,
        )

    def _fit(self, scheduled: Seq[ScheduledSequence]) -> bool:
        """Whether the next cycle was computed for just this step."""
        if self._num_left == 0 or len(scheduled) != len(self._members):
            return False
        for entry, member in zip(scheduled, self._members, strict=True):
            if (
                entry.sequence is not member.sequence
                or entry.context is not member.context
                or entry.num_pending != 1
                or entry.num_cached + 1 != member.num_committed
                or entry.plan.num_speculative_tokens != member.depth
                or (member.depth and not self._drafts_as_planned(entry, member))
            ):
                return False
        return True

    def _drafts_as_planned(self, entry: ScheduledSequence, member: _Member) -> bool:
        if not isinstance(entry.plan.shape, Chain):
            return False
        return not entry.sequence.draft.failed and member.draft is self._draft_of(entry)

    def _draft_of(self, entry: ScheduledSequence) -> DraftSequence | None:
        drafter = self._drafter_of(entry)
        return None if drafter is None else drafter.state_of(entry.sequence.key)

    def _drafter_of(self, entry: ScheduledSequence) -> DraftModel | None:
        drafter = None if self.drafter is None else self.drafter.drafter
        if isinstance(drafter, SeveralDrafters):
            drafter = drafter.model_of(entry.sequence.key, entry.plan.method)
        if not isinstance(drafter, DraftModel) or type(drafter) not in IN_KERNELS:
            return None
        # Of several drafters, others may read features of further layers.
        kept = self.target.store.feature_layers
        return drafter if drafter.required_features in ((), kept) else None

    def _compute(self, scheduled: Seq[ScheduledSequence], most: int) -> bool:
        """Run up to `most` cycles; whether there is one."""
        members = self._members_of(scheduled)
        if members is None:
            return False
        packed, unread = bytearray(), array("q")
        choices: set[Choice] = set()
        drafters: set[DraftModel] = set()
        num_rows = depth = 0
        for entry, member in zip(scheduled, members, strict=True):
            if not self._prepare(entry, member):
                return False
            packed += self._packed(entry, member, unread)
            num_rows += 1 + member.depth
            if member.depth:
                assert member.draft is not None
                depth = max(depth, member.depth)
                choices.add(member.draft.choice)
                if (drafter := self._drafter_of(entry)) is not None:
                    drafters.add(drafter)
        if {Choice.SAMPLED, Choice.COUPLED} <= choices or len(drafters) > 1:
            return False
        asked = self._struct
        asked.members = addressof(ctypes.c_char.from_buffer(packed))
        asked.unread = unread.buffer_info()[0]
        asked.num_members, asked.max_cycles, asked.depth = len(members), most, depth
        asked.by_race = Choice.COUPLED in choices
        self._fit_buffers(num_rows, len(members), depth, most)
        self._put_features()
        for drafter in drafters:
            self._put_draft(drafter.model, depth, len(members), choices)
            if isinstance(drafter, Eagle3Drafter) and drafter.projection is not None:
                asked.features.projection = drafter.projection.handle
                asked.features.state_size = drafter.model.hidden_size
        self._called_s = time.monotonic()
        self._num_left = self.target.weights.kernels.library.forerun_cycles(byref(asked))
        self._call_s = time.monotonic() - self._called_s
        self._taken = 0
        self._chains.num_used += self._num_left
        return self._num_left > 0

    def _members_of(self, scheduled: Seq[ScheduledSequence]) -> list[_Member] | None:
        """Return the members of a batch; None if one of them needs steps of Python."""
        if len(scheduled) == len(self._members) and all(
            entry.context is member.context
            for entry, member in zip(scheduled, self._members, strict=True)
        ):
            return self._members
        members = [_member_of(entry) for entry in scheduled]
        self._members = [member for member in members if member is not None]
        self._batch = [member.sequence for member in self._members]
        return self._members if len(self._members) == len(members) else None

    def _prepare(self, entry: ScheduledSequence, member: _Member) -> bool:
        """Set what a member drafts; whether the kernels can do it."""
        member.depth = entry.plan.num_speculative_tokens
        member.num_committed = entry.num_cached + 1
        if entry.num_pending != 1:
            return False
        if member.depth == 0:
            member.rule, member.is_coupled = member.plain_rule, False
            return True
        draft = member.draft = self._draft_of(entry)
        if draft is None or not self._drafts_as_planned(entry, member):
            return False
        member.rule = _rule_of(entry.sequence.params, draft.choice)
        member.is_coupled = draft.choice is Choice.COUPLED
        return draft.context.num_pending <= PREFILL_CHUNK

    def _packed(self, entry: ScheduledSequence, member: _Member, unread: array[int]) -> bytes:
        sequence, draft = member.sequence, member.draft
        if member.depth and draft is not None:
            pending, slot = draft.context.pending(), draft.context.slot
            num_read, heat = draft.context.num_cached, draft.params.temperature
        else:
            pending, slot, num_read, heat = sequence.ids[-1:], 0, 0, 0.0
        unread.extend(pending)
        return MEMBER.pack(
            sequence.noise_key,
            member.num_committed,
            sequence.max_new,
            entry.context.slot,
            slot,
            num_read,
            len(pending),
            member.depth,
            member.rule,
            member.is_coupled,
            member.ends.buffer_info()[0],
            len(member.ends),
            sequence.params.temperature,
            heat,
            *_truncation_of(sequence.params),
        )

    def _fit_buffers(self, num_rows: int, num_members: int, depth: int, most: int) -> None:
        """Make room for a call; buffers grow to the largest call and stay."""
        asked, size = self._struct, num_rows * self.target.vocab_size
        if self._logits.numel() < size:
            self._logits = torch.empty(size)
            asked.logits = self._logits.data_ptr()
        if len(self._outcomes) < (size := OUTCOME.size * most * num_members):
            self._outcomes = bytearray(size)
            asked.outcomes = addressof(ctypes.c_char.from_buffer(self._outcomes))
        if len(self._matches) < (size := most * num_members * depth):
            self._matches = array("d", bytes(8 * size))
            asked.matches = self._matches.buffer_info()[0]
        if depth:
            chains = self._chains
            is_full = chains.num_used + most > chains.num_cycles
            if is_full or (chains.num_members, chains.depth) != (num_members, depth):
                chains = self._chains = _Chains(num_members, depth)
            self._first_chain = chains.num_used * num_members
            asked.drafted = chains.address + 8 * depth * self._first_chain

    def _put_draft(
        self, model: LanguageModel, depth: int, num_members: int, choices: set[Choice]
    ) -> None:
        asked = self._struct
        assert isinstance(model, NativeModel)
        asked.draft, asked.draft_store = model.weights.handle, addressof(model.store_struct)
        asked.num_draft_layers, asked.draft_context = model.num_layers, model.max_context
        asked.draft_probs = None
        if choices != {Choice.DETERMINISTIC}:
            size = depth * num_members * self.target.vocab_size
            if self._draft_probs.numel() < size:
                self._draft_probs = torch.empty(size)
            asked.draft_probs = self._draft_probs.data_ptr()

    def _put_features(self) -> None:
        """Let the kernels write the features that the target's store keeps."""
        asked, store = self._struct.features, self.target.store
        asked.rows = asked.projection = None
        if (rows := store.feature_rows) is not None:
            self._layers = array("i", store.feature_layers)
            asked.rows, asked.num_rows = rows.data_ptr(), rows.shape[1]
            asked.row_bytes = rows.stride(1) * rows.itemsize
            asked.layers, asked.num_layers = self._layers.buffer_info()

    def _give(self, entry: ScheduledSequence, member: _Member, place: int) -> None:
        """Note in the stores what the cycle staged, and set the proposal and the verdict."""
        depth = member.depth
        num_accepted, final, expected = OUTCOME.unpack_from(self._outcomes, OUTCOME.size * place)
        tokens: tuple[int, ...] = (final,)
        if depth:
            assert self.drafter is not None
            chains, at = self._chains, self._first_chain + place
            chain, levels = chains.tensors[at], chains.depth
            self.drafter.note_chain(entry, chain if depth == levels else chain[:depth], levels)
            tokens = (*chains.ids(at)[:num_accepted], final)
            if member.rule == WALK:
                first = place * levels
                expected = expected_accepted(entry.tree, self._matches[first : first + depth])
        context = entry.context
        context.store.claim(context.slot, entry.num_cached, 1 + depth, writes_features=True)
        if member.rule == GREEDY:
            expected = num_accepted
        entry.verdict = verdict_of(entry, tuple(range(num_accepted)), tokens, expected)
        member.num_committed += 1 + num_accepted


def _member_of(entry: ScheduledSequence) -> _Member | None:
    """Return a sequence as a member of the calls; None if the kernels cannot decode it."""
    sequence, params = entry.sequence, entry.sequence.params
    is_scored = params.logprobs is not None or params.prompt_logprobs is not None
    if is_scored or sequence.history is not None:
        return None
    return _Member(
        sequence=sequence,
        context=entry.context,
        ends=array("q", sequence.stops.ends),
        plain_rule=_rule_of(params, Choice.SAMPLED),
    )


def _truncation_of(params: SamplingParams) -> tuple[float, float, float]:
    return params.min_p, max(params.top_k, 0), 1 - params.top_p


def _rule_of(params: SamplingParams, choice: Choice) -> int:
    return GREEDY if params.greedy else RULES[resolve_verification(params, choice)]
