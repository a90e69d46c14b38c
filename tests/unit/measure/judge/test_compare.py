from __future__ import annotations

import json

import pytest
from tests.unit.measure.judge.judgements import figures, judged

from forerun.measure.judge import changes, finding
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.intervals import Interval

COSTS = CostTable(lines=(CostLine(rows=(1, 4), verify_s=(1.0, 1.2), plain_s=1.0, draft_s=0.1),))


def interval(low, high):
    return Interval(estimate=(low + high) / 2, low=low, high=high)


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ((2.1, 3.0), "higher"),
        ((2.0, 3.0), "no difference shown"),
        ((0.1, 1.0), "no difference shown"),
        ((0.1, 0.9), "lower"),
    ],
)
def test_only_intervals_with_nothing_in_common_show_a_difference(after, wanted):
    assert finding(interval(1.0, 2.0), interval(*after)) == wanted


def two_drafts():
    tags = ["code", "code", "prose", "prose"]
    weak = [judged([0, 1, 0], tag=tag, alphas=(0.1, 0.3)) for tag in tags]
    strong = [
        judged([3, 2, 3] if tag == "code" else [0, 1, 0], tag=tag, alphas=(0.8, 0.9))
        for tag in tags
    ]
    return figures(weak, costs=COSTS), figures(strong, costs=COSTS)


def test_changes_are_found_by_tag():
    found = {(c.tag, c.figure): c.finding for c in changes(*two_drafts())}
    assert found["code", "acceptance_length"] == "higher"
    assert found["code", "speedup"] == "higher"
    assert found["prose", "acceptance_length"] == "no difference shown"
    assert found["prose", "acceptance_probability"] == "higher"
    assert found[None, "acceptance_probability"] == "higher"
    assert len(found) == 9


def test_changes_go_to_json():
    weak, strong = two_drafts()
    written = [json.loads(json.dumps(change.to_dict())) for change in changes(strong, weak)]
    assert written[1]["figure"] == "acceptance_probability"
    assert written[1]["finding"] == "lower"


def test_one_tag_is_not_shown_twice_and_missing_figures_not_at_all():
    plain = figures([judged([1]), judged([2])])
    (change,) = changes(plain, plain)
    assert (change.tag, change.figure, change.finding) == (
        None,
        "acceptance_length",
        "no difference shown",
    )


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"temperature": 0.0}, "temperature is 1.0 before and 0.0 after"),
        ({"k": 4}, "num_speculative_tokens is 3 before and 4 after"),
    ],
)
def test_drafts_judged_differently_are_not_compared(other, message):
    prompts = [judged([1]), judged([2])]
    with pytest.raises(ValueError, match=message):
        changes(figures(prompts), figures(prompts, **other))
    with pytest.raises(ValueError, match="same prompts"):
        changes(figures(prompts), figures(prompts[:1]))
