"""Settings that cannot work are refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.control.base import Tree
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_speculative_tokens", -1),
        ("max_batch", 0),
        ("prefill_chunk", 0),
        ("max_step_rows", 0),
        ("max_context", 1),
        ("max_context", 4096.0),
        ("max_waiting", -1),
        ("max_kv_tokens", 100),  # less than one sequence may need
        ("num_kept", -1),
        ("num_threads", 0),
    ],
)
def test_a_value_out_of_range_is_named(name, value):
    with pytest.raises(InvalidRequest, match=f"{name} is {value}"):
        EngineConfig(**{name: value})


def test_a_pass_must_hold_a_full_batch_of_drafts():
    assert EngineConfig(max_batch=4, num_speculative_tokens=3, max_step_rows=16)
    with pytest.raises(InvalidRequest, match=r"max_step_rows is 15.*\(K \+ 1\) = 16"):
        EngineConfig(max_batch=4, num_speculative_tokens=3, max_step_rows=15)


def test_a_tree_is_cut_to_the_rows_of_a_pass_and_to_the_context_with_one_notice(caplog):
    tree = Tree(num_nodes=40, depth=9, width=2)
    config = EngineConfig(tree=tree, max_batch=4, max_step_rows=32)
    assert config.tree == replace(tree, num_nodes=7, depth=7)
    assert replace(config, num_speculative_tokens=2).tree == config.tree
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "tree 40,9,2 is cut to 7,7,2" in caplog.text
    short = EngineConfig(tree=tree, max_context=6)
    assert short.tree == replace(tree, num_nodes=5, depth=5)
    assert EngineConfig(tree=tree).tree is not None
    with pytest.raises(InvalidRequest, match="max_step_rows"):
        EngineConfig(tree=tree, max_batch=4, max_step_rows=4)
