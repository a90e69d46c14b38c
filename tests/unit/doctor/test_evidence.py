"""Facts are checked, the first stays, and what contradicts it is kept apart."""

from __future__ import annotations

import pytest

from forerun.doctor.evidence import FACTS, GROUPS, Evidence, merge
from forerun.theory.intervals import Interval


def test_names_are_unique():
    assert len(FACTS) == sum(map(len, GROUPS.values()))


def test_a_fact_has_definition_source_and_interval():
    evidence = Evidence()
    evidence.add("alpha_1", 0.5, "log", Interval(estimate=0.5, low=0.4, high=0.6))
    assert evidence.facts["alpha_1"].to_dict() == {
        "value": 0.5,
        "definition": "acceptance at the first drafted position",
        "unit": "",
        "source": "log",
        "interval": (0.4, 0.6),
    }


def test_the_first_value_stays_and_another_is_a_disagreement():
    first, second = Evidence(), Evidence()
    first.add("acceptance_length", 2.0, "one")
    second.add("acceptance_length", 3.0, "other")
    second.add("k", 4, "other")
    found = merge(first, second)
    assert found.number("acceptance_length") == 2.0 and found.number("k") == 4.0
    assert [fact.source for fact in found.disagreements] == ["other"]
    assert "k" not in first and not first.disagreements


def test_values_to_within_rounding_do_not_disagree():
    evidence = Evidence()
    evidence.add("acceptance_length", 2.0, "one")
    evidence.add("acceptance_length", 2.01, "other")
    assert not evidence.disagreements


def test_what_nobody_looked_at_is_neither_yes_nor_no():
    evidence = Evidence()
    evidence.add("output_differs", None, "nobody")
    assert evidence.flag("output_differs") is None and "output_differs" not in evidence
    evidence.add("output_differs", "no", "somebody")
    assert evidence.flag("output_differs") is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("no_such_fact", 1),
        ("k", -1),
        ("k", "many"),
        ("k", float("nan")),
        ("k", float("inf")),
        ("k", True),
        ("k", [1]),
        ("draft_acceptance_rate", 1.5),
        ("acceptance_rate_per_position", [0.5, 2.0]),
        ("acceptance_rate_per_position", [0.5] * 5000),
        ("output_differs", "maybe"),
        ("output_differs", 1),
        ("method", "magic"),
        ("changed", ["target", "weather"]),
        ("target_name", "x" * 1000),
        ("target_name", 3),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(name: str, value: object):
    with pytest.raises(ValueError, match=name):
        Evidence().add(name, value, "somebody")
