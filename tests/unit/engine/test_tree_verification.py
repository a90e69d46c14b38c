"""Drawn trees: which rule verifies them, and which siblings are refused."""

from __future__ import annotations

import pytest
import torch
from tests import tiny

from forerun.engine.drafting import smallest_drawn
from forerun.engine.verification import drafted_probs
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


@pytest.mark.parametrize(
    ("choice", "rule"),
    [
        (Choice.SAMPLED, "walk"),
        (Choice.WITHOUT_REPLACEMENT, "traversal"),
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


@pytest.mark.parametrize(
    ("params", "is_raw", "temperature"),
    [
        (SamplingParams(temperature=0.5), False, 0.5),
        (SamplingParams(temperature=0.5), True, 1.0),
        (SamplingParams(temperature=0), False, 1.0),
    ],
)
def test_probabilities_of_drafted_tokens_are_those_behind_their_parents(
    params, is_raw, temperature
):
    """The nodes of this tree are not in the order of their parents."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 6, generator=generator)
    rows = torch.rand(3, 6, generator=generator)
    entry = tiny.scheduled(tiny.sequence())
    entry.sequence.params = params
    entry.draft(
        Proposal(
            tokens=torch.tensor([3, 1, 5, 2]),
            tree=TokenTree((-1, 0, -1, 2)),
            choice=Choice.WITHOUT_REPLACEMENT,
            draft_probs=rows,
        )
    )
    entry.logits = logits
    targets, drafts = drafted_probs(entry, is_raw=is_raw)
    probs = (logits / temperature).softmax(-1)
    expected = [probs[0, 3], probs[1, 1], probs[0, 5], probs[3, 2]]
    assert targets == pytest.approx([float(prob) for prob in expected])
    assert drafts == [float(prob) for prob in (rows[0, 3], rows[1, 1], rows[0, 5], rows[2, 2])]
