"""Models with a clock around them: every pass is the model's own, whatever it was asked for."""

from __future__ import annotations

import pytest
import torch
from tests import tiny
from tests.lab.device import DRAFT_PACE, Device, on_device
from tests.natives import native_model

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.models.base import LanguageModel
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal

pytestmark = pytest.mark.usefixtures("unchecked")

K = 6
PARAMS = {
    "greedy": (SamplingParams(temperature=0), False),
    "sampled": (SamplingParams(temperature=1.3), False),
    "coupled": (SamplingParams(temperature=0.8), True),
    "penalised": (SamplingParams(frequency_penalty=0.5), False),
}


def wrapped_model(model: LanguageModel) -> LanguageModel:
    return on_device(model, DRAFT_PACE, Device(), "draft")


def proposals(model: LanguageModel, vocab_size: int) -> list[Proposal]:
    """Of one request of every kind, each drafted alone, so that each takes the path of its kind."""
    found = []
    drafter = DraftModel(model, vocab_size)
    for index, (params, coupled) in enumerate(PARAMS.values()):
        request = DraftRequest(
            request_id=f"r{index}",
            ids=[3 + index, 5, 7],
            num_prompt=3,
            params=params,
            noise_key=index,
            history=None,
            coupled=coupled,
        )
        plan = Plan.chain("draft_model", K)
        found += drafter.propose([request], [plan])
    return [proposal for proposal in found if proposal is not None]


@pytest.mark.parametrize("vocab_size", [tiny.VOCAB_SIZE, tiny.VOCAB_SIZE - 250])
def test_what_is_drafted_through_a_wrapper_is_what_is_drafted_without(vocab_size):
    network = tiny.network()
    bare = proposals(native_model(network), vocab_size)
    wrapped = proposals(wrapped_model(native_model(network)), vocab_size)
    assert len(bare) == len(wrapped) == len(PARAMS)
    for found, expected in zip(wrapped, bare, strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert found.choice is expected.choice
        assert found.stop_reason == expected.stop_reason
        if expected.draft_probs is not None:
            assert found.draft_probs is not None
            assert torch.equal(found.draft_probs, expected.draft_probs)


def test_a_wrapper_can_do_what_its_model_can():
    native, eager = native_model(tiny.network()), tiny.adapted(tiny.network())
    assert wrapped_model(native).drafts_in_one_call
    assert not wrapped_model(eager).drafts_in_one_call
    # Layers of the model within would run past the clock, so there are none to be had.
    assert wrapped_model(native).first_layers(1) is None
