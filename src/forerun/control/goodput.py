"""Goodput: the K of every request that makes most expected tokens per second of the whole step.

Source of the objective: SmartSpec (Liu et al. 2024, 2406.14066). Here acceptance is a posterior per
position and request, times are a measured cost table corrected by the steps themselves, and the
rows of a batch go to whoever gains most by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from forerun.control.allocation import Allocation, Candidate, Pricing, best_allocation, priced
from forerun.control.base import Capacity, Plan, RequestState
from forerun.control.beliefs import Beliefs, Curve, Way
from forerun.control.calibration import Calibration
from forerun.control.config import GoodputConfig
from forerun.control.exploration import Exploration
from forerun.control.punctuality import Punctuality, wish_s
from forerun.control.step_times import Correction, Costs, Factor, Place, StepTimes, Tables
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule

__all__ = ["GoodputController"]

PLAIN = Plan()


class Scene(NamedTuple):
    """What a step is decided in.

    Attributes:
        place: its batch and context.
        times: by method.
        correction: of those times.
    """

    place: Place
    times: dict[str, StepTimes]
    correction: Correction


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
        self.tables = Tables(costs, max_k)
        self.beliefs = Beliefs(self.config.beliefs)
        self.exploration = Exploration(self.config)
        self.punctuality = Punctuality()
        stop = self.config.stop
        self.calibration = None if stop is None else Calibration(stop)
        self._corrections: dict[int, Correction] = {}
        self._chosen: dict[str, Plan] = {}
        self._asked: dict[str, Plan] = {}
        self._scene: Scene | None = None
        self._probe: Probe | None = None

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """The best plans, or now and then ones that are worth learning from."""
        if not states:
            return []
        scene = self._look(states)
        candidates = self._candidates(states, scene)
        pricing = self._pricing(scene)
        max_nodes = max(0, capacity.max_rows - len(states))
        allocation = self._settle(candidates, pricing, max_nodes)
        rule = self._rule(allocation, scene)
        plans = [
            Plan(method=candidate.method, num_speculative_tokens=depth, stop=rule)
            if depth
            else PLAIN
            for candidate, depth in zip(candidates, allocation.depths, strict=True)
        ]
        names = [state.request_id for state in states]
        self._chosen = dict(zip(names, plans, strict=True))
        most = [len(candidate.curve.survival) for candidate in candidates]

        def missed(at: int) -> int:
            return self.beliefs.missed(states[at])

        plans = self.exploration.varied(plans, most, missed, self.methods, max_nodes)
        self._probe = None
        if probed := self.exploration.probed:
            self._probe = Probe(
                names=frozenset(names[at] for at in probed),
                tokens=allocation.tokens,
                step_s=allocation.step_s,
                longer_s=longer_s(candidates, pricing, allocation, probed, plans),
            )
        if self.calibration is not None:
            plans = [self._measuring(plan) for plan in plans]
        self._asked = dict(zip(names, plans, strict=True))
        return plans

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Learn how far drafts came, and what the step took."""
        self._observe_probe(records)
        for record in records:
            plan = self._asked.get(record.request_id)
            if plan is None or record.k_budget == 0:
                continue
            self.beliefs.observe(record, Way(plan.method, plan.stop is not None))
            if self.calibration is not None:
                self.calibration.observe(record)
        if records and records[0].num_prefill_rows == 0:
            self._observe_time(records)

    def _look(self, states: Sequence[RequestState]) -> Scene:
        batch = len(states)
        place = Place.of(batch, sum(state.num_committed for state in states) / batch)
        greedy = all(state.temperature == 0 for state in states)
        correction = self._corrections.get(batch)
        if correction is None:
            correction = self._corrections[batch] = Correction()
        times = {method: self.tables.at(method, place, greedy=greedy) for method in self.methods}
        self._scene = Scene(place=place, times=times, correction=correction)
        return self._scene

    def _pricing(self, scene: Scene) -> Pricing:
        correction = scene.correction
        return Pricing(
            times=scene.times,
            plain_factor=correction.plain_factor,
            factor=correction.speculative_factor,
            draft_factors={method: correction.draft_factor(method) for method in correction.drafts},
            catch_up=self.config.catch_up / self.config.horizon,
        )

    def _candidates(self, states: Sequence[RequestState], scene: Scene) -> list[Candidate]:
        late = None
        found = []
        for state in states:
            limit_s = wish_s(state)
            if limit_s is not None:
                late = late or self.punctuality.p95
                limit_s /= late
            was = self._chosen.get(state.request_id, PLAIN)
            method, curve = self._route(state, scene, was)
            k = was.num_speculative_tokens if was.method == method else 0
            found.append(Candidate(method=method, curve=curve, limit_s=limit_s, was=k))
        return found

    def _route(self, state: RequestState, scene: Scene, was: Plan) -> tuple[str, Curve]:
        """The drafter of most expected length per cost, and what it is expected to do."""
        most = max(0, min(self.max_k, state.max_new - 1))
        stops = self.config.stop is not None
        curves = {m: self.beliefs.curve(state, Way(m, stops), most) for m in self.methods}
        if len(curves) == 1:
            return next(iter(curves.items()))

        def worth(method: str) -> float:
            loyalty = 1.0 + self.config.hysteresis * (was.method == method)
            return loyalty * solo_rate(curves[method], scene.times[method], scene.place.batch)

        method = max(curves, key=worth)
        return method, curves[method]

    def _settle(
        self, candidates: Sequence[Candidate], pricing: Pricing, max_nodes: int
    ) -> Allocation:
        """The best allocation, or the last one where the best is hardly better."""
        best = best_allocation(candidates, pricing, max_nodes)
        last = tuple(min(c.was, len(c.curve.survival)) for c in candidates)
        if last == best.depths or sum(last) > max_nodes:
            return best
        kept = priced(candidates, pricing, last)
        gains = best.tokens_per_s > kept.tokens_per_s * (1.0 + self.config.hysteresis)
        return best if gains or kept.lateness > max(1.0, best.lateness) else kept

    def _rule(self, allocation: Allocation, scene: Scene) -> StopRule | None:
        """Stops where one more node would not pay even if all before it were accepted."""
        deepest = max(allocation.depths)
        if self.calibration is None or not deepest:
            return None
        method = next(iter(scene.times))
        times, batch = scene.times[method], scene.place.batch
        correction = scene.correction
        draft_s = times.draft_s[batch - 1] * correction.draft_factor(method)
        rows_s = times.verify_nodes_s(deepest * batch) - times.verify_s[0]
        node_s = (draft_s + rows_s / deepest * correction.speculative_factor) / batch
        return self.calibration.rule(allocation.tokens_per_s * node_s)

    def _measuring(self, plan: Plan) -> Plan:
        """Probes draft whatever they are allowed to, and measure."""
        assert self.calibration is not None
        return replace(plan, stop=self.calibration.at(0.0)) if plan.probe else plan

    def _observe_probe(self, records: Sequence[StepRecord]) -> None:
        """See what a probe has cost and brought, where it was let.

        What the draft has to catch up with is in the time of the step and in no table.
        """
        probe = self._probe
        if probe is None:
            return
        accepted = [r.num_accepted for r in records if r.k_budget and r.request_id in probe.names]
        if not accepted:
            return
        first, spent_s = records[0], probe.longer_s
        if first.num_prefill_rows == 0:
            spent_s = first.draft_s + first.verify_s + first.other_s - probe.step_s
        self.exploration.observe(spent_s / probe.step_s - sum(accepted) / probe.tokens)

    def _observe_time(self, records: Sequence[StepRecord]) -> None:
        """Compare what the step took with what the table says of it."""
        scene, first = self._scene, records[0]
        if scene is None or len(records) != scene.place.batch:
            return
        rest_s = first.verify_s + first.other_s
        if rest_s <= 0.0:
            return
        depths = {
            method: drafted
            for method in self.methods
            if (
                drafted := [
                    r.depth_drafted for r in records if r.method == method and r.num_drafted
                ]
            )
        }
        correction = scene.correction
        draft_s, expected_s = expected_times(depths, scene)
        if not depths:
            self.punctuality.observe(rest_s, expected_s * correction.plain_factor)
            correction.plain.observe(rest_s, expected_s)
            return
        believed_s = expected_s * correction.speculative_factor + sum(
            seconds * correction.draft_factor(method) for method, seconds in draft_s.items()
        )
        self.punctuality.observe(first.draft_s + rest_s, believed_s)
        correction.speculative.observe(rest_s, expected_s)
        # Else nobody knows whose time it was, or it was that of catching up.
        if len(depths) == 1 and first.draft_s > 0.0 and self._probe is None:
            (method,) = depths
            if draft_s[method] > 0.0:
                correction.drafts.setdefault(method, Factor()).observe(
                    first.draft_s, draft_s[method]
                )


