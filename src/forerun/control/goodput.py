"""Controller that maximises expected tokens per second by the choice of K for every request.

Source of the objective: SmartSpec (Liu et al. 2024, 2406.14066). Here acceptance is a posterior per
position and request, times come from a profile or from the steps themselves, and the rows of a
batch go to the requests that gain most by them. A small share of the steps is made to measure what
is not chosen: short drafts while decoding is plain, plain steps while requests draft.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from forerun.control.acceptance import AcceptanceCurve, AcceptanceEstimates
from forerun.control.allocation import (
    Allocation,
    RequestCandidate,
    TreeLevels,
    best_chains,
    best_trees,
    chain_values,
)
from forerun.control.base import (
    USUAL_WIDTH,
    Capacity,
    Controller,
    Decision,
    MethodChoice,
    Plan,
    RequestState,
    Tree,
    usual_depth,
)
from forerun.control.config import GoodputConfig
from forerun.control.costs import (
    LEAST_READ,
    NO_REST,
    CostModel,
    CostSource,
    DrafterTraits,
    OperatingPoint,
    Rest,
    StepTimes,
)
from forerun.theory.record import StepRecord

logger = logging.getLogger("forerun.control")

PLAIN = Plan()
MOST_DOUBLED = 3
"""How often the limit on the charge of a probe doubles at most, once per lost probe."""
COLD_STEPS = 1.0
"""What the plain steps after a draft take longer than others, together, in plain steps."""
MOST_PLAIN = 64
"""Most consecutive plain steps of a decision; the first of them updates the costs."""
LOGGED_AFTER = 30
"""Consecutive plain steps after which the log reports that drafting was stopped."""
NEAR_SHARE = 0.95
"""Trees are compared at every decision if their speed exceeds this share of that of the best
chains, or if there is a profile."""
TREES_EVERY = 8
"""Otherwise trees are compared at every n-th decision, with this n."""
LEAST_GAIN = 0.05
"""Gain of drafts over plain steps within the error of the estimates: measuring plain steps is taken
to lose at least this share."""
UNLIMITED = 1 << 20
"""A number of tokens that no draft reaches."""
Times = Mapping[str, StepTimes]


@dataclass(slots=True, kw_only=True, eq=False)
class ActivePlan:
    """What was decided last.

    Attributes:
        plans: the best, or plans that measure others.
        allocation: expected outcome of a step with the best plans.
        expected_gain: expected accepted tokens of a request in place of its probe.
        reuse: steps for which plans that draft are reused; it doubles while the best plans of these
            requests stay the same.
    """

    states: Sequence[RequestState]
    names: list[str]
    best: list[Plan]
    plans: list[Plan]
    max_rows: int
    point: OperatingPoint
    allocation: Allocation
    expected_gain: float = 0.0
    reuse: int = 1


class GoodputController(Controller):
    """Chooses K per request, which may be 0, and the drafter if there are several.

    Args:
        tree_methods: drafters that propose trees; a tree is planned where it is expected to be
            faster than every chain.
        max_tree_nodes: most nodes of a tree; the largest K where that is more.
    """

    def __init__(
        self,
        costs: Mapping[str, CostSource | None],
        max_k: int,
        config: GoodputConfig | None = None,
        tree_methods: Sequence[str] = (),
        max_tree_nodes: int = 0,
        traits: Mapping[str, DrafterTraits] = MappingProxyType({}),
    ) -> None:
        self.config = config or GoodputConfig()
        self.max_k = max_k
        self.methods = tuple(costs)
        self.tree_methods = tree_methods
        self.costs = CostModel(costs, max_k, max_tree_nodes, self.config, traits)
        self.acceptance = AcceptanceEstimates(self.config)
        self._readers = [name for name in self.methods if self.costs.traits[name].reads_text]
        self._active: ActivePlan | None = None
        self._backlog: list[tuple[Sequence[StepRecord], ActivePlan, Rest]] = []
        self._rest = NO_REST  # before the next records
        self._lengths: dict[str, int] = {}  # tokens of requests after the last records
        self._probe_loss = 0.0
        self._num_lost = 0  # probes in a row, while decoding was plain
        self._reading_left = 0.0  # plain steps of one request, left for unproven reading
        self._num_probes = 0
        self._has_profile = any(source is not None for source in costs.values())
        self._num_decided = self._next_trees = 0
        # Steps that draft until plain ones are measured again, by bit length of the batch.
        self._until_plain = defaultdict[int, float](lambda: self.config.num_cold)
        self._plain_left = 0
        self._num_plain = self.config.num_cold - 1
        self._is_off = False
        self._num_resumed = 0  # steps planned with a draft since drafting was off
        self._logged_after = LOGGED_AFTER
        self._chosen = {name: MethodChoice(method=name) for name in ("plain", *self.methods)}

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        """Return the best plans by the present estimates; a small share of the plans are probes."""
        if not states:
            return Decision(())
        self._learn()
        active, num_steps = self._decide_anew(states, capacity)
        self._active = active
        # Plain steps between drafts are made to measure their costs.
        drafts = any([plan.num_speculative_tokens for plan in (*active.best, *active.plans)])
        return Decision(active.plans, num_steps, is_observed=drafts)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Receive the records of a step; the estimates are updated when plans are decided anew."""
        active = self._active
        if records and records[0].num_prefill_rows:
            self.costs.observe_prompt(records[0])
        if not records or active is None:
            return
        # The simulator creates records on access, from requests that change in the next step.
        self._backlog.append((tuple(records), active, self._rest))
        self._rest = NO_REST
        if len(self._backlog) > MOST_PLAIN:
            self._learn()

    def skip(self, num_steps: int, seconds: float) -> None:
        """Receive the number of plain steps without records, and what they took."""
        self._rest = Rest(self._rest.num_steps + num_steps, self._rest.seconds + seconds)
        self._plain_left = max(0, self._plain_left - num_steps)
        if self._probe_loss > 0.0:
            decay = num_steps * self.config.probe_share
            self._probe_loss = max(0.0, self._probe_loss - decay)

    def _learn(self) -> None:
        for records, active, rest in self._backlog:
            self._num_plain += rest.num_steps
            self._chosen["plain"].num_steps += rest.num_steps * len(records)
            self._learn_step(records, active, rest)
        if self._backlog:
            last, _, _ = self._backlog[-1]
            self._lengths = {r.request_id: r.context_tokens + r.num_emitted for r in last}
        self._backlog.clear()

    def _learn_step(self, records: Sequence[StepRecord], active: ActivePlan, rest: Rest) -> None:
        config, first = self.config, records[0]
        for record in records:
            self._chosen.get(record.method, self._chosen["plain"]).add(record)
        drafts = [record for record in records if record.k_budget and record.method != "plain"]
        num_read = sum([self.acceptance.observe(record) for record in drafts])
        if drafts:
            self._num_plain = 0
            self._until_plain[len(records).bit_length()] -= 1.0
        else:
            self._num_plain += 1
            self._plain_left = max(0, self._plain_left - 1)
        self._learn_costs(records, active.point, num_read, rest)
        if num_read >= LEAST_READ:
            times = self.costs.times(active.point).get(drafts[0].method)
            if times is not None:
                steps = len(records) * num_read * times.read_s / times.plain_s
                self._reading_left = max(0.0, self._reading_left - steps)
        if self._probe_loss > 0.0:
            self._probe_loss = max(0.0, self._probe_loss - config.probe_share)
        probed = [at for at, plan in enumerate(active.plans) if plan.probe]
        self._note_switch(is_drafting=bool(drafts) and not probed)
        if probed:
            self._chosen[active.plans[probed[0]].method].num_probes += 1
        if probed and drafts and not first.num_prefill_rows:
            self._charge(records, active, probed[0])

    def _learn_costs(
        self, records: Sequence[StepRecord], point: OperatingPoint, num_read: int, rest: Rest
    ) -> None:
        """Update the estimated costs, unless a plain step found cold caches."""
        num_cold = self.config.num_cold
        if records[0].num_prefill_rows:
            self._num_plain = min(self._num_plain, num_cold - 1)
        elif not 0 < self._num_plain <= num_cold:
            self.costs.observe(records, point, num_read, rest)

    def _charge(self, records: Sequence[StepRecord], active: ActivePlan, at: int) -> None:
        """Add the loss by a probe, in steps: the time it took beyond the tokens it gained.

        What probes gain is kept as well, up to one step: while they gain on average, an unlucky one
        does not end them.
        """
        first, allocation = records[0], active.allocation
        took_s = first.draft_s + first.verify_s + first.other_s
        # A drafter that was off reads a long text first, charged up to a limit because rare probes
        # find late that drafting pays again. The limit doubles with each lost probe after two.
        most = self.config.largest_ratio * 2.0 ** min(max(0, self._num_lost - 2), MOST_DOUBLED)
        took = min(most, took_s / allocation.step_s)
        gained = sum(r.num_accepted for r in records if r.request_id == active.names[at])
        loss = took - 1.0 - (gained - active.expected_gain) / allocation.tokens
        if not any(allocation.depths):
            loss += COLD_STEPS
        self._probe_loss = max(-1.0, self._probe_loss + loss)
        self._num_lost = self._num_lost + 1 if loss > 0.0 and not any(allocation.depths) else 0

    def _decide_anew(
        self, states: Sequence[RequestState], capacity: Capacity
    ) -> tuple[ActivePlan, int]:
        """Choose the best plans, or plans that measure others, and for how many steps."""
        config, batch = self.config, len(states)
        point = OperatingPoint.of(states)
        times = self.costs.times(point)
        if self._active is None or self._active.names != [state.request_id for state in states]:
            self._note_requests(states)
        candidates = [self._candidate(state, times, batch) for state in states]
        max_nodes = max(0, capacity.max_rows - batch)
        allocation, last = best_chains(candidates, times, max_nodes), self._active
        self._num_decided += 1
        # Comparing trees takes longest, so trees that are far slower are compared rarely.
        if last is None or self._num_decided >= self._next_trees:
            methods = [
                method
                for method in self.tree_methods
                if all(self._may_read(state, method, times, batch) for state in states)
            ]
            tree = self._best_tree(methods, states, times, max_nodes)
            share = 0.0 if tree is None else tree.tokens_per_s / allocation.tokens_per_s
            waits = not self._has_profile and share < NEAR_SHARE
            self._next_trees = self._num_decided + (TREES_EVERY if waits else 1)
            if tree is not None and share > 1.0:
                allocation = tree
        best = _plans_of(candidates, allocation)
        active = ActivePlan(
            states=states,
            names=[state.request_id for state in states],
            best=best,
            plans=best,
            max_rows=capacity.max_rows,
            point=point,
            allocation=allocation,
        )
        if last is not None and last.names == active.names and last.best == best:
            active.reuse = min(config.reuse, 2 * last.reuse)
        self._plan_plain_steps(active, times)
        if self._plain_left > 0:
            active.plans = [PLAIN] * batch
            return active, self._plain_left
        if self._probe(active, states, times, max_nodes - sum(allocation.depths)):
            return active, 1
        if any(allocation.depths):
            return active, active.reuse
        until_probe = max(0, math.ceil(self._probe_loss / config.probe_share))
        return active, min(until_probe or MOST_PLAIN, MOST_PLAIN)

    def _plan_plain_steps(self, active: ActivePlan, times: Times) -> None:
        """Set how many steps from here on stay plain to measure what a plain step costs."""
        is_first = self._num_decided == 1 and not self._has_profile
        drafts, bucket = any(active.allocation.depths), len(active.states).bit_length()
        if is_first:
            self._plain_left = self.config.first_plain
        elif not drafts:
            self._plain_left = 0
        if drafts:
            gap = self._plain_gap(active, times)
            until = gap if is_first else min(self._until_plain[bucket], gap)
            if until <= 0.0:
                until, self._plain_left = gap, self._plain_run
            self._until_plain[bucket] = until

    def _note_requests(self, states: Sequence[RequestState]) -> None:
        """Count the outputs of ended requests, and allow reading time for new ones."""
        before = self._active.states if self._active is not None else ()
        known = {state.request_id: state for state in before}
        for state in states:
            if known.pop(state.request_id, None) is None:
                num_expected = self.acceptance.num_expected(state)
                share = self.config.probe_share
                if not all(self._is_known(state, method) for method in self._readers):
                    share = self.config.reading_share
                self._reading_left = min(self._reading_left + share * num_expected, num_expected)
        for name, state in known.items():
            length = self._lengths.get(name, state.num_committed)
            self.acceptance.end(replace(state, num_committed=length))

    def _is_known(self, state: RequestState, method: str) -> bool:
        """Whether enough drafts of similar requests were verified to rely on their estimate."""
        return self.acceptance.num_tried(state, method) >= self.config.similar_strength

    def _may_read(
        self,
        state: RequestState,
        method: str,
        times: Times,
        batch: int,
        curve: AcceptanceCurve | None = None,
    ) -> bool:
        """Whether a drafter may process the tokens of a request that it has not processed yet.

        The time that drafts are expected to save over the request's further tokens must exceed
        twice the time of reading, for which all requests wait. For a drafter whose acceptance is
        uncertain, and for a probe (without a curve), reading must fit into the share of time set
        aside for it.
        """
        own = times[method]
        if own.read_s == 0.0:
            return True
        num_unread = self.acceptance.num_unread(state, method)
        if num_unread < LEAST_READ:
            return True
        steps = batch * num_unread * own.read_s / own.plain_s
        if curve is None:
            return steps <= self._reading_left
        if not self._is_known(state, method):
            return batch * steps <= self._reading_left  # the others of the batch read as much
        values = zip(*chain_values(curve, own, batch), strict=True)
        saved = 1.0 - min([step_s / tokens for tokens, step_s in values]) / own.plain_s
        return 2.0 * steps < saved * self.acceptance.num_expected(state)

    @property
    def _plain_run(self) -> int:
        return max(1, 2 * self.config.num_cold)

    def _plain_gap(self, active: ActivePlan, times: Times) -> float:
        """Return after how many steps that draft the cost of plain ones is measured again.

        Plain steps lose what drafts gain, so where that is little they may be frequent: it is
        there that their cost decides.
        """
        plain_s = times[self.methods[0]].plain_s
        gain = active.allocation.tokens_per_s * plain_s / len(active.states) - 1.0
        return self._plain_run * max(LEAST_GAIN, gain) / self.config.probe_share

    def _probe(
        self, active: ActivePlan, states: Sequence[RequestState], times: Times, room: int
    ) -> bool:
        """Let one request draft what is not chosen if a probe is due; return whether one is.

        The request is the one with the fewest tokens that its drafter has not read. While requests
        draft, one of them drafts one token more, or one token of another drafter. While decoding is
        plain, a request drafts as far as would be best if its tokens were accepted as often as the
        prior.
        """
        drafting = [at for at, plan in enumerate(active.best) if plan.num_speculative_tokens]
        able = drafting or [at for at, state in enumerate(states) if state.max_new > 1]
        if self._probe_loss > 0.0 or not able:
            return False
        self._num_probes += 1
        method = self.methods[self._num_probes % len(self.methods)]
        at = min(able, key=lambda at: self.acceptance.num_unread(states[at], method))
        if not self._may_read(states[at], method, times, len(states)):
            return False
        plan = active.best[at]
        room += plan.num_speculative_tokens
        most = min(self.costs.largest_depth(method, len(states)), states[at].max_new - 1, room)
        depth = plan.shape.depth + 1 if method == plan.method else 1
        if depth > most or isinstance(plan.shape, Tree):
            return False
        if drafting:
            own = self.acceptance.curve(states[at], plan.method, plan.shape.depth)
            active.expected_gain = sum(own.survival)
        else:
            likely = [self.config.prior ** (depth + 1) for depth in range(most)]
            curve = AcceptanceCurve(likely, [1.0] * most)
            tokens, steps_s = chain_values(curve, times[method], len(states))
            depth = max(range(1, most + 1), key=lambda k: tokens[k] / steps_s[k])
        active.plans = [*active.best]
        active.plans[at] = Plan.chain(method, depth, probe=True)
        return True

    def _candidate(self, state: RequestState, times: Times, batch: int) -> RequestCandidate:
        """Return the drafter with the most expected tokens per second, with its estimates."""

        def rate(candidate: RequestCandidate) -> float:
            values = chain_values(candidate.curve, times[candidate.method], batch)
            return max([tokens / step_s for tokens, step_s in zip(*values, strict=True)])

        found = [self._drafting(state, method, batch) for method in self.methods]
        for at, candidate in enumerate(found):
            if not self._may_read(state, candidate.method, times, batch, candidate.curve):
                found[at] = candidate._replace(curve=AcceptanceCurve([], []))
        return found[0] if len(found) == 1 else max(found, key=rate)

    def _drafting(self, state: RequestState, method: str, batch: int) -> RequestCandidate:
        """Return a request with the estimates of one drafter."""
        most = max(0, min(self.costs.largest_depth(method, batch), state.max_new - 1))
        return RequestCandidate(method, self.acceptance.curve(state, method, most))

    def _best_tree(
        self,
        methods: Sequence[str],
        states: Sequence[RequestState],
        times: Times,
        max_nodes: int,
    ) -> Allocation | None:
        """Return the best trees for all requests; None if one of them cannot have a tree."""
        if not all(state.allows_trees and state.max_new > 1 for state in states):
            return None
        found: list[Allocation] = []
        for method in methods:
            most = self.costs.largest_tree(method, len(states))
            room = min(state.max_new for state in states) - 1
            deepest = min(usual_depth(most), self.costs.largest_depth(method, len(states)), room)
            curves = [self.acceptance.curve(state, method, deepest) for state in states]
            for depth in range(1, deepest + 1):
                shape = Tree(num_nodes=most, depth=depth, width=USUAL_WIDTH)
                survival = [
                    self.acceptance.tree_survival(state, curve, method, shape)
                    for state, curve in zip(states, curves, strict=True)
                ]
                levels = TreeLevels(method, depth)
                found.append(best_trees(levels, survival, times[method], max_nodes))
        return max(found, key=lambda allocation: allocation.tokens_per_s, default=None)

    def choices(self) -> list[MethodChoice]:
        """Return what was chosen so far, with the speed now expected of every way of decoding."""
        self._learn()
        active, found = self._active, [replace(choice) for choice in self._chosen.values()]
        if active is None:
            return found
        # Requests that are about to end have no room for the best drafts.
        states = [replace(state, max_new=max(state.max_new, UNLIMITED)) for state in active.states]
        batch, times = len(states), self.costs.times(active.point)
        max_nodes = max(0, active.max_rows - batch)
        for choice in found:
            if choice.method == "plain":
                choice.tokens_per_s = batch / times[self.methods[0]].plain_s
                continue
            candidates = [self._drafting(state, choice.method, batch) for state in states]
            best = best_chains(candidates, times, max_nodes)
            named = [choice.method] if choice.method in self.tree_methods else []
            tree = self._best_tree(named, states, times, max_nodes)
            best = max(filter(None, (best, tree)), key=lambda found: found.tokens_per_s)
            choice.tokens_per_s = best.tokens_per_s
            choice.shape = best.shape
        return found

    def _note_switch(self, *, is_drafting: bool) -> None:
        """Log that drafting stopped or resumed, after some steps; after twice as many next time."""
        names = " or ".join(self.methods)
        self._num_resumed = self._num_resumed + is_drafting if self._is_off else 0
        if self._num_resumed >= self._logged_after:
            logger.info("drafting with %s pays again and has resumed", names)
        elif self._num_plain >= self._logged_after and self._until_plain and not self._is_off:
            logger.info(
                "drafting with %s is slower than plain decoding at present, so decoding goes on "
                "plainly; a short draft checks now and then whether it pays again, and then it "
                "resumes",
                names,
            )
        else:
            return
        self._is_off = not self._is_off
        self._logged_after *= 2


@cache
def _chain(method: str, num_tokens: int) -> Plan:
    """Return the same object for the same plan, which makes comparisons fast."""
    return Plan.chain(method, num_tokens)


def _plans_of(candidates: Sequence[RequestCandidate], allocation: Allocation) -> list[Plan]:
    tree = allocation.tree
    if tree is None:
        return [
            _chain(candidate.method, depth)
            for candidate, depth in zip(candidates, allocation.depths, strict=True)
        ]
    return [
        Plan(method=tree.method, shape=Tree(num_nodes=nodes, depth=tree.depth, width=USUAL_WIDTH))
        if nodes
        else PLAIN
        for nodes in allocation.depths
    ]
