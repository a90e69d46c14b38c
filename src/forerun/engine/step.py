"""One engine step: plan, draft, run the target once, verify, commit, and call the observers.

A step is a function of (sequences, plans, noise). Its clock readings fill the trace; a controller
receives them too, as durations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.control.base import (
    Capacity,
    Chain,
    Controller,
    DecisionReuse,
    Plan,
    RequestState,
    Tree,
)
from forerun.engine.config import EngineConfig
from forerun.engine.drafting import GuardedDrafter, cycle_batch
from forerun.engine.observing import ObservedStep, StepObserver
from forerun.engine.scheduler import PLAIN, ScheduledSequence, Scheduler
from forerun.engine.sequence import Sequence
from forerun.engine.verification import verdict_of, verify
from forerun.models.base import CycleMember, LanguageModel, ModelCycle, RowBatch, pack
from forerun.sampling.proposal import Verdict
from forerun.sampling.walk import expected_accepted
from forerun.theory.record import StepRecord

StepEvent = Literal["draft_start", "draft_end", "pass_start", "pass_end"]
"""Moments of a step at which its clock is read: around drafting, and around the target pass."""

Answer = TypeVar("Answer")

logger = logging.getLogger("forerun.engine")


class StepClock:
    """Measures the seconds of drafting, of the target pass, and of the rest of one step.

    On the CPU these are clock readings. A CUDA device runs behind the host, so there the two passes
    are timed by events in its own stream; they are read once the step's tokens have been waited for
    anyway. Passes on other devices are timed until the host goes on, and what is still to be waited
    for then counts as "other".
    """

    def __init__(self, device: torch.device) -> None:
        self.started_s = time.monotonic()
        self._is_cuda = device.type == "cuda"
        self._readings: dict[StepEvent, float | torch.cuda.Event] = {}

    def mark(self, moment: StepEvent) -> None:
        """Record the time of an event; every event comes once a step."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotations here
            event.record()
            self._readings[moment] = event
        else:
            self._readings[moment] = time.monotonic()

    def durations(self) -> tuple[float, float, float]:
        """Seconds of drafting, of the target pass, and of the rest of the step so far."""
        total_s = max(0.0, time.monotonic() - self.started_s)
        draft_s = self._between("draft_start", "draft_end")
        verify_s = self._between("pass_start", "pass_end")
        return draft_s, verify_s, max(0.0, total_s - draft_s - verify_s)

    def _between(self, first: StepEvent, last: StepEvent) -> float:
        start, end = self._readings[first], self._readings[last]
        if isinstance(start, float) and isinstance(end, float):
            return max(0.0, end - start)
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000


class CycleClock(StepClock):
    """The seconds of a cycle that a model ran in one call: its own, and those of its bookkeeping.

    Args:
        called_s: when the call began.
        begun_s: when the bookkeeping of this cycle began, the call not counted.
    """

    def __init__(self, cycle: ModelCycle, called_s: float, begun_s: float) -> None:
        self.started_s = called_s + cycle.started_s
        self._cycle, self._begun_s = cycle, begun_s

    def durations(self) -> tuple[float, float, float]:
        cycle, own_s = self._cycle, max(0.0, time.monotonic() - self._begun_s)
        return cycle.draft_s, cycle.verify_s, cycle.other_s + own_s


