"""Masks along paths: every node sees what leads to it, and no node disturbs another."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from tests.automaton import Automaton
from torch import Tensor

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History, TokenMask
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
    root = History.of(SamplingParams(), [1], vocab_size=4, mask=mask).at()
    child = root.then(0)
    assert child.allowed is not None
    assert child.allowed.tolist() == [False, True, True, False]
    assert mask.state == 0
    forbidden = root.then(1)
    assert (forbidden.mask, forbidden.allowed) == (None, None)
    assert forbidden.then(0).mask is None


class Counting(Automaton):
    """Counts how often any fork of it is asked."""

    def __init__(self, calls: Counter[str], state: int = 0) -> None:
        super().__init__(TABLE, 4, state)
        self.calls = calls

    def fork(self) -> Counting:
        self.calls["fork"] += 1
        return Counting(self.calls, self.state)

    def advance(self, token: int) -> None:
        self.calls["advance"] += 1
        super().advance(token)

    def allowed(self) -> Tensor:
        self.calls["allowed"] += 1
        return super().allowed()


def test_a_mask_is_asked_once_per_node_by_drafter_and_verifier_together() -> None:
    calls: Counter[str] = Counter()
    history = History.of(SamplingParams(), [1], vocab_size=4, mask=Counting(calls))
    for level in range(4):  # as a drafter does
        history.at([0, 1, 0][:level])
    history.along(TokenTree.chain(3), [0, 1, 0])
    assert calls == {"allowed": 4, "fork": 3, "advance": 3}
    history.append(0)  # accepted: the node's mask is the new beginning
    history.append(2)  # drawn: told to it
    assert calls == {"allowed": 4, "fork": 3, "advance": 4}
    assert isinstance(history.mask, Automaton)
    assert history.mask.state == 2
    assert history.at().allowed is not None
    assert calls["allowed"] == 5


class Failing(Automaton):
    def advance(self, token: int) -> None:
        raise KeyError("no such rule")


def test_a_failure_while_committing_is_heard_at_the_next_row() -> None:
    history = History.of(SamplingParams(), [1], vocab_size=4, mask=Failing(TABLE, 4))
    history.at()
    history.append(0)
    assert history.num_output == 1
    with pytest.raises(KeyError, match="no such rule"):
        history.at()


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


def test_the_automaton_of_the_tests_refuses_a_forbidden_token() -> None:
    """Advancing it by a forbidden token raises an error."""
    with pytest.raises(ValueError, match="token 3 in state 0"):
        automaton().advance(3)
