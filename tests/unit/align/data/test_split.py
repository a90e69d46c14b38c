from __future__ import annotations

import pytest
from tests.unit.align.data.conftest import prompts

from forerun.align.samples import is_held_out, split
from forerun.errors import InvalidRequest


def test_all_share_no_prompt():
    everything = prompts(200)
    train, held_out = split(everything, 0.1)
    assert 8 <= len(held_out) <= 36  # 20 expected, 4.2 standard deviation
    assert sorted(p.prompt_hash for p in train + held_out) == sorted(
        p.prompt_hash for p in everything
    )


def test_edges_of_the_share():
    assert not is_held_out("0" * 16, 0.0)
    assert is_held_out("7fffffffffffffff", 0.5)
    assert not is_held_out("8000000000000000", 0.5)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (1.0, "held_out_share is 1.0"),
        (-0.1, "held_out_share is -0.1"),
        (0.999999999, r"all 3 prompts are held out: .*--held-out-share"),
        (1e-9, r"none of 3 prompts is held out: .*--held-out-share"),
    ],
)
def test_an_empty_side_is_refused(share, message):
    with pytest.raises(InvalidRequest, match=message):
        split(prompts(3), share)


def test_nothing_is_held_out_where_nothing_is_asked_for():
    assert split(prompts(3), 0.0) == (prompts(3), [])