class Stepper:
    """Runs engine steps; all request state is in the scheduler's sequences.

    Attributes:
        feature_layers: layers of the target that the drafter reads.
        is_committing: tokens and KV are being changed; an exception then leaves them damaged.
        cycle_id: number of steps taken.
    """

    def __init__(
        self,
        *,
        target: LanguageModel,
        drafter: GuardedDrafter | None,
        controller: Controller,
        scheduler: Scheduler,
        config: EngineConfig,
        observers: list[StepObserver],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.controller = controller
        self.scheduler = scheduler
        self.observers = observers
        self.decisions: DecisionReuse[Sequence] = DecisionReuse(
            controller, Capacity(max_rows=config.max_step_rows)
        )
        self.max_chain, self.max_nodes = config.max_chain, config.max_nodes
        self.feature_layers = () if drafter is None else drafter.drafter.required_features
        # A drafter that reads the target's likely tokens needs the logits of every step.
        learns = drafter is not None and drafter.required_top_k
        self.max_cycles = 1 if learns or not target.in_kernels else config.cycles_per_call
        self._is_observed = self._is_decided = True
        self.is_committing = False
        self.cycle_id = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_emitted = 0

    def continue_counts(self, former: Stepper) -> None:
        """Count on from where a former stepper of the same engine ended."""
        self.cycle_id = former.cycle_id
        self.num_drafted = former.num_drafted
        self.num_accepted = former.num_accepted
        self.num_emitted = former.num_emitted

    def run(self) -> None:
        """Advance every running sequence, after sequences were preempted and admitted.

        By one step, or by those that the target runs in one call with the same plans. In this
        class, `entry` is one scheduled sequence, `fed` are those with rows in the pass, and
        `emitting` are those of them whose pending tokens are all in the pass, so that it yields
        tokens; the others are still reading their prompt.

        Raises:
            NumericalError: some logits cannot be used; nothing was committed.
        """
        entries = self.scheduler.schedule(self.target.store, self.release)
        if not entries:
            return
        clock = StepClock(self.target.device)
        num_same = self._plan(entries)
        if self._run_cycles(entries, num_same, clock):
            return
        fed, emitting = self._draft(entries, clock)
        self._forward_and_verify(fed, emitting, clock)
        self._commit(fed, emitting, clock)

    def _run_cycles(self, entries: Seq[ScheduledSequence], num_same: int, clock: StepClock) -> bool:
        """Let the target run the next steps in one call, and take them; whether there were any.

        A step whose batch is not the one of the call is not taken: nothing of it was committed.
        """
        if self.max_cycles == 1 or self._keeps_logits():
            return False
        batch = cycle_batch(entries, self.drafter, self.target.store.feature_layers)
        if batch is None:
            return False
        called_s = time.monotonic()
        cycles = self.target.run_cycles(batch, max(1, min(num_same, self.max_cycles)))
        begun_s = clock.started_s + time.monotonic() - called_s
        plans = [entry.plan for entry in entries]
        for at, cycle in enumerate(cycles):
            if at:
                if self.scheduler.must_change():
                    break
                begun_s = time.monotonic()
                if self._is_decided:
                    self._is_observed = self.decisions.advance()
                entries = self.scheduler.entries()
            for place, (entry, plan) in enumerate(zip(entries, plans, strict=True)):
                entry.plan = plan
                self._take(entry, batch.members[place], cycle, place)
            self._commit(entries, entries, CycleClock(cycle, called_s, begun_s))
        return bool(cycles)

    def _take(
        self, entry: ScheduledSequence, member: CycleMember, cycle: ModelCycle, place: int
    ) -> None:
        """Note in the stores what a cycle staged of a sequence; set its proposal and verdict."""
        num_accepted, final, expected = cycle.outcomes[place]
        tokens: tuple[int, ...] = (final,)
        if depth := member.num_drafted:
            assert self.drafter is not None
            chain, ids = cycle.chains[place], cycle.ids[place]
            num_levels = len(ids)
            self.drafter.note_chain(
                entry, chain[:depth] if depth < num_levels else chain, num_levels
            )
            tokens = (*ids[:num_accepted], final)
            if member.rule == "walk":
                first = place * num_levels
                expected = expected_accepted(entry.tree, cycle.matches[first : first + depth])
        entry.num_chain = 1
        context = entry.context
        context.store.claim(context.slot, entry.num_cached, 1 + depth, writes_features=True)
        if member.rule == "greedy":
            expected = num_accepted
        entry.verdict = verdict_of(entry, tuple(range(num_accepted)), tokens, expected)

    def release(self, sequence: Sequence) -> None:
        """Free the KV slot of a sequence, whose rows may stay cached, and its draft state."""
        if sequence.context is not None:
            sequence.context.close(0 if sequence.kv_invalid else sequence.context.num_cached)
            sequence.context = None
        if self.drafter is not None:
            self.drafter.forget(sequence)

    def _keeps_logits(self) -> bool:
        if not self.observers:
            return False
        return any([self._ask(each, lambda o: o.wants_logits) for each in tuple(self.observers)])

    def _ask(
        self, observer: StepObserver, question: Callable[[StepObserver], Answer]
    ) -> Answer | None:
        """Return what an observer answers; one that raises is removed unless it is required."""
        try:
            return question(observer)
        except Exception as error:
            if getattr(observer, "is_required", False):
                raise
            self.observers.remove(observer)
            name = type(observer).__name__
            logger.warning("observer %s failed and was removed: %r", name, error)
            return None

    def _plan(self, entries: Seq[ScheduledSequence]) -> int:
        """Set the plans of sequences that may draft: prompt fully fed and drafter not paused.

        The controller plans for those whose request has no plan of its own (`RequestTerms.plan`).

        Returns:
            For how many steps the plans stay, this one included. A drafter that has paused for some
            tokens is asked again after as many plain steps.
        """
        self._is_observed, self._is_decided = self.drafter is not None, False
        if self.drafter is None:
            return self.max_cycles
        free = [entry for entry in entries if entry.decodes and entry.sequence.may_draft]
        asked = [entry.sequence for entry in free if entry.sequence.plan is None]
        decisions, num_same = self.decisions, self.max_cycles
        plans: Iterator[Plan] = iter(())
        if asked:
            is_whole = len(asked) == len(entries)
            plans = iter(decisions.plan(asked, state_of, is_whole=is_whole))
            self._is_observed, self._is_decided = decisions.is_observed, True
        for entry in free:
            own = entry.sequence.plan
            plan = own or next(plans)
            most = self.max_nodes if isinstance(plan.shape, Tree) else self.max_chain
            entry.plan = bounded(plan, most, entry.sequence.max_new - 1)
            if own is None and entry.plan is not plan and plan.num_speculative_tokens > 0:
                decisions.end()
        if asked:
            num_same = 1 + decisions.num_left
        pauses = [num for e in entries if (num := e.sequence.num_paused) > 0]
        return min([num_same, *pauses])

    def _draft(
        self, entries: Seq[ScheduledSequence], clock: StepClock
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence]]:
        """Let the drafter propose, and share out the rows of the pass."""
        clock.mark("draft_start")
        drafting = [entry for entry in entries if entry.plan.num_speculative_tokens]
        if self.drafter is not None and drafting:
            self.drafter.propose(drafting)
        clock.mark("draft_end")
        fed = self.scheduler.assign_rows(entries)
        return fed, [entry for entry in fed if entry.completes]

    @torch.inference_mode()
    def _forward_and_verify(
        self, fed: Seq[ScheduledSequence], emitting: Seq[ScheduledSequence], clock: StepClock
    ) -> None:
        """Run the target once and verify all emitting sequences."""
        clock.mark("pass_start")
        batch = self._batch(fed)
        output = self.target.forward(batch)
        clock.mark("pass_end")
        if output.features is not None:
            self._stage_features(fed, output.features)
        tokens, logits, wanted = batch.tokens, output.logits, batch.logit_rows
        if scoring := [e for e in fed if e.sequence.params.prompt_logprobs is not None]:
            num_rows = logits.shape[0] - sum(len(entry.scored_rows) for entry in scoring)
            logits, wanted = logits[:num_rows], wanted[:num_rows]
        if logits.shape[0] < tokens.shape[0]:  # otherwise all rows are wanted, in order
            tokens = tokens.index_select(0, wanted)
        verdicts = verify(emitting, logits, tokens)
        keeps_logits = self._keeps_logits()
        row = 0
        for entry, verdict in zip(emitting, verdicts, strict=True):
            entry.verdict = verdict
            if keeps_logits or entry.sequence.params.logprobs is not None:
                entry.logits = logits[row : row + entry.num_logit_rows]
            row += entry.num_logit_rows
        if self.drafter is not None and (top_k := self.drafter.required_top_k):
            _note_top_tokens(emitting, logits, tokens, min(top_k, logits.shape[1]))
        for entry in scoring:
            row, start = row + len(entry.scored_rows), row
            entry.score_prompt(output.logits[start:row])

    def _batch(self, fed: Seq[ScheduledSequence]) -> RowBatch:
        """Return the rows of the pass, with logits requested where tokens are emitted.

        Rows that yield log-probabilities of a prompt come after those.
        """
        device = self.target.device
        wanted: list[int] = []
        scored: list[int] = []
        row = 0
        for entry in fed:
            if entry.sequence.params.prompt_logprobs is not None:
                scored += (row + at for at in entry.scored_rows)
            row += entry.num_chain
            if entry.completes:
                wanted += range(row - 1, row + entry.num_drafted)
                row += entry.num_drafted
        wanted += scored
        batch = pack([entry.span() for entry in fed], _tokens_of(fed, device), wanted, device)
        return replace(batch, feature_layers=self.feature_layers) if self.feature_layers else batch

    def _stage_features(
        self, fed: Seq[ScheduledSequence], features: Float[Tensor, "rows layers width"]
    ) -> None:
        """Stage the features of all rows in the KV store until the commit."""
        row = 0
        for entry in fed:
            end = row + entry.num_chain + entry.num_drafted
            context = entry.context
            context.store.stage_features(context.slot, entry.num_cached, features[row:end])
            row = end

    def _commit(
        self, fed: Seq[ScheduledSequence], emitting: Seq[ScheduledSequence], clock: StepClock
    ) -> None:
        """Commit tokens and KV, count the step, and pass what came out to all that observe it."""
        self.is_committing = True
        for entry in fed:
            entry.commit()
        self.is_committing = False
        controls = self._is_observed
        # Where all steps are plain, most drafters observe them before their next draft.
        if self.drafter is not None:
            if controls or self.decisions.drafts or self.drafter.required_top_k:
                self.drafter.observe([entry for entry in fed if entry.sequence.stop is None])
            if not controls:
                self.decisions.skip(sum(clock.durations()))
        is_observed = controls or bool(self.observers)
        records = self._records(emitting, fed, clock) if emitting and is_observed else []
        if controls:
            self.controller.observe(records)
        self.cycle_id += 1
        for entry in emitting:
            assert entry.verdict is not None
            self.num_drafted += entry.num_drafted
            self.num_accepted += entry.verdict.num_accepted
            self.num_emitted += entry.num_emitted
        if self.observers:
            self._notify_observers(fed, emitting, records)

    def _records(
        self, emitting: Seq[ScheduledSequence], fed: Seq[ScheduledSequence], clock: StepClock
    ) -> list[StepRecord]:
        """Return one trace record per emitting sequence; durations refer to the whole cycle."""
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
                path_ranks=ranks,
                path_children=children,
            )
            for entry in emitting
            if (verdict := entry.verdict) is not None
            for ranks, children in [_path_in_tree(entry, verdict)]
        ]

    def _notify_observers(
        self,
        fed: Seq[ScheduledSequence],
        emitting: Seq[ScheduledSequence],
        records: Seq[StepRecord],
    ) -> None:
        """Pass the step to the observers in the order in which they were added."""
        prefilling = [entry for entry in fed if not entry.completes]
        step = ObservedStep(records=records, emitting=emitting, prefilling=prefilling)
        for observer in tuple(self.observers):
            self._ask(observer, lambda each: each.observe(step))


