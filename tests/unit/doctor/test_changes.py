"""Two runs compared: what was changed, what was not, and what that does to causes and changes."""

from __future__ import annotations

import pytest

from forerun.doctor.diagnosis import (
    Change,
    Diagnosis,
    as_reference,
    compare_runs,
    derive,
    diagnose,
)
from forerun.doctor.evidence import Evidence, merge


def run_of(**facts: object) -> Evidence:
    evidence = Evidence()
    for name, value in facts.items():
        evidence.add(name, value, "test")
    return evidence


SETUP = {"target_hash": "t", "draft_hash": "d", "engine_version": "1", "k": 5}
GOOD = {"acceptance_rate_per_position": [0.7, 0.5, 0.3, 0.2, 0.1], "cycle_cost": 2.0, **SETUP}
POOR = {
    **{"acceptance_rate_per_position": [0.15 * 0.2**i for i in range(10)], "k": 10},
    "cycle_cost": 3.0,
    **{"draft_cost": 0.1, "verify_cost": 1.5, "engine_version": "1"},
}


@pytest.mark.parametrize(
    ("now", "changed", "unchanged"),
    [
        (SETUP, (), ("draft", "engine", "target")),
        ({**SETUP, "draft_hash": "other"}, ("draft",), ("engine", "target")),
        ({**SETUP, "k": 10}, ("config",), ("draft", "engine", "target")),
        ({"changed": ["traffic"], "k": 10}, ("config", "traffic"), ()),
        ({"changed": ["traffic"], "k": 5}, ("traffic",), ()),
        ({"target_name": "same", "temperature": 1}, (), ("target",)),
    ],
)
def test_runs_compared(
    now: dict[str, object], changed: tuple[str, ...], unchanged: tuple[str, ...]
):
    evidence = run_of(**now)
    evidence = compare_runs(evidence, run_of(**SETUP, target_name="same"))
    assert evidence.words("changed") == changed
    assert evidence.words("unchanged") == unchanged


def test_weights_decide_and_not_their_name():
    evidence = run_of(**SETUP, draft_name="latest")
    evidence = compare_runs(
        evidence, run_of(**{**SETUP, "draft_hash": "other"}, draft_name="latest")
    )
    assert evidence.words("changed") == ("draft",) and "draft" not in evidence.words("unchanged")


def test_a_person_is_not_contradicted_about_what_was_changed():
    evidence = run_of(**SETUP, changed=["target"])
    evidence = compare_runs(evidence, run_of(**SETUP))
    assert evidence.words("changed") == ("target",)
    assert evidence.words("unchanged") == ("draft", "engine")


def compared(now: dict[str, object], before: dict[str, object]) -> Diagnosis:
    evidence, earlier = run_of(**now), run_of(**before)
    return diagnose(compare_runs(evidence, earlier))


def change_of(found: Diagnosis, effect: str) -> Change:
    return next(c for c in found.causes[0].changes if c.remedy.effect == effect)


def test_a_draft_that_was_swapped_is_not_called_stale():
    found = compared({**POOR, "target_hash": "t", "draft_hash": "new"}, GOOD)
    labels = [ranked.scored.cause.label for ranked in found.causes]
    assert labels[0] == "low_alignment" and "stale_draft" not in labels


def test_a_target_that_was_swapped_makes_the_draft_stale():
    found = compared({**POOR, "target_hash": "new", "draft_hash": "d"}, GOOD)
    assert found.causes[0].scored.cause.label == "stale_draft"


def test_going_back_is_what_was_measured_there_and_nothing_slower_than_off_is_advised():
    found = compared({**POOR, "target_hash": "t", "draft_hash": "new"}, GOOD)
    back = change_of(found, "as_before").prediction
    assert back is not None
    assert back.speedup == pytest.approx(2.8 / 2.0) and back.basis == "measured before"
    assert back.gain == pytest.approx((2.8 / 2.0) / (1.1875 / 3.0))
    # At K = 1, tau / kappa would be 1.15 / 1.65, which is slower than no speculation.
    assert not any(change.remedy.effect == "best_k" for change in found.causes[0].changes)
    off = change_of(found, "off").prediction
    assert off is not None and off.speedup == 1.0


def test_the_best_k_is_named_where_it_is_faster_than_off():
    better = {
        **POOR,
        "acceptance_rate_per_position": [0.75, *POOR["acceptance_rate_per_position"][1:]],
    }
    found = compared({**better, "target_hash": "t", "draft_hash": "new"}, GOOD)
    changes = [change for ranked in found.causes for change in ranked.changes]
    lower = next(c.prediction for c in changes if c.remedy.effect == "best_k")
    assert lower is not None and lower.num_speculative_tokens == 1
    # kappa(1) = c + 1 + slope + o: 0.1 + 1 + 0.05 + 0.5.
    assert lower.speedup == pytest.approx(1.75 / 1.65)


def test_acceptance_of_another_depth_is_compared_by_alpha():
    shallow = run_of(k=1, acceptance_rate_per_position=[0.7])
    shallow = derive(merge(shallow, as_reference(run_of(**GOOD))))
    alpha = shallow.number("reference_alpha")
    assert alpha is not None
    assert shallow.number("reference_ratio") == pytest.approx(0.7 / alpha)
    assert shallow.flag("acceptance_dropped") is False


def test_the_reference_is_reached_at_its_own_k():
    found = compared({**POOR, "target_hash": "new", "draft_hash": "d"}, GOOD)
    pinned = change_of(found, "reference_acceptance").prediction
    assert pinned is not None
    # kappa(5) = 5 x 0.1 + 1 + 5 x 0.05 + 0.5.
    assert pinned.speedup == pytest.approx(2.8 / 2.25)
