"""The suite checks types and shapes of the package's calls: the first ones of each test, or all."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from tests.checking import BUDGET

from forerun.sampling.noise import uniform
from forerun.theory.tree import TokenTree


def calls_until_unchecked(limit: int) -> int:
    """How many calls with a wrong type are refused before one is not checked."""
    for count in range(limit):
        try:
            TokenTree.chain("3")
        except jaxtyping.TypeCheckError:
            continue
        except TypeError:  # from the function itself
            return count
    return limit


def test_wrong_types_and_shapes_are_refused():
    with pytest.raises(jaxtyping.TypeCheckError, match="chain"):
        TokenTree.chain("3")
    with pytest.raises(jaxtyping.TypeCheckError, match="uniform"):
        uniform(torch.zeros(1))


def test_each_test_has_its_first_calls_checked(monkeypatch):
    monkeypatch.setattr(BUDGET, "per_test", 10)
    BUDGET.restart()
    assert 0 < calls_until_unchecked(50) <= 10
    BUDGET.restart()
    assert calls_until_unchecked(3) == 3


def test_the_full_grid_has_every_call_checked(monkeypatch):
    monkeypatch.setattr(BUDGET, "per_test", None)
    BUDGET.restart()
    assert calls_until_unchecked(50) == 50
