from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from forerun.theory.cost import ReadingCost

COST = ReadingCost(tokens=(1, 64, 256), target_s=(1.0, 7.3, 31.0), draft_s=(0.1, 0.5, 2.1))


def test_what_was_measured_is_found():
    assert [COST.target_pass_s(n) for n in COST.tokens] == pytest.approx(COST.target_s)
    assert COST.target_more_s(64) == pytest.approx(6.3)
    assert COST.draft_more_s(256) == pytest.approx(2.0)


def test_between_and_beyond_there_are_lines():
    assert COST.target_pass_s(160) == pytest.approx((7.3 + 31.0) / 2)
    assert COST.target_pass_s(256 + 192) == pytest.approx(31.0 + 23.7)


def test_one_token_adds_nothing():
    assert COST.target_more_s(1) == COST.draft_more_s(1) == 0.0
    assert COST.draft_more_s(0) == 0.0


def test_noise_cannot_make_reading_pay():
    noisy = ReadingCost(tokens=(1, 8), target_s=(1.0, 0.9), draft_s=(0.1, 0.05))
    assert noisy.target_more_s(8) == noisy.draft_more_s(8) == 0.0


def test_it_survives_json():
    assert msgspec.json.decode(msgspec.json.encode(COST), type=ReadingCost) == COST


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": (2, 64, 256)}, "ascend from 1"),
        ({"tokens": (1, 64, 64)}, "ascend from 1"),
        ({"tokens": ()}, "ascend from 1"),
        ({"target_s": (1.0, 2.0)}, "target_s has 2 entries"),
        ({"draft_s": (0.1, -0.5, 2.0)}, "finite"),
        ({"draft_s": (0.1, float("inf"), 2.0)}, "finite"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(COST, **changes)
