"""Drawn trees: which rule verifies them, and which siblings are refused."""

from __future__ import annotations

import pytest
import torch

from forerun.engine.drafting import smallest_drawn
from forerun.sampling.config import Choice, SamplingParams, resolve_verification
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree


def smallest(choice: Choice, tokens: list[int], first: list[float]) -> float:
    rows = torch.tensor([first, [0.25, 0.25, 0.25, 0.25]])
    proposal = Proposal(
        tokens=torch.tensor(tokens), tree=TokenTree((-1, -1, 0)), choice=choice, draft_probs=rows
    )
    return float(smallest_drawn(proposal, rows))


def test_siblings_break_their_rule_where_a_token_comes_twice_or_was_impossible():
    drawn = [0.5, 0.375, 0.125, 0.0]
    assert smallest(Choice.WITHOUT_REPLACEMENT, [0, 2, 1], drawn) == 0.125
    assert smallest(Choice.WITHOUT_REPLACEMENT, [0, 0, 1], drawn) == 0
    assert smallest(Choice.WITHOUT_REPLACEMENT, [0, 3, 1], drawn) == 0
    beside_top = [0.0, 0.75, 0.125, 0.125]
    assert smallest(Choice.TOP_AND_SAMPLED, [0, 2, 1], beside_top) == 0.125
    assert smallest(Choice.TOP_AND_SAMPLED, [1, 2, 1], beside_top) == 0
    assert smallest(Choice.TOP_AND_SAMPLED, [1, 0, 1], beside_top) == 0


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        (Choice.SAMPLED, "walk"),
        (Choice.WITHOUT_REPLACEMENT, "traversal"),
        (Choice.TOP_AND_SAMPLED, "greedy_coupling"),
        (Choice.DETERMINISTIC, "walk"),
    ],
)
def test_which_rule_verifies_a_tree(choice, rule):
    assert resolve_verification(SamplingParams(), choice, is_chain=False) == rule
    walk = SamplingParams(verification="walk")
    assert resolve_verification(walk, choice, is_chain=False) == "walk"
    seeded = resolve_verification(SamplingParams(seed=1), choice, is_chain=False)
    assert seeded == ("walk" if choice is Choice.DETERMINISTIC else "coupled")
    is_drawn = choice is not Choice.DETERMINISTIC
    chain = resolve_verification(SamplingParams(), choice, is_chain=True)
    assert chain == ("block" if is_drawn else "walk")
