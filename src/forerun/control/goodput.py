"""Goodput: the K of every request that makes most expected tokens per second of the whole step.

Source of the objective: SmartSpec (Liu et al. 2024, 2406.14066). Here acceptance is a posterior per
position and request, times are a measured cost table corrected by the steps themselves, and the
rows of a batch go to whoever gains most by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import NamedTuple

from forerun.control.allocation import Allocator, allocator
from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.beliefs import Beliefs, DraftVariant
from forerun.control.calibration import Calibration
from forerun.control.config import GoodputConfig
from forerun.control.exploration import Exploration
from forerun.control.ladder import SingleRequestAllocator, break_even
from forerun.control.pricing import Allocation, Pricing, RequestCandidate
from forerun.control.punctuality import tpot_limit_s
from forerun.control.scenes import OperatingPoints
from forerun.control.settled import MOST_PATIENCE, NUM_COLD, PLAIN_PATIENCE, ActivePlan
from forerun.control.step_times import CostSource
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule

__all__ = ["GoodputController"]

PLAIN = Plan()
ROUTE_EVERY = 2
"""Decisions after which the drafter of a request is chosen anew: it rests on what is slow."""
IDLE_MEMORY = 0.998
"""Weight that what is known of acceptance keeps after a step in which nobody drafts."""
MOST_UNREAD = 8
"""Steps that are learnt from together: one by one, each would find what it needs out of cache."""


class Probe(NamedTuple):
    """Requests that draft a token to see how it fares.

    Attributes:
        names: of the requests.
        is_idle: they would not draft without it; else they would, with another drafter.
        num_idle: steps since anybody drafted.
        needed: share of drafted tokens that must be accepted for drafting to pay.
        without: what is expected of the step without it.
        longer_s: by how much it is expected to be longer.
    """

    names: frozenset[str]
    is_idle: bool
    num_idle: int
    needed: float
    without: Allocation
    longer_s: float


class GoodputController:
    """Chooses K per request, 0 included, and between drafters where there are several.

    Args:
        costs: of every drafter that may be planned, by its method.
        max_k: largest K.
        config: how.
    """

    def __init__(
        self, costs: Mapping[str, CostSource], max_k: int, config: GoodputConfig | None = None
    ) -> None:
        self.config = config or GoodputConfig()
        self.methods = tuple(costs)
        self.max_k = max_k
        self.scenes = OperatingPoints(costs, max_k)
        self.beliefs = Beliefs(self.config.beliefs)
        self.exploration = Exploration(self.config)
        stop = self.config.stop
        self.calibration = None if stop is None else Calibration(stop)
        self._chosen: dict[str, Plan] = {}
        self._unread: list[tuple[list[StepRecord], bool]] = []
        self._probe: Probe | None = None
        self._settled: ActivePlan | None = None
        self._num_settled = 0
        self._num_idle = 0
        self._drafted = False
        self._num_plain = 0
        self._last_cycle = 0

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """The best plans, or now and then ones that are worth learning from.

        Most steps follow what was settled before: beside a small model, deciding costs time.
        """
        settled, steps = self._settled, capacity.num_steps
        if settled and settled.steps_left >= steps and settled.holds(states, capacity):
            settled.steps_left -= steps
            return settled.followed
        if not states:
            return []
        return self._decide_anew(states, capacity)

    def _decide_anew(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Learn from what has happened, settle what is best, and maybe try something else."""
        self._learn()
        num_steps, last = capacity.num_steps, self._settled
        if last is not None:
            num_steps += last.num_steps - last.steps_left
        if last is not None and self._stands(last, states, capacity):
            settled = last
        else:
            settled = self._settled = self._settle_anew(states, capacity)
        settled.hold(0)
        self._chosen = dict(zip(settled.names, settled.plans, strict=True))
        self._probe = None
        most = [max(0, min(self.max_k, state.max_new - 1)) for state in states]
        exploration, plans = self.exploration, settled.plans
        self._num_idle += num_steps
        varied = exploration.varied(
            plans,
            most,
            lambda at: self.beliefs.news(states[at]),
            self.methods,
            max(0, capacity.max_rows - len(states)),
            num_steps,
        )
        if varied is not plans:
            varied = self._try(states, settled, varied)
        if varied is not plans or any(settled.allocation.depths):
            self._num_idle = 0
        if self._probe is None:
            least_left = min([state.max_new for state in states])
            rest = exploration.rest(plans, most, settled.patience)
            settled.hold(max(1, min(rest, least_left)) - 1)
        return settled.followed if varied is plans else varied

    def _try(
        self, states: Sequence[RequestState], settled: ActivePlan, varied: Sequence[Plan]
    ) -> list[Plan]:
        """Note what other plans are expected to lose, or what a probe is to be compared with."""
        allocation = settled.allocation
        tried = self._varied_price(states, settled.candidates, settled.pricing, varied)
        probed, explored = self.exploration.probed, self.exploration.explored
        if explored is not None and varied[explored].method == settled.plans[explored].method:
            longer = tried.step_s / allocation.step_s
            self.exploration.pay(longer - tried.tokens / allocation.tokens)
        else:
            who = probed if explored is None else [explored]
            method, batch = varied[who[0]].method, len(states)
            self._probe = Probe(
                names=frozenset(settled.names[at] for at in who),
                is_idle=explored is None,
                num_idle=self._num_idle,
                needed=break_even(method, settled.pricing, batch, self.max_k),
                without=allocation,
                longer_s=tried.step_s - allocation.step_s,
            )
        if self.calibration is None:
            return list(varied)
        return [self._measuring(plan) for plan in varied]

    def _stands(
        self, settled: ActivePlan, states: Sequence[RequestState], capacity: Capacity
    ) -> bool:
        """Whether what was settled is cut short, for the same requests, and nobody has drafted."""
        return settled.is_cut_short and not self._drafted and settled.holds(states, capacity)

    def _settle_anew(self, states: Sequence[RequestState], capacity: Capacity) -> ActivePlan:
        """The best plans by what is believed now."""
        self._num_settled += 1
        names = [state.request_id for state in states]
        scene = self.scenes.at(states)
        pricing = scene.pricing(self.config.catch_up / self.config.horizon)
        tpot_limits_s = [tpot_limit_s(state) for state in states]
        candidates = self._candidates(states, tpot_limits_s, pricing)
        room = allocator(candidates, pricing)
        max_nodes = max(0, capacity.max_rows - len(states))
        allocation = self._settle(candidates, room, max_nodes)
        rule = self._rule(allocation, pricing)
        plans = [
            plan_of(candidate.method, depth, rule, self._chosen.get(name, PLAIN))
            for name, candidate, depth in zip(names, candidates, allocation.depths, strict=True)
        ]
        is_plain = not any(allocation.depths)
        patience, last = 1, self._settled
        if last is not None and last.plans == plans and (is_plain or last.names == names):
            patience = min(PLAIN_PATIENCE if is_plain else MOST_PATIENCE, 2 * last.patience)
        return ActivePlan(
            names=names,
            tpot_limits_s=tpot_limits_s,
            plans=plans,
            max_rows=capacity.max_rows,
            patience=patience,
            candidates=candidates,
            pricing=pricing,
            allocation=allocation,
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Keep what is to be learnt of how far drafts came, and of what the step took."""
        if not records:
            return
        probe, self._probe = self._probe, None
        if probe is not None:
            self._observe_probe(probe, records)
        drafts = any([record.k_budget for record in records])
        cycle = records[0].cycle_id
        # Nobody drafts in a step that is not told, though it may have been somebody else's plan.
        self._num_plain = 0 if drafts else self._num_plain + max(1, cycle - self._last_cycle)
        self._last_cycle = cycle
        # Caches are cold for whatever was not done in the steps before.
        is_warm = self._drafted if drafts else self._num_plain > NUM_COLD
        is_steady = is_warm and probe is None and not records[0].num_prefill_rows
        self._drafted = drafts
        self._unread.append((list(records), is_steady))
        if len(self._unread) >= MOST_UNREAD:
            self._learn()

    def _learn(self) -> None:
        """From the steps that were kept."""
        stops = self.calibration is not None
        for records, is_steady in self._unread:
            for record in records:
                if record.k_budget:
                    self.beliefs.observe(record, DraftVariant(record.method, stops))
                    if self.calibration is not None:
                        self.calibration.observe(record)
            if is_steady:
                self.scenes.observe(records)
        self._unread.clear()

    def _candidates(
        self,
        states: Sequence[RequestState],
        tpot_limits_s: Sequence[float | None],
        pricing: Pricing,
    ) -> list[RequestCandidate]:
        late = None
        found = []
        for at, (state, limit_s) in enumerate(zip(states, tpot_limits_s, strict=True)):
            if limit_s is not None:
                late = late or self.scenes.step_time_ratios.p95
                limit_s /= late
            is_due = (self._num_settled + at) % ROUTE_EVERY == 0
            found.append(self._route(state, pricing, len(states), limit_s, is_due=is_due))
        return found

    def _route(
        self,
        state: RequestState,
        pricing: Pricing,
        batch: int,
        limit_s: float | None,
        *,
        is_due: bool,
    ) -> RequestCandidate:
        """The drafter of most expected length per cost, and what it is expected to do."""
        most = max(0, min(self.max_k, state.max_new - 1))
        stops = self.calibration is not None
        was = self._chosen.get(state.request_id, PLAIN)

        def candidate(method: str) -> RequestCandidate:
            curve = self.beliefs.curve(state, DraftVariant(method, stops), most)
            k = was.num_speculative_tokens if was.method == method else 0
            return RequestCandidate(method, curve, limit_s, k)

        def worth(candidate: RequestCandidate) -> float:
            switch_margin = 1.0 + self.config.hysteresis * (was.method == candidate.method)
            return switch_margin * SingleRequestAllocator(candidate, pricing, batch).best_rate

        if was.num_speculative_tokens and not is_due:
            return candidate(was.method)
        if len(self.methods) == 1:
            return candidate(self.methods[0])
        return max(map(candidate, self.methods), key=worth)

    def _settle(
        self, candidates: Sequence[RequestCandidate], room: Allocator, max_nodes: int
    ) -> Allocation:
        """The best allocation, or the last one where the best is hardly better."""
        best = room.best(max_nodes)
        last = tuple([min(c.was, len(c.curve.survival)) for c in candidates])
        if last == best.depths or sum(last) > max_nodes:
            return best
        kept = room.at(last)
        gains = best.tokens_per_s > kept.tokens_per_s * (1.0 + self.config.hysteresis)
        return best if gains or kept.lateness > max(1.0, best.lateness) else kept

    def _rule(self, allocation: Allocation, pricing: Pricing) -> StopRule | None:
        """Stops where one more node would not pay even if all before it were accepted."""
        if self.calibration is None:
            return None
        deepest, batch = max(allocation.depths), len(allocation.depths)
        if not deepest:
            return None
        method = self.methods[0]
        times = pricing.times[method]
        draft_s = times.draft_s[batch - 1] * pricing.draft_factors.get(method, 1.0)
        rows_s = times.verify_nodes_s(deepest * batch) - times.verify_s[0]
        node_s = (draft_s + rows_s / deepest * pricing.factor) / batch
        return self.calibration.rule(allocation.tokens_per_s * node_s)

    def _varied_price(
        self,
        states: Sequence[RequestState],
        candidates: Sequence[RequestCandidate],
        pricing: Pricing,
        plans: Sequence[Plan],
    ) -> Allocation:
        """What plans are expected to bring and take, catching up of probes apart."""
        trial = list(candidates)
        for at, (candidate, plan) in enumerate(zip(candidates, plans, strict=True)):
            if plan.num_speculative_tokens and plan.method != candidate.method:
                way = DraftVariant(plan.method, self.calibration is not None)
                curve = self.beliefs.curve(states[at], way, len(candidate.curve.survival))
                trial[at] = candidate._replace(method=plan.method, curve=curve)
        return allocator(trial, pricing).at([plan.num_speculative_tokens for plan in plans])

    def _measuring(self, plan: Plan) -> Plan:
        """Probes draft whatever they are allowed to, and measure."""
        assert self.calibration is not None
        return replace(plan, stop=self.calibration.at(0.0)) if plan.probe else plan

    def _observe_probe(self, probe: Probe, records: Sequence[StepRecord]) -> None:
        """See what a probe has cost and brought, where it was let.

        What the draft has to catch up with is in the time of the step and in no table.
        """
        probed = [r for r in records if r.k_budget and r.request_id in probe.names]
        if not probed:
            return
        way = DraftVariant(probed[0].method, self.calibration is not None)
        self.beliefs.fade(probed, way, IDLE_MEMORY**probe.num_idle)
        first, longer_s, without = records[0], probe.longer_s, probe.without
        if first.num_prefill_rows == 0:
            longer_s = first.draft_s + first.verify_s + first.other_s - without.step_s
        assert self._settled is not None
        names = self._settled.names
        emitted = sum([1 + r.num_accepted for r in records if r.request_id in names])
        loss = 1.0 + longer_s / without.step_s - emitted / without.tokens
        if probe.is_idle:
            came = fmean(map(share_right, probed))
            self.exploration.observe(probed[0].method, loss, came=came, needed=probe.needed)
        else:
            self.exploration.pay(loss)


def share_right(record: StepRecord) -> float:
    """Of what a probe has proposed, and of what it would have."""
    seen = (*(record.hindsight or ()), record.num_accepted)
    return sum(seen) / len(seen)


def plan_of(method: str, k: int, rule: StopRule | None, was: Plan) -> Plan:
    """A plan that is no probe: the last one where it is the same, which saves making it."""
    if not k:
        return PLAIN
    if was.num_speculative_tokens == k and was.method == method and was.stop == rule:
        return was
    return Plan.chain(method, k, stop=rule)
