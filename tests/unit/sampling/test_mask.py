"""Masks along paths: every node sees what leads to it, and no node disturbs another."""

from __future__ import annotations

import pytest
import torch
from tests.automaton import Automaton

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.mask import TokenMask, follow
from forerun.sampling.processors import pack_params, target_probs
from forerun.theory.tree import TokenTree

# From 0 to 1 and back by tokens 0 and 1, from 1 to the end by token 2.
TABLE = ({0: 1}, {1: 0, 2: 2}, {3: 2})


def automaton() -> Automaton:
    return Automaton(TABLE, vocab_size=4)


def test_an_automaton_is_a_mask() -> None:
    assert isinstance(automaton(), TokenMask)
    assert automaton().allowed().tolist() == [True, False, False, False]


def test_a_child_is_a_fork_told_the_token() -> None:
    mask = automaton()
    child = follow(mask, 0)
    assert child is not None
    assert child.allowed().tolist() == [False, True, True, False]
    assert mask.allowed().tolist() == [True, False, False, False]
    assert follow(mask, 1) is None
    assert follow(None, 0) is None


def test_every_node_is_masked_by_its_own_path() -> None:
    mask = automaton()
    history = History.of(SamplingParams(), [1], vocab_size=4, mask=mask)
    history.append(0)
    tree, tokens = TokenTree((-1, -1, -1, 0, 1, 2)), [1, 2, 0, 0, 3, 1]
    rows = history.along(tree, tokens)
    probs = target_probs(torch.zeros(7, 4), pack_params([SamplingParams()], rows=[0] * 7), rows)
    allowed = [[1, 2], [0], [3], [0, 1, 2, 3], [1, 2], [3], [0, 1, 2, 3]]
    assert [row.nonzero().flatten().tolist() for row in probs] == allowed
    assert mask.state == 1


def test_the_automaton_of_the_tests_judges() -> None:
    """Whoever advances it by a forbidden token hears of it."""
    with pytest.raises(ValueError, match="token 3 in state 0"):
        automaton().advance(3)
