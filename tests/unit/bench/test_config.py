from __future__ import annotations

import pytest

from forerun.bench.config import BenchConfig, DraftArms, parse_arms
from forerun.errors import InvalidRequest


def test_arms_are_a_draft_and_its_ks():
    assert parse_arms(["zoo:code-2m@4,1,2", "plain", "mine=dir/a@b/draft@3"]) == (
        DraftArms(name="code-2m", draft="zoo:code-2m", ks=(1, 2, 4)),
        DraftArms(name="mine", draft="dir/a@b/draft", ks=(3,)),
    )


@pytest.mark.parametrize("text", ["draft", "draft@", "draft@0", "draft@x", "@3", "name=@3", ""])
def test_malformed_arms_are_refused_with_an_example(text):
    with pytest.raises(InvalidRequest, match="zoo:code-2m@2,4"):
        parse_arms([text])


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(InvalidRequest, match="two arms are called 'd'"):
        parse_arms(["a/d@1", "b/d@1"])


@pytest.mark.parametrize(
    "changes",
    [
        {"temperatures": ()},
        {"temperatures": (1.0, 1.0)},
        {"temperatures": (-1.0,)},
        {"batches": (0,)},
        {"num_blocks": 1},
        {"max_tokens": 1},
        {"num_threads": 0},
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(changes):
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        BenchConfig(arms=(), **changes)


def test_engines_have_room_for_the_largest_batch_and_k():
    arms = parse_arms(["a@2,70", "b@3"])
    engine = BenchConfig(arms=arms, batches=(1, 32)).engine
    assert engine.max_batch == 32
    assert engine.num_speculative_tokens == 70
    assert engine.max_step_rows >= 32 * 71
