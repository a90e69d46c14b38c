"""Faults of heads on hidden states, planted in a live engine, are measured and named by a probe."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tests import heads, tiny

from forerun.doctor.diagnosis import CAUSES, diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.run import ProbedEngine, probe_engine
from forerun.drafters.base import Drafter
from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.drafters.eagle3.load import model_of, write_eagle3_head
from forerun.drafters.medusa import MedusaConfig, MedusaDrafter, MedusaHeads, write_medusa
from forerun.sampling.config import SamplingParams

CONFIG = EvidenceConfig(num_prompts=8, num_tokens=16, num_self_prompts=0, costs_s=0.0)
PROMPTS = [[1 + (i * j) % 251 for j in range(3, 27)] for i in range(1, 9)]
MISREAD, LOST = "draft_input_feature_mismatch", "drafter_state_loss"


class Shifted(Drafter):
    """Hands every row the hidden states of the row before it.

    Args:
        drafter: that receives them.
    """

    def __init__(self, drafter):
        self.drafter, self.last = drafter, {}
        self.method, self.max_width = drafter.method, drafter.max_width
        self.required_features = drafter.required_features

    def propose(self, requests, plans):
        return self.drafter.propose(requests, plans)

    def observe(self, outcomes):
        changed = []
        for outcome in outcomes:
            rows = outcome.features
            if len(rows):
                before = self.last.get(outcome.request_id, rows[:1])
                self.last[outcome.request_id] = rows[-1:]
                rows = torch.cat([before, rows[:-1]])
            changed.append(replace(outcome, features=rows))
        self.drafter.observe(changed)

    def forget(self, request_id):
        self.last.pop(request_id, None)
        self.drafter.forget(request_id)


def target():
    return tiny.adapted(tiny.network(num_layers=4))


def probed(model, drafter, folder) -> Evidence:
    engine = tiny.engine_over(model, drafter, k=2)
    return probe_engine(
        ProbedEngine(engine=engine, draft_folder=folder),
        PROMPTS,
        SamplingParams(ignore_eos=True),
        CONFIG,
    )


def named(evidence: Evidence) -> list[str]:
    return [ranked.scored.cause.label for ranked in diagnose(evidence).causes]


@pytest.fixture
def eagle(tmp_path):
    """A target, a random head over all of its tokens, and the folder of that head."""
    model = target()
    head = heads.eagle3_head(model, draft_vocab_size=tiny.VOCAB_SIZE, norm_before_residual=True)
    write_eagle3_head(head, tmp_path, target="t")
    return model, head, tmp_path


def other_layers(model, head):
    return Eagle3Drafter(model_of(head, model), (2, 3, 4), model.vocab_size)


def shifted(model, head):
    return Shifted(heads.eagle3_drafter(model, head))


@pytest.mark.parametrize("plant", [other_layers, shifted])
def test_a_head_that_computes_something_else_than_its_checkpoint_is_named(eagle, plant):
    model, head, folder = eagle
    found = probed(model, plant(model, head), folder)
    assert found.flag("features_differ") is True
    assert named(found)[0] == MISREAD


def test_states_that_are_stale_after_a_prefix_hit_are_named(eagle):
    model, head, folder = eagle
    give_back = model.store.keep

    def spoil(slot, num_tokens):
        kept = model.store.feature_rows
        if kept is not None:
            kept[slot, :num_tokens] = kept[slot, :num_tokens].flip(0)
        give_back(slot, num_tokens)

    model.store.keep = spoil
    found = probed(model, heads.eagle3_drafter(model, head), folder)
    assert found.flag("features_differ") is False
    assert found.flag("acceptance_falls_after_handoff") is True
    assert named(found)[0] == LOST


def test_a_head_as_it_was_trained_is_not_accused(eagle):
    model, head, folder = eagle
    found = probed(model, heads.eagle3_drafter(model, head), folder)
    assert found.flag("features_differ") is False
    assert found.flag("acceptance_falls_after_handoff") is not True
    assert not {MISREAD, LOST} & {*named(found)}


@pytest.mark.parametrize("dropped", [True, False])
def test_missing_biases_of_medusa_heads_are_named(tmp_path, dropped):
    model = target()
    config = MedusaConfig(hidden_size=32, vocab_size=tiny.VOCAB_SIZE, num_heads=2)
    torch.manual_seed(1)
    trained = MedusaHeads(config).eval().requires_grad_(False)
    for name, parameter in trained.named_parameters():
        torch.nn.init.normal_(parameter, std=2.0 if name.endswith("bias") else 0.5)
    write_medusa(trained, tmp_path, target="t")
    live = copy.deepcopy(trained)
    if dropped:
        for name, parameter in live.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
    found = probed(model, MedusaDrafter(live, model), tmp_path)
    assert found.flag("features_differ") is dropped
    assert (MISREAD in named(found)) is dropped


def test_the_common_cause_says_what_to_check():
    changes = " ".join(remedy.change for remedy in CAUSES[MISREAD].remedies)
    assert "forerun info TARGET --draft HEAD" in changes
