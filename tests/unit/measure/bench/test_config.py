from __future__ import annotations

import pytest

from forerun.control.base import Tree
from forerun.errors import InvalidRequest
from forerun.measure.bench.config import BenchConfig, DraftArms, parse_arms


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


def test_arms_of_one_draft_may_have_trees():
    tree = Tree(num_nodes=7, depth=3, width=4)
    joined = DraftArms(name="d", draft="d", ks=(2, 4), trees=(tree,))
    assert parse_arms(["d@2,4", "d@tree:7"]) == parse_arms(["d@2,4,tree:7,3,4"]) == (joined,)
    assert parse_arms(["d@tree:7,3,4"])[0].max_nodes == 7
    assert BenchConfig(arms=(joined,)).max_k == 7


@pytest.mark.parametrize("texts", [["d@tree:7", "d@tree:7,3,4"], ["d@2", "d@2"]])
def test_the_same_arm_twice_is_refused(texts):
    with pytest.raises(InvalidRequest, match="two arms are called 'd'"):
        parse_arms(texts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [("d@tree:", "NODES"), ("d@tree:0", "num_nodes 0"), ("d@0,tree:3", "zoo:code-2m@tree:7")],
)
def test_malformed_trees_of_arms_are_refused(text, problem):
    with pytest.raises(InvalidRequest, match=problem):
        parse_arms([text])
