"""Who drafts how deep: against all allocations, within rows, and nobody late because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.simulated import table

from forerun.control.allocation import (
    Allocation,
    BatchAllocator,
    Pricing,
    RequestCandidate,
    SingleRequestAllocator,
    allocator,
)
from forerun.control.beliefs import AcceptanceCurve
from forerun.control.step_times import CostCell, StepTimes

pytestmark = pytest.mark.usefixtures("unchecked")

DEEPEST = 3


def best_allocation(
    candidates: list[RequestCandidate], costs: Pricing, max_nodes: int
) -> Allocation:
    return allocator(candidates, costs).best(max_nodes)


def priced(candidates: list[RequestCandidate], costs: Pricing, depths: Sequence[int]) -> Allocation:
    return allocator(candidates, costs).at(depths)


BENT = {1: 0.02, 2: 0.14, 3: 0.05}
"""A second level that costs more than its draft pass, and a third that costs less."""


def candidate(
    alpha: float, *, limit_s: float | None = None, was: int = DEEPEST
) -> RequestCandidate:
    survival = [alpha ** (depth + 1) for depth in range(DEEPEST)]
    return RequestCandidate(
        method="d", curve=AcceptanceCurve(survival, [1.0] * DEEPEST), limit_s=limit_s, was=was
    )


def pricing(batch: int, **changes: float | Mapping[int, float]) -> Pricing:
    costs = table(batches=(1, batch) if batch > 1 else (1,), **changes)
    return Pricing(times={"d": StepTimes.read(costs, CostCell(batch, 0), DEEPEST)})


@given(
    alphas=st.lists(st.floats(0.05, 0.95), min_size=1, max_size=3),
    draft=st.sampled_from([0.01, 0.1, 0.4]),
    row=st.sampled_from([0.0, 0.02, 0.2]),
    overhead=st.sampled_from([0.05, 0.6, BENT]),
)
@example(alphas=[0.578125, 0.109375], draft=0.1, row=0.02, overhead=0.05)
def test_hardly_any_other_allocation_is_faster(alphas, draft, row, overhead):
    candidates = [candidate(alpha) for alpha in alphas]
    costs = pricing(len(alphas), draft=draft, row=row, overhead=overhead)
    found = best_allocation(candidates, costs, 100)
    ways = product(range(DEEPEST + 1), repeat=len(alphas))
    best = max(priced(candidates, costs, way).tokens_per_s for way in ways)
    assert found.tokens_per_s >= 0.999 * best


def test_one_request_gets_the_k_of_highest_speedup():
    found = best_allocation([candidate(0.8)], pricing(1), 100)
    rates = [priced([candidate(0.8)], pricing(1), [k]).tokens_per_s for k in range(DEEPEST + 1)]
    assert found.tokens_per_s == max(rates)


@given(rows=st.integers(0, 12))
def test_no_more_nodes_than_rows(rows):
    found = best_allocation([candidate(0.9), candidate(0.8), candidate(0.7)], pricing(3), rows)
    assert sum(found.depths) <= rows


def test_who_is_accepted_more_drafts_deeper():
    first, second = best_allocation([candidate(0.9), candidate(0.3)], pricing(2), 4).depths
    assert first > second


def test_what_does_not_pay_is_not_drafted():
    assert best_allocation([candidate(0.1)], pricing(1), 100).depths == (0,)


def test_where_rows_cost_what_steps_cost_decoding_is_plain():
    """A compute-bound pass: twice the rows take twice the time."""
    crowd = [candidate(0.8) for _ in range(16)]
    assert best_allocation(crowd, pricing(16, row=1.0), 1000).depths == (0,) * 16
    assert sum(best_allocation(crowd, pricing(16, row=0.001), 1000).depths) > 16


def test_nobody_is_made_late_by_the_drafts_of_others():
    tight = candidate(0.05, limit_s=0.0108)
    eager = candidate(0.95)
    alone = best_allocation([candidate(0.05), eager], pricing(2), 100)
    assert alone.depths[1] > 0
    assert alone.step_s > 0.0108 * 1.05
    careful = best_allocation([tight, eager], pricing(2), 100)
    assert careful.lateness <= 1.0


def test_where_plain_is_too_slow_what_helps_is_allowed():
    wish = candidate(0.9, limit_s=0.005)
    found = best_allocation([wish], pricing(1), 100)
    plain = priced([wish], pricing(1), [0])
    assert plain.lateness > 1.0
    assert found.depths[0] > 0
    assert found.lateness < plain.lateness


def test_two_drafters_pay_both_their_overheads():
    costs = pricing(2)
    both = Pricing(times={"d": costs.times["d"], "e": costs.times["d"]})
    other = RequestCandidate(method="e", curve=candidate(0.8).curve, was=1)
    together = priced([candidate(0.8), candidate(0.8)], both, [1, 1])
    apart = priced([candidate(0.8), other], both, [1, 1])
    times = costs.times["d"]
    extra = apart.step_s - together.step_s
    assert extra == pytest.approx(times.overhead_s[1] + 2 * times.draft_s[0] - times.draft_s[1])


@pytest.mark.parametrize("was", [0, 2])
@pytest.mark.parametrize("drafted", [1.0, 0.9])
def test_one_request_is_priced_as_a_crowd_of_one(was, drafted):
    curve = AcceptanceCurve([0.7, 0.5, 0.3], [drafted, drafted**2, drafted**3])
    one = [RequestCandidate(method="d", curve=curve, limit_s=0.008, was=was)]
    costs = pricing(1, overhead=BENT)._replace(factor=1.2, plain_factor=0.9, draft_factors={"d": 2})
    crowd = BatchAllocator(one, costs)
    for number in range(5):
        assert same(allocator(one, costs).at([number]), crowd.at([number]))
        assert same(allocator(one, costs).best(number), crowd.best(number))


@pytest.mark.parametrize("kind", [SingleRequestAllocator, BatchAllocator])
def test_certain_drafts_are_priced_as_the_table_says(kind):
    costs = table(overhead=BENT)
    place = CostCell(1, 0)
    times = {"d": StepTimes.read(costs, place, DEEPEST)}
    one = candidate(0.8)
    priced = (
        SingleRequestAllocator(one, Pricing(times))
        if kind is SingleRequestAllocator
        else BatchAllocator([one], Pricing(times))
    )
    for k in range(DEEPEST + 1):
        assert priced.at([k]).step_s == pytest.approx(costs.cycle_s(k, place.context))


def test_a_crowd_pays_the_overhead_of_its_deepest_draft():
    costs = table(batches=(1, 3), overhead=BENT)
    place = CostCell(3, 0)
    times = StepTimes.read(costs, place, DEEPEST)
    found = priced([candidate(0.8)] * 3, Pricing({"d": times}), [3, 1, 0])
    draft_s = times.draft_s[1] + 2 * times.draft_s[0]
    rest_s = times.verify_nodes_s(4) + costs.overhead_s(3, place.context, 3)
    assert found.step_s == pytest.approx(draft_s + rest_s)


def same(one: Allocation, other: Allocation) -> bool:
    return one.depths == other.depths and one[1:4] == pytest.approx(other[1:4])
