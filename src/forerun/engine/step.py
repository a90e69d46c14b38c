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

from forerun.control.base import Controller, Plan, RequestState
from forerun.control.unasked import Unasked
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.scheduler import Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.timing import StepClock
from forerun.engine.turn import PLAIN, Turn
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
        self.most_emitted = config.num_speculative_tokens + 1
        self.cycle_id = 0

    def run(self) -> list[StepRecord]:
        """Advance every running sequence once; returns one record per sequence that emitted."""
        clock = StepClock(self.target.device)
        turns = [turn_of(sequence) for sequence in self.scheduler.running]
        drafter = self.drafter
        if drafter is not None and self.unasked.goes_on(self.scheduler.running):
            drafter = None  # nor is the controller asked
        if drafter is not None:
            asked = [turn for turn in turns if turn.decodes and turn.sequence.may_draft]
            if asked:
                self._plan(asked, clock.started_s)
        clock.mark()
        if drafter is not None:
            drafter.propose([turn for turn in turns if turn.plan.num_speculative_tokens])
        clock.mark()
        self.scheduler.share(turns)
        fed = [turn for turn in turns if turn.num_chain]
        emitting = [turn for turn in fed if turn.completes]
        self._decide(fed, emitting, clock)
        for turn in fed:
            if turn.completes:
                take(turn)
            else:
                turn.commit()
        if drafter is not None:
            tell(drafter, emitting)
        records = self._records(emitting, fed, clock) if emitting else []
        if self.drafter is not None and self.unasked.tells:
            self.controller.observe(records)
        self.cycle_id += 1
        return records

    def _plan(self, turns: Seq[Turn], now_s: float) -> None:
        """Plans of sequences that decode; those still prefilling do not draft."""
        states = [state_of(turn.sequence, now_s) for turn in turns]
        plans = self.controller.decide(states, self.unasked.capacity)
        self.unasked.follow(self.scheduler.running, plans)
        for turn, plan in zip(turns, plans, strict=True):
            turn.plan = bounded(plan, min(turn.sequence.max_new, self.most_emitted))

    @torch.inference_mode()
    def _decide(self, fed: Seq[Turn], emitting: Seq[Turn], clock: StepClock) -> None:
        """One target pass, and the verdicts of those it yields tokens for."""
        clock.mark()
        batch = self._batch(fed)
        logits = self.target.forward(batch).logits
        clock.mark()
        tokens = batch.tokens
        if len(logits) < len(tokens):  # else all rows are wanted, in order
            tokens = tokens.index_select(0, batch.logit_rows)
        row = 0
        for turn, verdict in zip(emitting, verify(emitting, logits, tokens), strict=True):
            turn.verdict = verdict
            if turn.sequence.params.logprobs is not None:
                turn.logits = logits[row : row + turn.num_rows]
            row += turn.num_rows

    def _batch(self, fed: Seq[Turn]) -> RowBatch:
        """The rows of all turns: pending tokens, then draft nodes; logits where tokens come out."""
        device = self.target.device
        wanted: list[int] = []
        row = 0
        for turn in fed:
            row += turn.num_chain
            if turn.completes:
                wanted += range(row - 1, row + turn.num_drafted)
                row += turn.num_drafted
        return pack([turn.span() for turn in fed], tokens_of(fed, device), wanted, device)

    def _records(self, emitting: Seq[Turn], fed: Seq[Turn], clock: StepClock) -> list[StepRecord]:
        """One trace record per sequence that emitted; durations belong to the whole cycle."""
        num_prefill = sum(turn.num_chain for turn in fed if turn.prefills)
        batch_rows = sum(turn.num_chain + turn.num_drafted for turn in fed)
        draft_s, verify_s, other_s = clock.durations()
        return [
            StepRecord(
                cycle_id=self.cycle_id,
                t_s=clock.started_s,
                request_id=turn.sequence.key,
                step=turn.sequence.acceptance.num_steps,
                method=turn.plan.method,
                k_budget=turn.plan.num_speculative_tokens,
                num_drafted=turn.num_drafted,
                depth_drafted=turn.depth,
                num_accepted=verdict.num_accepted,
                num_emitted=turn.num_emitted,
                draft_s=draft_s,
                verify_s=verify_s,
                other_s=other_s,
                batch_rows=batch_rows,
                num_prefill_rows=num_prefill,
                context_tokens=len(turn.sequence.ids) - turn.num_emitted,
                last_token_source=verdict.sources[turn.num_emitted - 1],
                expected_accepted=verdict.expected_accepted,
                stop_reason=turn.proposal.stop_reason if turn.proposal else None,
                stop_values=turn.proposal.stop_values if turn.proposal else None,
                hindsight=turn.proposal.hindsight if turn.proposal else None,
            )
            for turn in emitting
            if (verdict := turn.verdict) is not None
        ]


def turn_of(sequence: Sequence) -> Turn:
    """The turn of a sequence that has joined the batch."""
    assert sequence.context is not None
    return Turn(sequence=sequence, num_pending=sequence.context.num_pending)


def bounded(plan: Plan, max_new: int) -> Plan:
    """No plan may emit more than `max_new` tokens: there is no room in the context, or in a pass.

    The pass itself yields one more token than is accepted.
    """
    if plan.num_speculative_tokens < max_new:
        return plan if plan.num_speculative_tokens > 0 else PLAIN
    return replace(plan, num_speculative_tokens=max_new - 1) if max_new > 1 else PLAIN


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


def tokens_of(turns: Seq[Turn], device: torch.device) -> list[int] | Tensor:
    """Tokens of a pass: the draft nodes of every turn behind its pending tokens.

    Nodes that are on a device are not waited for.
    """
    proposals = [turn.proposal for turn in turns]
    if all(p is None or p.tokens.is_cpu for p in proposals):
        ids: list[int] = []
        for turn, proposal in zip(turns, proposals, strict=True):
            ids += turn.pending()
            if proposal is not None:
                ids += proposal.tokens.tolist()
        return ids
    pieces: list[Tensor] = []
    for turn, proposal in zip(turns, proposals, strict=True):
        pending = torch.tensor(turn.pending(), dtype=torch.int64)
        pieces.append(pending.to(device, non_blocking=True))
        if proposal is not None:
            pieces.append(proposal.tokens.to(device))
    return torch.cat(pieces)


def tell(drafter: GuardedDrafter, turns: Seq[Turn]) -> None:
    """What became of the proposals of those who go on."""
    drafted = [t for t in turns if t.proposal is not None and t.sequence.stop is None]
    if drafted:
        drafter.observe(drafted)


def take(turn: Turn) -> None:
    """Tokens of a verdict into the sequence, accepted rows into the target's KV."""
    sequence, verdict = turn.sequence, turn.verdict
    assert verdict is not None
    turn.num_emitted = sequence.append(verdict.tokens, verdict.sources)
    if turn.logits is not None:
        sequence.logprobs += token_logprobs(turn)
    sequence.acceptance.add(turn.depth, verdict.num_accepted, num_drafted=turn.num_drafted)
    if sequence.first_token_at_s is None or sequence.stop is not None:
        now_s = time.monotonic()
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
        if sequence.stop is not None:
            sequence.finished_at_s = now_s
    if sequence.stop is None:
        turn.commit()
    else:  # what was fed may yet serve other sequences
        assert sequence.context is not None
        sequence.context.commit(range(turn.num_chain))
