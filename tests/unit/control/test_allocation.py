"""Who drafts how deep: against all allocations, within rows, and nobody late because of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.simulated import table

from forerun.control.acceptance import AcceptanceCurve
from forerun.control.allocation import (
    Allocation,
    RequestCandidate,
    best_chains,
    chain_values,
    growing,
)
from forerun.control.costs import OperatingPoint, StepTimes

pytestmark = pytest.mark.usefixtures("unchecked")

DEEPEST = 3
Times = Mapping[str, StepTimes]


def priced(candidates: list[RequestCandidate], times: Times, depths: Sequence[int]) -> Allocation:
    """The expected outcome at given depths."""
    nodes = [
        (-survived, depth, index)
        for index, (candidate, wanted) in enumerate(zip(candidates, depths, strict=True))
        for depth, survived in enumerate(candidate.curve.survival[:wanted])
    ]
    own = times[candidates[0].method]
    if not nodes:
        return Allocation(tuple(depths), len(candidates), own.plain_s)
    accepted, _, _, rows, drafts_s = map(sum, zip(*growing(nodes, candidates, times), strict=True))
    step_s = drafts_s + own.verify_nodes_s(rows)
    return Allocation(tuple(depths), len(candidates) + accepted, step_s)


BENT = {1: 0.02, 2: 0.14, 3: 0.05}
"""A second level that costs more than its draft pass, and a third that costs less."""


def candidate(alpha: float) -> RequestCandidate:
    survival = [alpha ** (depth + 1) for depth in range(DEEPEST)]
    return RequestCandidate(method="d", curve=AcceptanceCurve(survival, [1.0] * DEEPEST))


def pricing(batch: int, **changes: float | Mapping[int, float]) -> Times:
    costs = table(batches=(1, batch) if batch > 1 else (1,), **changes)
    return {"d": StepTimes.read(costs, OperatingPoint(batch, 1, True), DEEPEST, DEEPEST)}


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
    found = best_chains(candidates, costs, 100)
    ways = product(range(DEEPEST + 1), repeat=len(alphas))
    best = max(priced(candidates, costs, way).tokens_per_s for way in ways)
    assert found.tokens_per_s >= 0.999 * best


def test_one_request_gets_the_k_of_highest_speedup():
    found = best_chains([candidate(0.8)], pricing(1), 100)
    rates = [priced([candidate(0.8)], pricing(1), [k]).tokens_per_s for k in range(DEEPEST + 1)]
    assert found.tokens_per_s == max(rates)


@given(rows=st.integers(0, 12))
def test_no_more_nodes_than_rows(rows):
    found = best_chains([candidate(0.9), candidate(0.8), candidate(0.7)], pricing(3), rows)
    assert sum(found.depths) <= rows


def test_who_is_accepted_more_drafts_deeper():
    first, second = best_chains([candidate(0.9), candidate(0.3)], pricing(2), 4).depths
    assert first > second


def test_what_does_not_pay_is_not_drafted():
    assert best_chains([candidate(0.1)], pricing(1), 100).depths == (0,)


def test_where_rows_cost_what_steps_cost_decoding_is_plain():
    """A compute-bound pass: twice the rows take twice the time."""
    crowd = [candidate(0.8) for _ in range(16)]
    assert best_chains(crowd, pricing(16, row=1.0), 1000).depths == (0,) * 16
    assert sum(best_chains(crowd, pricing(16, row=0.001), 1000).depths) > 16


def test_two_drafters_pay_both_their_overheads():
    times = pricing(2)
    both = {"d": times["d"], "e": times["d"]}
    other = RequestCandidate(method="e", curve=candidate(0.8).curve)
    together = priced([candidate(0.8), candidate(0.8)], both, [1, 1])
    apart = priced([candidate(0.8), other], both, [1, 1])
    own = times["d"]
    extra = apart.step_s - together.step_s
    assert extra == pytest.approx(own.overhead_s[1] + 2 * own.draft_s[0] - own.draft_s[1])


@pytest.mark.parametrize("drafted", [1.0, 0.9])
def test_values_of_one_request_are_those_of_a_batch_of_one(drafted):
    curve = AcceptanceCurve([0.7, 0.5, 0.3], [drafted, drafted**2, drafted**3])
    times = pricing(1, overhead=BENT)
    tokens, steps_s = chain_values(curve, times["d"])
    for k in range(DEEPEST + 1):
        found = priced([RequestCandidate("d", curve)], times, [k])
        assert (found.tokens, found.step_s) == pytest.approx((tokens[k], steps_s[k]))


def test_certain_drafts_are_priced_as_the_table_says():
    costs, place = table(overhead=BENT), OperatingPoint(1, 1, True)
    times = {"d": StepTimes.read(costs, place, DEEPEST, DEEPEST)}
    for k in range(DEEPEST + 1):
        found = priced([candidate(0.8)], times, [k])
        assert found.step_s == pytest.approx(costs.cycle_s(k, place.context))


def test_a_batch_has_the_overhead_of_its_deepest_draft():
    costs, place = table(batches=(1, 3), overhead=BENT), OperatingPoint(3, 1, True)
    times = StepTimes.read(costs, place, DEEPEST, DEEPEST)
    found = priced([candidate(0.8)] * 3, {"d": times}, [3, 1, 0])
    draft_s = times.draft_s[1] + 2 * times.draft_s[0]
    rest_s = times.verify_nodes_s(4) + costs.overhead_s(3, place.context, 3)
    assert found.step_s == pytest.approx(draft_s + rest_s)
