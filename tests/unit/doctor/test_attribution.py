"""The waterfall adds up, and its parts are those of the formula."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.doctor.attribution import attribute
from forerun.doctor.diagnosis import derive
from forerun.doctor.evidence import Evidence


def evidence_of(**facts: object) -> Evidence:
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    return derive(evidence)


def test_parts_by_hand():
    found = attribute(
        evidence_of(
            acceptance_rate_per_position=[0.5, 0.25],
            **{"cycle_cost": 1.75, "draft_cost": 0.1, "verify_cost": 1.35},
        )
    )
    assert found is not None and found.acceptance_length == 1.75
    costs = {part.name: part.cost for part in found.parts}
    assert costs == pytest.approx(
        {
            "ideal: all accepted for one plain step": 1 / 3,
            "rejected at position 1": 0.5 * 2 / (1.75 * 3),
            "rejected at position 2": 0.25 * 1 / (1.75 * 3),
            "drafting 2 tokens": 0.2 / 1.75,
            "target pass above one plain step": 0.35 / 1.75,
            "everything else in a step": 0.2 / 1.75,
        }
    )
    assert found.step_cost_per_token == pytest.approx(1.75 / 1.75)
    assert found.share("draft") == pytest.approx((0.2 / 1.75) / (1 - 1 / 3))
    assert found.counterfactuals[0].name == "every drafted token were accepted"
    assert found.counterfactuals[0].speedup == pytest.approx(3 / 1.75)


@given(
    conditional=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    c=st.floats(0.0, 1.0),
    v=st.floats(1.0, 5.0),
    o=st.floats(0.0, 2.0),
)
def test_the_waterfall_adds_up(conditional: list[float], c: float, v: float, o: float):
    rates, survival = [], 1.0
    for probability in conditional:
        survival *= probability
        rates.append(survival)
    kappa = len(rates) * c + v + o
    found = attribute(
        evidence_of(
            acceptance_rate_per_position=rates, cycle_cost=kappa, draft_cost=c, verify_cost=v
        )
    )
    assert found is not None
    assert found.step_cost_per_token == pytest.approx(kappa / found.acceptance_length, abs=1e-9)
    rejected = sum(part.cost for part in found.parts if part.kind == "rejection")
    ideal = 1 / (len(rates) + 1)
    assert rejected == pytest.approx(1 / found.acceptance_length - ideal, abs=1e-9)


@pytest.mark.parametrize("alpha", [None, 0.74])
@pytest.mark.parametrize("rates", [None, [0.6, 0.7, 0.5, 0.9], [1.0, 1.0, 0.9, 0.9]])
def test_rejections_add_up_where_k_varies(rates: list[float] | None, alpha: float | None) -> None:
    """Rates by position then rise, or give another tau than the one that was measured."""
    facts = {"acceptance_rate_per_position": rates, "alpha": alpha}
    given = {name: value for name, value in facts.items() if value is not None}
    for tau in (1.2, 2.6, 4.9):
        found = attribute(evidence_of(acceptance_length=tau, k=4, **given))
        assert found is not None and found.acceptance_length == pytest.approx(tau)
        assert found.step_cost_per_token == pytest.approx(1 / tau)
        assert all(part.cost >= 0 for part in found.parts)


def test_without_a_plain_step_the_tokens_side_is_given():
    found = attribute(evidence_of(acceptance_length=2.0, k=3))
    assert found is not None and found.speedup is None and not found.counterfactuals
    assert found.step_cost_per_token == pytest.approx(1 / 2.0)


def test_a_cost_that_is_not_split_is_one_part():
    found = attribute(
        evidence_of(acceptance_length=2.0, k=3, tokens_per_s=10, tokens_per_s_plain=8)
    )
    assert found is not None
    assert [part.kind for part in found.parts][-1] == "unsplit"
    assert found.step_cost_per_token == pytest.approx(found.cycle_cost / 2.0)


@pytest.mark.parametrize("facts", [{}, {"k": 4}, {"acceptance_length": 2.0}])
def test_without_tau_or_k_there_is_none(facts: dict[str, object]):
    assert attribute(evidence_of(**facts)) is None


def test_a_tau_beyond_k_is_refused():
    assert attribute(evidence_of(acceptance_length=6.0, k=2)) is None
