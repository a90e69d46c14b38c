"""One engine step: plan, draft, one target pass, verify, commit.

A step is a function of (sequences, plans, noise); its clock readings only fill the trace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch

from forerun.control.base import Capacity, Controller, Plan, RequestState
from forerun.drafters.base import Outcome
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter
from forerun.engine.scheduler import Scheduler, Share
from forerun.engine.sequence import Sequence, Status
from forerun.engine.verification import Scored, verify
from forerun.models.base import LanguageModel, Span
from forerun.models.context import pack
from forerun.sampling.proposal import Proposal, Verdict
from forerun.theory.record import StepRecord
from forerun.theory.tree import NO_TREE

__all__ = ["Stepper"]


@dataclass(slots=True, kw_only=True)
class Timing:
    """Seconds spent in the parts of one step."""

    started_s: float
    draft_s: float = 0.0
    verify_s: float = 0.0

    def other_s(self, now_s: float) -> float:
        """What is neither drafting nor the target pass."""
        return now_s - self.started_s - self.draft_s - self.verify_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """What one sequence got out of a step; `num_emitted` is after truncation by a stop."""

    item: Scored
    verdict: Verdict
    num_emitted: int
    num_drafted: int
    depth: int


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
        self.config = config
        self.cycle_id = 0

    def run(self) -> list[StepRecord]:
        """Advance every running sequence once; returns one record per sequence that emitted."""
        timing = Timing(started_s=time.monotonic())
        running = list(self.scheduler.running)
        plans = self._plans(running)
        proposals = self._draft(running, plans)
        timing.draft_s = time.monotonic() - timing.started_s

        num_tree_rows = [p.num_drafted if p else 0 for p in proposals]
        drafted = dict(zip((s.key for s in running), proposals, strict=True))
        shares = self.scheduler.shares(num_tree_rows)
        pass_started_s = time.monotonic()
        scored = self._score(shares, drafted)
        verdicts = verify(scored)
        timing.verify_s = time.monotonic() - pass_started_s
        for share in shares:
            if not share.completes:
                commit_chunk(share)
        emitted = [
            self._commit(item, verdict) for item, verdict in zip(scored, verdicts, strict=True)
        ]
        self._tell_drafter(emitted)
        by_key = dict(zip((s.key for s in running), plans, strict=True))
        records = self._records(emitted, by_key, shares, timing)
        self.controller.observe(records)
        self.cycle_id += 1
        return records

    def _plans(self, running: Seq[Sequence]) -> list[Plan]:
        """Plans of the sequences that decode; those still prefilling do not draft."""
        plans = [Plan()] * len(running)
        if self.drafter is None:
            return plans
        decoding = [i for i, s in enumerate(running) if s.context and s.context.num_pending == 1]
        states = [state_of(running[i]) for i in decoding]
        capacity = Capacity(max_rows=self.config.max_step_rows)
        for i, plan in zip(decoding, self.controller.decide(states, capacity), strict=True):
            plans[i] = bounded(plan, running[i])
        return plans

    def _draft(self, running: Seq[Sequence], plans: Seq[Plan]) -> list[Proposal | None]:
        if self.drafter is None:
            return [None] * len(running)
        return self.drafter.propose(running, plans)

    def _score(self, shares: Seq[Share], drafted: dict[str, Proposal | None]) -> list[Scored]:
        """One target pass over all shares; logits where tokens come out."""
        spans: list[Span] = []
        tokens: list[torch.Tensor] = []
        wanted: list[int] = []
        scored: list[Scored] = []
        row = 0
        for share in shares:
            context = share.sequence.context
            assert context is not None
            proposal = drafted[share.sequence.key] if share.completes else None
            span = context.span(share.num_chain, proposal.tree if proposal else NO_TREE)
            spans.append(span)
            chain = context.pending(share.num_chain)
            tokens.append(torch.tensor(chain, dtype=torch.int64, device=self.target.device))
            if proposal is not None:
                tokens.append(proposal.tokens.to(self.target.device))
            if share.completes:
                first = row + share.num_chain - 1
                wanted += range(first, row + span.num_rows)
                scored.append(
                    Scored(sequence=share.sequence, proposal=proposal, num_chain=share.num_chain)
                )
            row += span.num_rows
        batch = pack(spans, torch.cat(tokens), wanted, self.target.device)
        logits = self.target.forward(batch).logits
        start = 0
        for item in scored:
            item.logits = logits[start : start + item.num_rows]
            start += item.num_rows
        return scored

    def _commit(self, item: Scored, verdict: Verdict) -> Emitted:
        """Tokens into the sequence, accepted rows into the target's KV."""
        sequence = item.sequence
        taken = sequence.append(verdict.tokens, verdict.sources)
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = time.monotonic()
        if sequence.params.logprobs is not None:
            sequence.logprobs += item.token_logprobs(verdict, taken)
        num_drafted = len(item.tree.parents)
        depth = max(item.tree.depths, default=0)
        sequence.acceptance.add(depth, verdict.num_accepted, num_drafted=num_drafted)
        context = sequence.context
        assert context is not None
        if sequence.stop is not None:
            sequence.status = Status.FINISHED
            sequence.finished_at_s = time.monotonic()
        else:
            context.commit([*range(item.num_chain), *(item.num_chain + n for n in verdict.path)])
        return Emitted(
            item=item, verdict=verdict, num_emitted=taken, num_drafted=num_drafted, depth=depth
        )

    def _tell_drafter(self, emitted: Seq[Emitted]) -> None:
        if self.drafter is None:
            return
        drafted = [e for e in emitted if e.item.proposal and e.item.sequence.stop is None]
        sequences = [e.item.sequence for e in drafted]
        outcomes = [Outcome(request_id=e.item.sequence.key, verdict=e.verdict) for e in drafted]
        self.drafter.observe(sequences, outcomes)

    def _records(
        self, emitted: Seq[Emitted], plans: dict[str, Plan], shares: Seq[Share], timing: Timing
    ) -> list[StepRecord]:
        """One trace record per sequence that emitted; durations belong to the whole cycle."""
        now_s = time.monotonic()
        num_prefill = sum(share.num_chain for share in shares if share.num_chain > 1)
        batch_rows = sum(share.num_chain for share in shares) + sum(e.num_drafted for e in emitted)
        return [
            StepRecord(
                cycle_id=self.cycle_id,
                t_s=timing.started_s,
                request_id=e.item.sequence.key,
                step=e.item.sequence.acceptance.num_steps,
                method=plans[e.item.sequence.key].method,
                k_budget=plans[e.item.sequence.key].num_speculative_tokens,
                num_drafted=e.num_drafted,
                depth_drafted=e.depth,
                num_accepted=e.verdict.num_accepted,
                num_emitted=e.num_emitted,
                draft_s=timing.draft_s,
                verify_s=timing.verify_s,
                other_s=timing.other_s(now_s),
                batch_rows=batch_rows,
                num_prefill_rows=num_prefill,
                context_tokens=len(e.item.sequence.ids) - e.num_emitted,
                last_token_source=e.verdict.sources[e.num_emitted - 1],
                expected_accepted=e.verdict.expected_accepted,
                stop_reason=e.item.proposal.stop_reason if e.item.proposal else None,
            )
            for e in emitted
        ]


def bounded(plan: Plan, sequence: Sequence) -> Plan:
    """No plan may draft past the end of its request, where there is no room in the context.

    The pass itself yields one more token than is accepted.
    """
    most = max(0, sequence.max_new - 1)
    if plan.num_speculative_tokens <= most:
        return plan
    return replace(plan, num_speculative_tokens=most)


def state_of(sequence: Sequence) -> RequestState:
    """What the controller may know of a sequence."""
    return RequestState(
        request_id=sequence.key,
        num_committed=len(sequence.ids),
        max_new=sequence.max_new,
        temperature=sequence.params.temperature,
    )


def commit_chunk(share: Share) -> None:
    """Keep all rows of a prompt chunk."""
    assert share.sequence.context is not None
    share.sequence.context.commit(range(share.num_chain))