def _note_top_tokens(
    emitting: Seq[ScheduledSequence],
    logits: Float[Tensor, "rows vocab"],
    tokens: Int64[Tensor, " rows"],
    top_k: int,
) -> None:
    """Store the most likely next tokens of every row, under the token that was fed there."""
    likely, fed = logits.topk(top_k, dim=-1).indices.tolist(), tokens.tolist()
    row = 0
    for entry in emitting:
        end = row + entry.num_logit_rows
        entry.top_tokens = dict(zip(fed[row:end], likely[row:end], strict=True))
        row = end


def bounded(plan: Plan, max_nodes: int, max_depth: int) -> Plan:
    """Return the plan, limited to the available rows and to the tokens that may be emitted.

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


def _path_in_tree(
    entry: ScheduledSequence, verdict: Verdict
) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """Return `path_ranks` and `path_children` of a step's record; None twice for a chain."""
    if not isinstance(entry.plan.shape, Tree):
        return None, None
    siblings = [entry.tree.children(node) for node in (-1, *verdict.path)]
    ranks = (among.index(node) + 1 for among, node in zip(siblings, verdict.path, strict=False))
    return tuple(ranks), tuple(map(len, siblings))


def state_of(sequence: Sequence) -> RequestState:
    """Return the state of a sequence in the form that controllers receive."""
    return RequestState(
        request_id=sequence.key,
        num_committed=len(sequence.ids),
        max_new=sequence.max_new,
        temperature=sequence.params.temperature,
        tags=sequence.tags,
        allows_trees=sequence.params.allows_trees,
    )


def _tokens_of(fed: Seq[ScheduledSequence], device: torch.device) -> list[int] | Tensor:
    """Return the input tokens of a pass: for each entry its pending tokens, then its draft nodes.

    Nodes that are on a device are copied there without waiting for them.
    """
    proposals = [entry.proposal for entry in fed]
    if all(p is None or p.tokens.is_cpu for p in proposals):
        ids: list[int] = []
        for entry, proposal in zip(fed, proposals, strict=True):
            ids += entry.pending()
            if proposal is not None:
                ids += proposal.tokens.tolist()
        return ids
    pieces: list[Tensor] = []
    for entry, proposal in zip(fed, proposals, strict=True):
        pending = torch.tensor(entry.pending(), dtype=torch.int64)
        pieces.append(pending.to(device, non_blocking=True))
        if proposal is not None:
            pieces.append(proposal.tokens.to(device))
    return torch.cat(pieces)
