"""Goodput: the K of every request that makes most expected tokens per second of the whole step.

Source of the objective: SmartSpec (Liu et al. 2024, 2406.14066). Here acceptance is a posterior per
position and request, times are a measured cost table corrected by the steps themselves, and the
rows of a batch go to whoever gains most by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from forerun.control.allocation import Allocator, allocator
from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.beliefs import Beliefs, Way
from forerun.control.calibration import Calibration
from forerun.control.config import GoodputConfig
from forerun.control.exploration import Exploration
from forerun.control.ladder import Ladder
from forerun.control.pricing import Allocation, Candidate, Pricing
from forerun.control.punctuality import wish_s
from forerun.control.scenes import Scenes
from forerun.control.step_times import Costs
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule

__all__ = ["GoodputController"]

PLAIN = Plan()
ROUTE_EVERY = 4
"""Steps after which the drafter of a request is chosen anew; what it rests on changes slowly."""


class Probe(NamedTuple):
    """Requests that draft a token to see how it fares.

    Attributes:
        names: of the requests.
        tokens: expected of the step without it.
        step_s: expected of the step without it.
        longer_s: by how much it is expected to be longer.
    """

    names: frozenset[str]
    tokens: float
    step_s: float
    longer_s: float


class GoodputController:
    """Chooses K per request, 0 included, and between drafters where there are several.

    Args:
        costs: of every drafter that may be planned, by its method.
        max_k: largest K.
        config: how.
    """

    def __init__(
        self, costs: Mapping[str, Costs], max_k: int, config: GoodputConfig | None = None
    ) -> None:
        self.config = config or GoodputConfig()
        self.methods = tuple(costs)
        self.max_k = max_k
        self.scenes = Scenes(costs, max_k)
        self.beliefs = Beliefs(self.config.beliefs)
        self.exploration = Exploration(self.config)
        stop = self.config.stop
        self.calibration = None if stop is None else Calibration(stop)
        self._chosen: dict[str, Plan] = {}
        self._asked: dict[str, Plan] = {}
        self._probe: Probe | None = None

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """The best plans, or now and then ones that are worth learning from."""
        if not states:
            return []
        scene = self.scenes.at(states)
        pricing = scene.pricing(self.config.catch_up / self.config.horizon)
        candidates = self._candidates(states, pricing)
        room = allocator(candidates, pricing)
        max_nodes = max(0, capacity.max_rows - len(states))
        allocation = self._settle(candidates, room, max_nodes)
        rule = self._rule(allocation, pricing)
        plans = [
            plan_of(candidate.method, depth, rule, self._chosen.get(state.request_id, PLAIN))
            for state, candidate, depth in zip(states, candidates, allocation.depths, strict=True)
        ]
        names = [state.request_id for state in states]
        self._chosen = self._asked = dict(zip(names, plans, strict=True))
        most = [len(candidate.curve.survival) for candidate in candidates]

        def missed(at: int) -> int:
            return self.beliefs.missed(states[at])

        varied = self.exploration.varied(plans, most, missed, self.methods, max_nodes)
        self._probe = None
        if varied is plans:
            return plans
        if probed := self.exploration.probed:
            longer_s = probing_s(candidates, pricing, varied, probed) - allocation.step_s
            tokens, step_s = allocation.tokens, allocation.step_s
            self._probe = Probe(frozenset(names[at] for at in probed), tokens, step_s, longer_s)
        if self.calibration is not None:
            varied = [self._measuring(plan) for plan in varied]
        self._asked = dict(zip(names, varied, strict=True))
        return varied

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn how far drafts came, and what the step took."""
        if not records:
            return
        probe = self._probe
        if probe is not None:
            self._observe_probe(probe, records)
        for record in records:
            plan = self._asked.get(record.request_id)
            if plan is None or record.k_budget == 0:
                continue
            self.beliefs.observe(record, Way(plan.method, plan.stop is not None))
            if self.calibration is not None:
                self.calibration.observe(record)
        if records[0].num_prefill_rows == 0:
            # A probe catches up with what the draft has missed, which is in no table.
            self.scenes.observe(records, draft_counts=probe is None)

    def _candidates(self, states: Sequence[RequestState], pricing: Pricing) -> list[Candidate]:
        late = None
        found = []
        for at, state in enumerate(states):
            limit_s = wish_s(state)
            if limit_s is not None:
                late = late or self.scenes.punctuality.p95
                limit_s /= late
            is_due = (self.exploration.num_steps + at) % ROUTE_EVERY == 0
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
    ) -> Candidate:
        """The drafter of most expected length per cost, and what it is expected to do."""
        most = max(0, min(self.max_k, state.max_new - 1))
        stops = self.calibration is not None
        was = self._chosen.get(state.request_id, PLAIN)

        def candidate(method: str) -> Candidate:
            curve = self.beliefs.curve(state, Way(method, stops), most)
            k = was.num_speculative_tokens if was.method == method else 0
            return Candidate(method, curve, limit_s, k)

        def worth(candidate: Candidate) -> float:
            loyalty = 1.0 + self.config.hysteresis * (was.method == candidate.method)
            return loyalty * Ladder(candidate, pricing, batch).best_rate

        if was.num_speculative_tokens and not is_due:
            return candidate(was.method)
        if len(self.methods) == 1:
            return candidate(self.methods[0])
        return max(map(candidate, self.methods), key=worth)

    def _settle(
        self, candidates: Sequence[Candidate], room: Allocator, max_nodes: int
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

    def _measuring(self, plan: Plan) -> Plan:
        """Probes draft whatever they are allowed to, and measure."""
        assert self.calibration is not None
        return replace(plan, stop=self.calibration.at(0.0)) if plan.probe else plan

    def _observe_probe(self, probe: Probe, records: Sequence[StepRecord]) -> None:
        """See what a probe has cost and brought, where it was let.

        What the draft has to catch up with is in the time of the step and in no table.
        """
        accepted = [r.num_accepted for r in records if r.k_budget and r.request_id in probe.names]
        if not accepted:
            return
        first, spent_s = records[0], probe.longer_s
        if first.num_prefill_rows == 0:
            spent_s = first.draft_s + first.verify_s + first.other_s - probe.step_s
        self.exploration.observe(spent_s / probe.step_s - sum(accepted) / probe.tokens)


def plan_of(method: str, k: int, rule: StopRule | None, was: Plan) -> Plan:
    """A plan that is no probe: the last one where it is the same, which saves making it."""
    if not k:
        return PLAIN
    if was.num_speculative_tokens == k and was.method == method and was.stop == rule:
        return was
    return Plan(method=method, num_speculative_tokens=k, stop=rule)


def probing_s(
    candidates: Sequence[Candidate], pricing: Pricing, plans: Sequence[Plan], probed: Sequence[int]
) -> float:
    """What a step with probes is expected to take, catching up apart.

    Args:
        candidates: the requests of the step.
        pricing: what steps take.
        plans: of all of them.
        probed: those of them that probe, by their place.
    """
    probing = list(candidates)
    for at in probed:
        probing[at] = probing[at]._replace(method=plans[at].method)
    return allocator(probing, pricing).at([plan.num_speculative_tokens for plan in plans]).step_s
