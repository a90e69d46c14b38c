"""The suite checks types and shapes of the package's calls: the first ones of each test, or all."""

from __future__ import annotations

import jaxtyping
import pytest
import torch
from tests.checking import BUDGET, counted

from forerun.sampling.noise import uniform
from forerun.theory.tree import TokenTree


def double(number: int) -> int:
    return 2 * number


def num_refused(limit: int) -> int:
    """How many calls with a wrong type are refused before one is not checked."""
    call = counted(double)
    for count in range(limit):
        try:
            call("3")
        except jaxtyping.TypeCheckError:
            continue
        return count
    return limit


def test_wrong_types_and_shapes_are_refused():
    with pytest.raises(jaxtyping.TypeCheckError, match="chain"):
        TokenTree.chain("3")
    with pytest.raises(jaxtyping.TypeCheckError, match="uniform"):
        uniform(torch.zeros(1))
    with pytest.raises(jaxtyping.TypeCheckError, match="parents"):
        TokenTree("3")


def test_each_test_has_the_first_calls_of_every_function_checked(monkeypatch):
    monkeypatch.setattr(BUDGET, "per_function", 10)
    one, other = counted(double), counted(double)
    for _ in range(2):
        BUDGET.restart()
        for call in (one, other):
            for _ in range(10):
                with pytest.raises(jaxtyping.TypeCheckError, match="double"):
                    call("3")
            assert call("3") == "33"


def test_the_full_grid_has_every_call_checked(monkeypatch):
    monkeypatch.setattr(BUDGET, "per_function", None)
    assert num_refused(50) == 50


@pytest.mark.usefixtures("unchecked")
def test_tests_of_many_runs_have_none_checked():
    assert num_refused(1) == 0
