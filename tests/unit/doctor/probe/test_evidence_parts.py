"""Parts of a probe: where a fault of state begins, what passes cost, what files and facts say."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.tiny import cousin, drafting, engine_over, tabular
from tests.unit.doctor.probe.planted import Clock, Costs, planted_pair

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.run import (
    ProbedEngine,
    add_card_ratio,
    add_files,
    add_pass_costs,
    add_weights,
    looks_drawn,
    pass_config,
    probe_engine,
)
from forerun.doctor.probe.tape import AcceptedShare, Onsets, StateTally, Transform
from forerun.doctor.readers.sources import facts_document, read_facts
from forerun.models.catalog import zoo_path
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import Interval, uniformity_p_value


def test_numbers_of_draws_are_uniform_and_those_of_other_laws_are_not():
    generator = torch.Generator().manual_seed(0)
    logits = torch.empty(600, 12).normal_(generator=generator)
    laws, other = logits.softmax(-1), (logits / 2).softmax(-1)
    uniforms = torch.empty(600, 1, dtype=torch.float64).uniform_(generator=generator)
    tokens = (laws.double().cumsum(-1) < uniforms).sum(-1).clamp(max=11)
    transform = Transform(0)
    for order in (laws, torch.arange(12.0).expand(600, -1), torch.zeros(600, 12)):
        assert uniformity_p_value(transform.values(laws, tokens, order)) > 0.01
    assert uniformity_p_value(transform.values(other, tokens, other)) < 1e-6


def test_impossible_tokens_are_at_the_end_of_the_scale():
    law = torch.tensor([[0.0, 1.0]])
    assert Transform(1).values(law, torch.tensor([0]), law) == [0.0]


def tally(**onsets) -> Evidence:
    evidence = Evidence()
    state = StateTally()
    state.onsets |= {k: Onsets(num_steps=n, num_wrong=w) for k, (n, w) in onsets.items()}
    state.add_facts(evidence)
    return evidence


def test_where_drafts_go_wrong_decides_what_is_at_fault():
    clean = tally(start=(40, 0), none=(40, 0), partial=(40, 0), full=(20, 0))
    assert clean.flag("rollback_wrong") is False
    assert clean.flag("acceptance_falls_after_handoff") is False
    partial = tally(start=(40, 0), none=(40, 0), partial=(10, 6), full=(20, 0))
    assert partial.flag("rollback_wrong") is True
    paused = tally(start=(10, 0), pause=(30, 20), none=(40, 0), partial=(20, 0))
    assert paused.flag("rollback_wrong") is False
    assert paused.flag("acceptance_falls_after_handoff") is True


def test_too_few_steps_are_no_answer():
    few = tally(none=(10, 0), partial=(5, 2))
    assert "rollback_wrong" not in few
    assert "acceptance_falls_after_handoff" not in few


@pytest.mark.parametrize(
    ("low", "high", "answer"),
    [((100, 300), (200, 300), True), ((195, 300), (200, 300), False), ((10, 20), (20, 20), None)],
)
def test_a_share_is_below_another_only_where_that_is_clear(low, high, answer):
    below, above = (AcceptedShare(num_accepted=n, num_reached=of) for n, of in (low, high))
    assert below.is_below(above) is answer


def costs(row_s: float) -> Evidence:
    clock, evidence = Clock(), Evidence()
    costs = Costs(pass_s=1e-3 - row_s, row_s=row_s)
    draft = Costs(pass_s=1e-4, row_s=0.0, chain_s=1e-4, chain_token_s=2e-4)
    pair = planted_pair(clock, costs, draft)
    config = pass_config(5, 1e-9, 60)
    assert config is not None
    add_pass_costs(evidence, pair.target, pair.drafter.model, 4, config, clock)
    return evidence


def test_costs_are_those_that_were_planted():
    found = costs(row_s=5e-5)
    assert found.numbers("verify_rows") == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert found.numbers("verify_costs")[-1] == pytest.approx(1.2, rel=1e-3)
    assert found.number("draft_token_s") == pytest.approx(9e-4 / 4, rel=1e-3)
    assert found.flag("verify_serial") is False


def test_rows_taken_one_by_one_are_found():
    assert costs(row_s=1e-3).flag("verify_serial") is True


def test_no_room_no_costs():
    assert pass_config(5, 1.0, 2) is None
    assert pass_config(5, 0.0, 60) is None


@pytest.fixture
def copied(tmp_path):
    import shutil

    shutil.copytree(zoo_path("code-2m"), tmp_path / "draft")
    return tmp_path / "draft"


def test_files_that_belong_together():
    evidence = Evidence()
    add_files(evidence, zoo_path("code-11m"), zoo_path("code-2m"), is_foreign=False)
    assert evidence.flag("draft_of_other_target") is False
    assert evidence.flag("template_differs") is False
    assert evidence.number("draft_max_context") == 1024
    assert "weights_incomplete" not in evidence


def test_a_card_of_another_target_is_found():
    evidence = Evidence()
    add_files(evidence, zoo_path("books-1m"), zoo_path("code-2m"), is_foreign=False)
    assert evidence.flag("draft_of_other_target") is True


def test_weights_that_are_no_weights_are_found(copied):
    path = copied / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name, tensor in tensors.items() if tensor.ndim == 2)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, path)
    evidence = Evidence()
    add_files(evidence, zoo_path("code-11m"), copied, is_foreign=False)
    assert evidence.flag("weights_incomplete") is True
    assert name in evidence.facts["weights_incomplete"].source


def test_matrices_left_as_they_were_drawn_are_counted(copied):
    path = copied / "model.safetensors"
    tensors = load_file(path)
    names = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2)
    for seed, name in enumerate(names[::2]):
        drawn = torch.empty(tensors[name].shape)
        generator = torch.Generator().manual_seed(seed)
        if seed % 2:
            drawn.normal_(std=0.02, generator=generator)
        else:
            drawn.uniform_(-0.1, 0.1, generator=generator)
        tensors[name] = drawn.to(tensors[name].dtype)
    save_file(tensors, path)
    before, after = Evidence(), Evidence()
    add_weights(before, [zoo_path("code-2m") / "model.safetensors"])
    add_weights(after, [path])
    assert before.number("drawn_share") == 0.0
    assert after.number("drawn_share") == pytest.approx(len(names[::2]) / len(names), abs=0.04)


def test_a_matrix_that_training_moved_does_not_look_drawn():
    generator = torch.Generator().manual_seed(1)
    drawn = torch.empty(160, 96).normal_(generator=generator)
    direction = torch.empty(160, 1).normal_(generator=generator) @ torch.ones(1, 96)
    assert looks_drawn(drawn)
    assert not looks_drawn(drawn + 0.5 * direction), "one direction stands out"
    assert not looks_drawn(drawn * torch.linspace(0.7, 1.3, 160)[:, None]), "rows of unlike size"
    assert not looks_drawn(drawn * torch.linspace(0.7, 1.3, 96)), "columns of unlike size"


def test_the_card_is_what_acceptance_is_compared_with(copied):
    evidence = Evidence()
    add_card_ratio(evidence, copied, [(1.0, 0.3), (0.0, 0.6)])
    assert 0.4 < evidence.number("card_ratio") < 0.6
    greedy = Evidence()
    add_card_ratio(greedy, copied, [(0.37, 0.3), (0.0, 0.6)])
    assert greedy.number("card_ratio") > 0.8, "the card says nothing of 0.37"
    other = Evidence()
    add_card_ratio(other, copied, [(0.37, 0.3)])
    assert "card_ratio" not in other


def test_a_facts_file_says_what_the_evidence_said():
    evidence = Evidence()
    interval = Interval(estimate=0.9, low=0.8, high=0.95)
    evidence.add("self_draft_rate", 0.9, "9 of 10", interval)
    evidence.add("output_differs", False, "none of 4")
    evidence.add("verify_costs", [1.0, 1.2], "timed")
    evidence.add("method", "draft_model", "said")
    back = read_facts(facts_document(evidence, "a probe"), "facts.json")
    assert back.facts == evidence.facts


def test_shapes_and_types_of_a_whole_probe():
    """A short one; longer ones run unchecked."""
    target = tabular()
    engine = engine_over(target, drafting(cousin(target, 1), target.vocab_size), k=2)
    config = EvidenceConfig(num_prompts=2, num_tokens=6, costs_s=1e-9)
    found = probe_engine(ProbedEngine(engine=engine), [[1, 2], [3, 4]], SamplingParams(), config)
    assert found.flag("output_differs") is False
    assert "verify_costs" in found


def test_probed_facts_decide_the_diagnosis():
    evidence = Evidence()
    for name, value in (("alpha_1", 0.4), ("k", 4), ("replay_ratio", 0.6)):
        evidence.add(name, value, "planted")
    evidence.add("rollback_wrong", True, "planted")
    causes = Counter(s.scored.cause.label for s in diagnose(evidence).causes[:1])
    assert causes == {"kv_position_misalignment": 1}
