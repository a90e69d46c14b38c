"""The oracle's own law, checked by hand; its passes are checked by the contract."""

from __future__ import annotations

import pytest
import torch
from tests.tabular import TabularModel

from forerun.models.base import Context, pack
from forerun.theory.tree import TokenTree


def test_law_is_a_distribution_over_the_last_tokens():
    model = TabularModel.from_seed(0, vocab_size=4, order=2)
    law = model.probs([3, 1, 2])
    assert law.dtype == torch.float64
    assert law.sum().item() == pytest.approx(1, abs=1e-12)
    assert torch.equal(law, model.probs([0, 0, 1, 2]))
    assert not torch.equal(law, model.probs([0, 0, 2, 2]))


def test_the_start_is_a_state_of_its_own():
    model = TabularModel.from_seed(0, vocab_size=3, order=2)
    states = [[], [0], [1], [2], *([a, b] for a in range(3) for b in range(3))]
    assert len({model.state_of(ids) for ids in states}) == len(states)
    assert max(model.state_of(ids) for ids in states) < len(model.log_probs)


def test_seed_decides():
    first, again, other = (TabularModel.from_seed(seed, vocab_size=4) for seed in (1, 1, 2))
    assert torch.equal(first.log_probs, again.log_probs)
    assert not torch.equal(first.log_probs, other.log_probs)


def test_logits_are_log_probabilities_in_the_dtype_asked():
    source = TabularModel.from_seed(0, vocab_size=4)
    model = TabularModel(
        log_probs=source.log_probs, order=2, store=source.store, dtype=torch.float64
    )
    context = Context(model.store, [1, 2])
    batch = pack([context.span(2)], torch.tensor([1, 2]), [1], model.device)
    assert torch.equal(model.forward(batch).logits[0].exp(), model.probs([1, 2]))


def test_a_wrong_commit_shows():
    model = TabularModel.from_seed(0, vocab_size=4, order=2)
    context = Context(model.store, [1])
    tree = TokenTree((-1, -1))
    model.forward(pack([context.span(1, tree)], torch.tensor([1, 2, 3]), [], model.device))
    context.ids += [3, 0]
    context.commit([0, 1])  # token 2, though 3 was accepted
    logits = model.forward(pack([context.span(1)], torch.tensor([0]), [0], model.device)).logits
    assert not torch.allclose(logits[0].double().exp(), model.probs(context.ids))
