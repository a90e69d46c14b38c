from __future__ import annotations

import pytest
from tests.tiny import VOCAB_SIZE, adapted, network

from forerun.measure import judge
from forerun.measure.judge import acceptance_probabilities
from forerun.sampling.config import SamplingParams

PROMPT = (5, 17, 99, 4, 250, 31, 8)
RESPONSE = (12, 7, 7, 250, 3, 41, 12, 9, 100, 7, 12)
PARAMS = {
    "plain": SamplingParams(),
    "penalised": SamplingParams(repetition_penalty=1.5, frequency_penalty=0.7),
    "held back": SamplingParams(min_tokens=6, stop_token_ids=(12,)),
}


@pytest.fixture(scope="module")
def target():
    return adapted(network(seed=1))


@pytest.fixture(scope="module")
def cousin():
    return adapted(network(seed=1, jitter=0.02))


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_chunks_change_nothing(target, cousin, params, monkeypatch):
    whole = acceptance_probabilities(target, cousin, PROMPT, RESPONSE, params)
    assert len(whole) == len(RESPONSE)
    assert 0 < min(whole) < max(whole) < 1
    for size in (1, 3, 7, 16):
        monkeypatch.setattr(judge, "CHUNK", size)
        found = acceptance_probabilities(target, cousin, PROMPT, RESPONSE, params)
        assert found == pytest.approx(whole, abs=1e-5)


def test_what_a_distribution_depends_on_is_told_to_both(target, cousin):
    found = {
        name: acceptance_probabilities(target, cousin, PROMPT, RESPONSE, params)
        for name, params in PARAMS.items()
    }
    assert found["penalised"] != pytest.approx(found["plain"], abs=1e-3)
    assert found["held back"][:6] != pytest.approx(found["plain"][:6], abs=1e-6)
    assert found["held back"][6:] == pytest.approx(found["plain"][6:], abs=1e-6)


def test_slots_are_given_back(target, cousin):
    before = target.store.num_free, cousin.store.num_free
    for _ in range(10):
        acceptance_probabilities(target, cousin, PROMPT, RESPONSE, PARAMS["plain"])
    with pytest.raises(ValueError, match="broken"):
        acceptance_probabilities(target, Broken(cousin), PROMPT, RESPONSE, PARAMS["plain"])
    assert (target.store.num_free, cousin.store.num_free) == before


class Broken:
    """A model whose pass fails."""

    def __init__(self, model):
        self.model = model

    def __getattr__(self, name):
        return getattr(self.model, name)

    def forward(self, batch):
        raise ValueError("broken")


def test_a_text_is_followed_as_far_as_both_contexts_reach(target):
    short = adapted(network(seed=2, max_context=12))
    found = acceptance_probabilities(target, short, PROMPT, RESPONSE, PARAMS["plain"])
    assert len(found) == 12 - len(PROMPT)
    assert acceptance_probabilities(target, short, [*PROMPT] * 2, RESPONSE, PARAMS["plain"]) == []


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 20, VOCAB_SIZE + 20])
def test_padding_of_either_vocabulary_is_never_accepted(target, vocab_size):
    other = adapted(network(seed=2, vocab_size=vocab_size))
    found = acceptance_probabilities(target, other, PROMPT, RESPONSE, PARAMS["plain"])
    assert all(0 < alpha < 1 for alpha in found)


def test_a_text_is_followed_up_to_an_id_the_draft_lacks(target):
    small = adapted(network(seed=2, vocab_size=260))
    response = (*RESPONSE[:3], 299, *RESPONSE[3:])
    found = acceptance_probabilities(target, small, PROMPT, response, PARAMS["plain"])
    assert len(found) == 4
    assert found[3] > 0  # other ids are shared there


def test_a_draft_without_a_distribution_is_never_accepted(target):
    broken = network(seed=2)
    broken.lm_head.weight.fill_(float("nan"))
    found = acceptance_probabilities(target, adapted(broken), PROMPT, RESPONSE, PARAMS["plain"])
    assert found == [0.0] * len(RESPONSE)
