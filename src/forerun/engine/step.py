"""One engine step: plan, draft, one target pass, verify, commit.

A step is a function of (sequences, plans, noise); its clock readings only fill the trace.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from forerun.control.base import Chain, Controller, Plan, RequestState, Tree
from forerun.control.unasked import Unasked
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.scheduled import PLAIN, ScheduledSequence
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.timing import StepClock
from forerun.engine.verification import token_logprobs, verify
from forerun.models.base import LanguageModel, RowBatch
from forerun.models.context import pack
from forerun.theory.record import StepRecord

__all__ = ["Stepper"]


class Stepper:
    """The parts a step is made of; state lives in the scheduler's sequences."""

    def __init__(
        self,
        *,
        target: LanguageModel,
        drafter: GuardedDrafter | None,
        controller: Controller,
        scheduler: Scheduler,
        config: EngineConfig,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.controller = controller
        self.scheduler = scheduler
        self.unasked = Unasked(config.max_step_rows)
        self.max_nodes = config.num_speculative_tokens
        self.cycle_id = 0

    def run(self) -> list[StepRecord]:
        """Advance every running sequence once; returns one record per sequence that emitted."""
        clock = StepClock(self.target.device)
        entries = [schedule(sequence) for sequence in self.scheduler.running]
        drafter = self.drafter
        if drafter is not None and self.unasked.goes_on(self.scheduler.running):
            drafter = None  # nor is the controller asked
        if drafter is not None:
            asked = [entry for entry in entries if entry.decodes and entry.sequence.may_draft]
            if asked:
                self._plan(asked, clock.started_s)
        clock.mark()
        if drafter is not None:
            drafter.propose([entry for entry in entries if entry.plan.num_speculative_tokens])
        clock.mark()
        self.scheduler.assign_rows(entries)
        fed = [entry for entry in entries if entry.num_chain]
        emitting = [entry for entry in fed if entry.completes]
        self._decide(fed, emitting, clock)
        for entry in fed:
            if entry.completes:
                apply_verdict(entry)
            else:
                entry.commit()
        if self.drafter is not None:
            self.drafter.observe([entry for entry in fed if entry.sequence.stop is None])
        records = self._records(emitting, fed, clock) if emitting else []
        if self.drafter is not None and self.unasked.tells:
            self.controller.observe(records)
        self.cycle_id += 1
        return records

    def _plan(self, entries: Seq[ScheduledSequence], now_s: float) -> None:
        """Plans of sequences that decode; those still prefilling do not draft."""
        states = [state_of(entry.sequence, now_s) for entry in entries]
        plans = self.controller.decide(states, self.unasked.capacity)
        self.unasked.follow(self.scheduler.running, plans)
        for entry, plan in zip(entries, plans, strict=True):
            entry.plan = bounded(plan, self.max_nodes, entry.sequence.max_new - 1)

    @torch.inference_mode()
    def _decide(
        self, fed: Seq[ScheduledSequence], emitting: Seq[ScheduledSequence], clock: StepClock
    ) -> None:
        """One target pass, and the verdicts of those it yields tokens for."""
        clock.mark()
        batch = self._batch(fed)
        logits = self.target.forward(batch).logits
        clock.mark()
        tokens = batch.tokens
        if len(logits) < len(tokens):  # else all rows are wanted, in order
            tokens = tokens.index_select(0, batch.logit_rows)
        row = 0
        for entry, verdict in zip(emitting, verify(emitting, logits, tokens), strict=True):
            entry.verdict = verdict
            if entry.sequence.params.logprobs is not None:
                entry.logits = logits[row : row + entry.num_logit_rows]
            row += entry.num_logit_rows

    def _batch(self, fed: Seq[ScheduledSequence]) -> RowBatch:
        """Rows of all entries: pending tokens, then draft nodes; logits where tokens come out."""
        device = self.target.device
        wanted: list[int] = []
        row = 0
        for entry in fed:
            row += entry.num_chain
            if entry.completes:
                wanted += range(row - 1, row + entry.num_drafted)
                row += entry.num_drafted
        return pack([entry.span() for entry in fed], tokens_of(fed, device), wanted, device)

    def _records(
        self, emitting: Seq[ScheduledSequence], fed: Seq[ScheduledSequence], clock: StepClock
    ) -> list[StepRecord]:
        """One trace record per sequence that emitted; durations belong to the whole cycle."""
        num_prefill = sum(entry.num_chain for entry in fed if entry.prefills)
        batch_rows = sum(entry.num_chain + entry.num_drafted for entry in fed)
        draft_s, verify_s, other_s = clock.durations()
        return [
            StepRecord(
                cycle_id=self.cycle_id,
                t_s=clock.started_s,
                request_id=entry.sequence.key,
                step=entry.sequence.acceptance.num_steps,
                method=entry.plan.method,
                k_budget=entry.plan.num_speculative_tokens,
                num_drafted=entry.num_drafted,
                depth_drafted=entry.depth,
                num_accepted=verdict.num_accepted,
                num_emitted=entry.num_emitted,
                draft_s=draft_s,
                verify_s=verify_s,
                other_s=other_s,
                batch_rows=batch_rows,
                num_prefill_rows=num_prefill,
                context_tokens=len(entry.sequence.ids) - entry.num_emitted,
                last_token_source=verdict.sources[entry.num_emitted - 1],
                expected_accepted=verdict.expected_accepted,
                stop_reason=entry.proposal.stop_reason if entry.proposal else None,
                stop_values=entry.proposal.stop_values if entry.proposal else None,
            )
            for entry in emitting
            if (verdict := entry.verdict) is not None
        ]


def schedule(sequence: Sequence) -> ScheduledSequence:
    """The entry of a sequence that has joined the batch."""
    assert sequence.context is not None
    num_committed = sequence.context.num_cached
    return ScheduledSequence(
        sequence=sequence,
        num_committed=num_committed,
        num_pending=len(sequence.ids) - num_committed,
    )


def bounded(plan: Plan, max_nodes: int, max_depth: int) -> Plan:
    """The plan, cut to the rows that a pass has for one sequence and to its room for tokens.

    The pass itself yields one token more than are accepted.
    """
    shape = plan.shape
    if 0 < shape.num_nodes <= max_nodes and shape.depth <= max_depth:
        return plan
    num_nodes, depth = min(shape.num_nodes, max_nodes), min(shape.depth, max_depth)
    if num_nodes <= 0 or depth <= 0:
        return PLAIN
    if isinstance(shape, Tree):
        return replace(plan, shape=replace(shape, num_nodes=num_nodes, depth=depth))
    return replace(plan, shape=Chain(num_tokens=min(num_nodes, depth)))


def state_of(sequence: Sequence, now_s: float) -> RequestState:
    """What the controller may know of a sequence."""
    ends_at_s = sequence.ends_at_s
    return RequestState(
        request_id=sequence.key,
        num_committed=len(sequence.ids),
        max_new=sequence.max_new,
        temperature=sequence.params.temperature,
        tags=sequence.tags,
        tpot_target_s=sequence.tpot_target_s,
        time_left_s=None if ends_at_s == math.inf else ends_at_s - now_s,
    )


def tokens_of(entries: Seq[ScheduledSequence], device: torch.device) -> list[int] | Tensor:
    """Tokens of a pass: the draft nodes of every entry behind its pending tokens.

    Nodes that are on a device are not waited for.
    """
    proposals = [entry.proposal for entry in entries]
    if all(p is None or p.tokens.is_cpu for p in proposals):
        ids: list[int] = []
        for entry, proposal in zip(entries, proposals, strict=True):
            ids += entry.pending()
            if proposal is not None:
                ids += proposal.tokens.tolist()
        return ids
    pieces: list[Tensor] = []
    for entry, proposal in zip(entries, proposals, strict=True):
        pending = torch.tensor(entry.pending(), dtype=torch.int64)
        pieces.append(pending.to(device, non_blocking=True))
        if proposal is not None:
            pieces.append(proposal.tokens.to(device))
    return torch.cat(pieces)


def apply_verdict(entry: ScheduledSequence) -> None:
    """Append the tokens of a verdict to the sequence and commit the accepted rows to the KV."""
    sequence, verdict = entry.sequence, entry.verdict
    assert verdict is not None
    entry.num_emitted = sequence.append(verdict.tokens, verdict.sources)
    if entry.logits is not None:
        sequence.logprobs += token_logprobs(entry)
    sequence.acceptance.add(entry.depth, verdict.num_accepted, num_drafted=entry.num_drafted)
    if sequence.first_token_at_s is None or sequence.stop is not None:
        now_s = time.monotonic()
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
        if sequence.stop is not None:
            sequence.finished_at_s = now_s
    if sequence.stop is None:
        entry.commit()
    else:  # what was fed may yet serve other sequences
        assert sequence.context is not None
        sequence.context.commit(range(entry.num_chain))