def longer_s(
    candidates: Sequence[Candidate],
    pricing: Pricing,
    allocation: Allocation,
    probed: Sequence[int],
    plans: Sequence[Plan],
) -> float:
    """By how much probing is expected to make a step longer, catching up apart.

    Args:
        candidates: the requests of the step.
        pricing: what steps take.
        allocation: what they would draft without probing.
        probed: those of them that probe, by their place.
        plans: of all of them.
    """
    probing, depths = list(candidates), list(allocation.depths)
    for at in probed:
        probing[at] = probing[at]._replace(method=plans[at].method)
        depths[at] = plans[at].num_speculative_tokens
    return priced(probing, pricing, depths).step_s - allocation.step_s


def solo_rate(curve: Curve, times: StepTimes, batch: int) -> float:
    """Tokens per second and sequence at the best K, were all sequences like this one."""
    best, tokens, depth = 1.0 / times.plain_s, 1.0, 0.0
    for survived, drafted in zip(curve.survival, curve.drafted, strict=True):
        tokens += survived
        depth += drafted
        best = max(best, tokens / times.cycle_s(depth, batch))
    return best


def expected_times(
    depths: Mapping[str, Sequence[int]], scene: Scene
) -> tuple[dict[str, float], float]:
    """What the table says of a step.

    Args:
        depths: levels drafted by every request that did, by method.
        scene: of the step.

    Returns:
        Seconds of drafting by method, and of everything else.
    """
    if not depths:
        return {}, next(iter(scene.times.values())).plain_s
    draft_s = {
        method: sum(
            scene.times[method].draft_s[sum(depth > level for depth in drafted) - 1]
            for level in range(max(drafted))
        )
        for method, drafted in depths.items()
    }
    num_nodes = sum(map(sum, depths.values()))
    verify_s = next(iter(scene.times.values())).verify_nodes_s(num_nodes)
    return draft_s, verify_s + sum(scene.times[method].overhead_s for method in depths)
