"""Controller that maximises expected tokens per second by the choice of K for every request.

Source of the objective: SmartSpec (Liu et al. 2024, 2406.14066). Here acceptance is a posterior per
position and request, times come from a profile or from the steps themselves, and the rows of a
batch go to the requests that gain most by them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.control.allocation import (
    Allocation,
    Allocator,
    Pricing,
    RequestCandidate,
    SingleRequestAllocator,
    TreeLevels,
    allocator,
    best_tree,
)
from forerun.control.base import USUAL_WIDTH, Capacity, Plan, RequestState, Tree
from forerun.control.beliefs import Beliefs, DraftVariant
from forerun.control.calibration import Calibration
from forerun.control.config import (
    DEEPEST_TREE,
    DRAFTING_REUSE,
    LOGGED_AFTER,
    NUM_COLD,
    PLAIN_REUSE,
    TPOT_TOLERANCE,
    GoodputConfig,
)
from forerun.control.learned_costs import LearnedCosts
from forerun.control.probes import Probes
from forerun.control.profiled_costs import ProfiledCosts
from forerun.control.step_times import CostSource
from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule

__all__ = ["GoodputController"]

logger = logging.getLogger("forerun.control")

PLAIN = Plan()


@dataclass(slots=True, kw_only=True, eq=False)
class ActivePlan:
    """Plans that are reused for several steps, and the conditions under which they stay valid.

    Attributes:
        names: of the requests.
        limits_s: seconds per token that each request must stay below; None without a target.
        plans: one per request; this very list is returned while the plans are reused.
        max_rows: rows of the pass that there was room for.
        allocation: what is expected of a step.
        room: prices other depths for the same requests.
        reuse: steps that the plans are reused for; it doubles while decisions come out the same.
        steps_left: of them.
    """

    names: list[str]
    limits_s: list[float | None]
    plans: list[Plan]
    max_rows: int
    allocation: Allocation
    room: Allocator
    reuse: int = 1
    steps_left: int = 0

    @property
    def drafts(self) -> bool:
        """Whether any request drafts."""
        return any(self.allocation.depths)

    def serves(self, states: Sequence[RequestState], capacity: Capacity) -> bool:
        """Whether requests, room and time targets are still those for which the plans were made."""
        if self.max_rows != capacity.max_rows or len(states) != len(self.names):
            return False
        for state, name, plan, limit_s in zip(
            states, self.names, self.plans, self.limits_s, strict=True
        ):
            if state.request_id != name or state.max_new <= plan.shape.depth:
                return False
            if limit_s is None and state.tpot_target_s is None and state.time_left_s is None:
                continue
            now_s = tpot_limit_s(state)
            if now_s is None or limit_s is None or now_s < TPOT_TOLERANCE * limit_s:
                return False
        return True


class GoodputController:
    """Chooses K per request, which may be 0, and the drafter if there are several.

    Args:
        costs: cost tables by the name of the drafter, or a model that learns costs from steps.
        max_k: largest K.
        config: settings.
        tree_methods: drafters that propose trees; a tree is planned where it is expected to be
            faster than every chain.
        max_tree_nodes: most nodes of a tree; the largest K where that is more.
    """

    def __init__(
        self,
        costs: Mapping[str, CostSource] | LearnedCosts,
        max_k: int,
        config: GoodputConfig | None = None,
        tree_methods: Sequence[str] = (),
        max_tree_nodes: int = 0,
    ) -> None:
        self.config = config or GoodputConfig()
        self.max_k = max_k
        self.costs = (
            costs
            if isinstance(costs, LearnedCosts)
            else ProfiledCosts(costs, max_k, max_tree_nodes)
        )
        self.methods = self.costs.methods
        self.tree_methods = tree_methods
        self.beliefs = Beliefs(self.config.beliefs)
        stop = self.config.stop
        self.calibration = None if stop is None else Calibration(stop)
        self._active: ActivePlan | None = None
        self._probes = Probes(self.config, self.methods, max_k)
        self._probed: list[Plan] | None = None
        self._chosen: dict[str, Plan] = {}
        self._num_plain = 0
        self._has_drafted = self._drafted = self._is_logged = False

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """Return reused plans, or decide new ones; a small share of the plans are probes."""
        if not states:
            return []
        active = self._active
        self._probed = None
        if active is not None and active.steps_left > 0 and active.serves(states, capacity):
            active.steps_left -= 1
            return active.plans
        active = self._active = self._decide_anew(states, capacity)
        probes = self._probes
        room = capacity.max_rows - len(states) - sum(active.allocation.depths)
        self._probed = probes.plans(active.plans, states, room, self.beliefs.num_unread)
        if self._probed is not None:
            active.steps_left = 0
            probes.expect(self._probed, active.plans, active.allocation, active.room)
            if self.calibration is not None:
                measured = self.calibration.at(0.0)
                self._probed = [replace(p, stop=measured) if p.probe else p for p in self._probed]
            return self._probed
        active.steps_left = min(active.reuse, probes.steps_left(active.drafts)) - 1
        return active.plans

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Update acceptance and cost estimates from the records of a step."""
        if not records:
            return
        drafts = False
        for record in records:
            if record.k_budget:
                drafts = True
                self.beliefs.observe(record, self._variant(record.method))
                if self.calibration is not None:
                    self.calibration.observe(record)
        first = records[0]
        # The first steps after a change between drafting and plain decoding find cold caches.
        was_warm = self._drafted if drafts else self._num_plain >= NUM_COLD
        self._num_plain = 0 if drafts else self._num_plain + 1
        self._drafted = drafts
        if not first.num_prefill_rows and (was_warm or not self._has_drafted or drafts):
            self.costs.observe(records)
        probed, active = self._probed, self._active
        self._has_drafted = self._has_drafted or drafts
        self._probes.pass_step(self._num_plain, has_drafted=self._has_drafted)
        if probed is not None and active is not None and not first.num_prefill_rows:
            self._probes.charge(probed, records, active.allocation)
        self._log(active)

    def _decide_anew(self, states: Sequence[RequestState], capacity: Capacity) -> ActivePlan:
        """Choose the best plans from the present estimates."""
        last = self._active
        names = [state.request_id for state in states]
        limits_s = [tpot_limit_s(state) for state in states]
        pricing = self.costs.pricing(states)
        candidates = [
            self._candidate(state, pricing, len(states), limit_s)
            for state, limit_s in zip(states, limits_s, strict=True)
        ]
        max_nodes = max(0, capacity.max_rows - len(states))
        room = allocator(candidates, pricing)
        allocation = self._choose(candidates, room, max_nodes)
        tree = self._best_tree(states, candidates, pricing, max_nodes)
        if tree is not None and self._prefers(tree, allocation):
            allocation = tree
        plans = self._plans(candidates, allocation, pricing)
        self._chosen = dict(zip(names, plans, strict=True))
        reuse = 1
        if last is not None and last.names == names:
            both_trees = allocation.tree is not None and last.allocation.tree is not None
            # The best number of nodes moves by one or two with every estimate.
            reuse = 2 * last.reuse if last.plans == plans or both_trees else 1
        most = DRAFTING_REUSE if any(allocation.depths) else PLAIN_REUSE
        return ActivePlan(
            names=names,
            limits_s=limits_s,
            plans=plans if last is None or last.plans != plans else last.plans,
            max_rows=capacity.max_rows,
            allocation=allocation,
            room=room,
            reuse=max(1, min(reuse, most, min(state.max_new for state in states))),
        )

    def _variant(self, method: str) -> DraftVariant:
        return DraftVariant(method, self.calibration is not None)

    def _candidate(
        self, state: RequestState, pricing: Pricing, batch: int, limit_s: float | None
    ) -> RequestCandidate:
        """Return the drafter with the most expected tokens per second, with its estimates."""
        was = self._chosen.get(state.request_id, PLAIN)

        def candidate(method: str) -> RequestCandidate:
            variant = self._variant(method)
            most = min(self.costs.largest_depth(method, batch), state.max_new - 1)
            if not self.beliefs.has_seen(state, variant):
                most = min(most, 1)  # a draft of which nothing is known begins with one token
            curve = self.beliefs.curve(state, variant, max(0, most))
            k = was.shape.depth if was.method == method else 0
            return RequestCandidate(method, curve, limit_s, k)

        def rate(candidate: RequestCandidate) -> float:
            stays = was.method == candidate.method
            margin = 1.0 + self.config.switch_margin * stays
            return margin * SingleRequestAllocator(candidate, pricing, batch).best_rate

        if len(self.methods) == 1:
            return candidate(self.methods[0])
        return max(map(candidate, self.methods), key=rate)

    def _choose(
        self, candidates: Sequence[RequestCandidate], room: Allocator, max_nodes: int
    ) -> Allocation:
        """Return the best allocation, or the last one unless the best exceeds it by a margin."""
        best = room.best(max_nodes)
        last = tuple([min(c.was, len(c.curve.survival)) for c in candidates])
        if last == best.depths or sum(last) > max_nodes:
            return best
        kept = room.at(last)
        gains = best.tokens_per_s > kept.tokens_per_s * (1.0 + self.config.switch_margin)
        return best if gains or kept.lateness > max(1.0, best.lateness) else kept

    def _best_tree(
        self,
        states: Sequence[RequestState],
        candidates: Sequence[RequestCandidate],
        pricing: Pricing,
        max_nodes: int,
    ) -> Allocation | None:
        """Return the best trees for all requests; None if one of them cannot have a tree."""
        batch = len(states)
        found: list[Allocation] = []
        for method in self.tree_methods:
            variant = self._variant(method)
            depth = min(DEEPEST_TREE, self.max_k, min(state.max_new for state in states) - 1)
            usable = all(s.allows_trees and self.beliefs.has_seen(s, variant) for s in states)
            if not usable or depth < 1 or self.calibration is not None:
                continue
            curves = [self.beliefs.curve(state, variant, depth) for state in states]
            most = self.costs.largest_tree(batch)
            for levels in range(1, depth + 1):
                shape = Tree(num_nodes=most, depth=levels, width=USUAL_WIDTH)
                survival = [
                    self.beliefs.tree_survival(state, curve, method, shape)
                    for state, curve in zip(states, curves, strict=True)
                ]
                found.append(best_tree(TreeLevels(method, levels), survival, pricing, max_nodes))
        trees = [allocation for allocation in found if allocation.tree is not None]
        if not trees or any(candidate.limit_s is not None for candidate in candidates):
            return None
        return max(trees, key=lambda allocation: allocation.tokens_per_s)

    def _prefers(self, tree: Allocation, chain: Allocation) -> bool:
        """Whether trees are expected to exceed chains by the margin for a change of shape."""
        margin = 1.0 + self.config.switch_margin
        active = self._active
        if active is not None and active.allocation.tree is not None:
            return tree.tokens_per_s * margin > chain.tokens_per_s
        return tree.tokens_per_s > chain.tokens_per_s * margin

    def _plans(
        self, candidates: Sequence[RequestCandidate], allocation: Allocation, pricing: Pricing
    ) -> list[Plan]:
        """Convert an allocation to plans."""
        tree = allocation.tree
        if tree is not None:
            return [
                Plan(
                    method=tree.method,
                    shape=Tree(num_nodes=nodes, depth=tree.depth, width=USUAL_WIDTH),
                )
                if nodes
                else PLAIN
                for nodes in allocation.depths
            ]
        rule = self._rule(allocation, pricing)
        return [
            Plan.chain(candidate.method, depth, stop=rule) if depth else PLAIN
            for candidate, depth in zip(candidates, allocation.depths, strict=True)
        ]

    def _rule(self, allocation: Allocation, pricing: Pricing) -> StopRule | None:
        """Return the stop rule that ends a draft when one more node would not raise throughput."""
        deepest, batch = max(allocation.depths), len(allocation.depths)
        if self.calibration is None or not deepest:
            return None
        method = self.methods[0]
        times = pricing.times[method]
        draft_s = times.draft_s[batch - 1] * pricing.draft_factors.get(method, 1.0)
        rows_s = times.verify_nodes_s(deepest * batch) - times.verify_s[0]
        node_s = (draft_s + rows_s / deepest * pricing.factor) / batch
        return self.calibration.rule(allocation.tokens_per_s * node_s)

    def _log(self, active: ActivePlan | None) -> None:
        """Log once that drafting was stopped, with the reason."""
        if self._is_logged or active is None or self._num_plain != LOGGED_AFTER:
            return
        if self._has_drafted and not active.drafts:
            self._is_logged = True
            logger.warning(
                "drafting with %s is slower than plain decoding at present, so decoding goes on "
                "plainly; a short draft checks now and then whether it pays again",
                " or ".join(self.methods),
            )


def tpot_limit_s(state: RequestState) -> float | None:
    """Return the seconds per token a request must stay below; None without a time target.

    A deadline is met if every token that may still be emitted comes in time.
    """
    target_s, left_s = state.tpot_target_s, state.time_left_s
    if left_s is None or state.max_new <= 0:
        return target_s
    in_time_s = max(left_s, 1e-9) / state.max_new
    return in_time_s if target_s is None else min(target_s, in_time_s)
