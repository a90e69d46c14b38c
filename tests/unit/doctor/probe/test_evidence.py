"""A probe passes what is sound, and finds what is planted by the check that is made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.lab.drafts import KeepsRejected
from tests.tiny import cousin, drafting, engine_over, tabular

from forerun.doctor.evidence import Evidence
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.run import ProbedEngine, drafting_for_itself, probe_engine
from forerun.doctor.probe.tape import run_taped
from forerun.drafters.draft_model import DraftModel
from forerun.engine import step as engine_step
from forerun.engine.observing import EmittedRecords
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import TokenSource

pytestmark = pytest.mark.usefixtures("unchecked")  # thousands of steps

CONFIG = EvidenceConfig(num_prompts=16, num_tokens=48, num_self_prompts=4, costs_s=0.0)
PROMPTS = [[1 + (i * j) % 7 for j in range(3, 8)] for i in range(16)]
WIDE = 16
"""Tokens of the vocabulary; EOS is among them, so texts ignore it."""
FORGOTTEN = 3


def pair(**changes):
    target = tabular(0, vocab_size=WIDE, scale=2.0)
    return target, cousin(target, 1)


def probed(engine, params=None, config=CONFIG, **parts) -> Evidence:
    asked = params or SamplingParams(ignore_eos=True)
    return probe_engine(ProbedEngine(engine=engine, **parts), PROMPTS, asked, config)


def of(drafter_type, k=4):
    target, draft = pair()
    return engine_over(target, drafter_type(draft, WIDE), k=k)


@pytest.mark.parametrize("verification", ["auto", "token", "coupled"])
def test_a_sound_engine_passes_every_check(verification):
    params = SamplingParams(ignore_eos=True, verification=verification)
    target, _ = pair()
    itself = engine_over(target, drafting(pair()[0], WIDE), k=4)
    found = probed(of(DraftModel), params, self_drafting=itself)
    expected = {
        "output_differs": False,
        "rollback_wrong": False,
        "draft_probs_differ": False,
        "draft_one_hot": False,
    }
    assert {name: found.flag(name) for name in expected} == expected
    assert "draft_nan" not in found
    assert found.number("pit_p_value") > 0.05
    assert found.number("replay_ratio") == pytest.approx(1.0, abs=1e-9)
    interval = found.facts["calibration"].interval
    # The interval is of two standard errors; three of them are asked for here.
    assert abs(interval.estimate - 1.0) < 1.6 * (interval.high - interval.estimate)
    assert found.number("self_draft_rate") == 1.0
    if verification != "coupled":
        assert found.flag("residual_wrong") is False
        assert found.flag("exact_match_rule") is False
        assert found.number("accept_rule_ratio") > 0.93


def test_rules_short_of_the_best_are_told_by_their_ratio():
    params = SamplingParams(ignore_eos=True, verification="walk")
    found = probed(of(DraftModel), params)
    assert found.facts["accept_rule_ratio"].interval.high < 0.9
    assert found.flag("exact_match_rule") is True
    assert found.number("pit_p_value") > 0.05, "it is exact all the same"
    assert found.number("calibration") == pytest.approx(1.0, abs=0.15)


def test_filters_and_penalties_are_part_of_the_law():
    params = SamplingParams(ignore_eos=True, top_k=6, top_p=0.95, presence_penalty=0.3)
    found = probed(of(DraftModel), params)
    assert found.number("pit_p_value") > 0.05
    assert found.flag("draft_probs_differ") is False
    assert found.flag("rollback_wrong") is False
    assert found.flag("output_differs") is False


class OtherRecord(DraftModel):
    """Records the draft's law at another temperature than that of the draws."""

    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        return [
            proposal
            if proposal is None or proposal.draft_probs is None
            else replace(
                proposal,
                draft_probs=(proposal.draft_probs.log() / 2).softmax(-1),
                assurance=None,
            )
            for proposal in proposals
        ]


def test_a_law_that_was_not_drawn_from_is_found():
    found = probed(of(OtherRecord))
    assert found.flag("draft_probs_differ") is True
    assert found.number("pit_p_value") < 0.001
    assert found.flag("rollback_wrong") is False, "its state is sound"


def test_a_cache_that_is_rewound_wrongly_is_found():
    found = probed(of(KeepsRejected, k=2))
    assert found.flag("rollback_wrong") is True
    assert found.facts["replay_ratio"].interval.high < 0.97
    assert found.flag("draft_probs_differ") is False
    assert found.number("pit_p_value") > 0.05, "the text stays exact"
    assert found.flag("output_differs") is False


def changed_verdicts(monkeypatch, change):
    """Every verdict of a step that drafted goes through `change`."""
    sound = engine_step.verify

    def verify(turns, logits, tokens):
        verdicts = sound(turns, logits, tokens)
        return [
            verdict if turn.proposal is None else change(turn, verdict)
            for turn, verdict in zip(turns, verdicts, strict=True)
        ]

    monkeypatch.setattr(engine_step, "verify", verify)


def test_accepting_everything_is_found(monkeypatch):
    def accept(turn, verdict):
        num = turn.num_drafted
        drafted = tuple(turn.proposal.tokens.tolist())
        return replace(
            verdict,
            path=tuple(range(num)),
            tokens=(*drafted, verdict.tokens[-1]),
            sources=(TokenSource.ACCEPTED,) * num + (TokenSource.BONUS,),
        )

    changed_verdicts(monkeypatch, accept)
    found = probed(of(DraftModel))
    assert found.facts["calibration"].interval.low > 1.04
    assert found.number("pit_p_value") < 0.001
    assert found.flag("output_differs") is True
    assert found.number("greedy_margin") > 4.0


def test_a_wrong_residual_is_found(monkeypatch):
    def forget(turn, verdict):
        rejected = verdict.sources[-1] is TokenSource.RECOVERED
        last = FORGOTTEN if rejected and turn.sequence.params.temperature else verdict.tokens[-1]
        return replace(verdict, tokens=(*verdict.tokens[:-1], last))

    changed_verdicts(monkeypatch, forget)
    found = probed(of(DraftModel))
    assert found.flag("residual_wrong") is True
    assert found.number("pit_p_value") < 0.001
    assert found.flag("output_differs") is False


def test_a_draft_that_drops_its_law_is_found():
    params = SamplingParams(ignore_eos=True, draft_temperature=0.0)
    assert probed(of(DraftModel), params).flag("draft_one_hot") is True


def test_a_verifier_that_rejects_what_is_certain_fails_the_self_draft(monkeypatch):
    def reject(turn, verdict):
        if len(verdict.path) < 2:
            return verdict
        return replace(
            verdict,
            path=verdict.path[:1],
            tokens=verdict.tokens[:2],
            sources=(TokenSource.ACCEPTED, TokenSource.RECOVERED),
        )

    changed_verdicts(monkeypatch, reject)
    target, _ = pair()
    itself = engine_over(target, drafting(pair()[0], WIDE), k=4)
    found = probed(of(DraftModel), self_drafting=itself)
    assert found.facts["self_draft_rate"].interval.high < 0.9
    assert found.facts["calibration"].interval.high < 0.9


class Blank(type(tabular())):
    """Has no law wherever the last token is a certain one."""

    def forward(self, batch):
        scores = super().forward(batch)
        tokens = batch.tokens[batch.logit_rows]
        scores.logits[tokens == FORGOTTEN] = float("nan")
        return scores


def test_a_draft_without_a_law_is_found():
    target, draft = pair()
    blank = Blank(log_probs=draft.log_probs, order=draft.order, store=draft.store)
    assert probed(engine_over(target, drafting(blank, WIDE), k=2)).flag("draft_nan") is True


def test_the_engine_is_left_as_it_was():
    engine = of(DraftModel)
    seen = []
    engine.observers.append(EmittedRecords(seen.append))
    drafter, observers = engine.drafter, [*engine.observers]
    num_free = engine.target.store.num_free
    probed(engine)
    assert engine.drafter is drafter
    assert engine.observers == observers
    assert seen, "observers added before the probe are still called"
    assert engine.target.store.num_free == num_free
    assert not engine.has_unfinished


def test_a_probe_can_be_repeated():
    assert probed(of(DraftModel)).facts == probed(of(DraftModel)).facts


def test_a_target_without_layers_is_not_asked_to_draft_for_itself():
    assert drafting_for_itself(of(DraftModel)) is None
    assert "self_draft_rate" not in probed(of(DraftModel))


@pytest.mark.parametrize("changes", [{"num_prompts": 0}, {"num_tokens": 1}, {"costs_s": -1.0}])
def test_settings_that_cannot_work_are_refused(changes):
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        EvidenceConfig(**changes)


def test_a_probe_leaves_later_texts_unchanged():
    params = SamplingParams(ignore_eos=True, seed=3, max_tokens=20)
    before = of(DraftModel).generate(PROMPTS[:3], params)
    engine = of(DraftModel)
    probed(engine)
    after = engine.generate(PROMPTS[:3], params)
    assert [o.token_ids for o in before] == [o.token_ids for o in after]
    assert torch.is_inference_mode_enabled() is False


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sampled_drafts_keep_their_distributions(temperature, monkeypatch):
    """Steps computed ahead have none, and are not used where an observer wants logits."""
    engine, seen = of(DraftModel), []
    generate = engine.generate

    def watched(*arguments):
        seen.append(engine.observers[-1].wants_logits)
        return generate(*arguments)

    monkeypatch.setattr(engine, "generate", watched)
    params = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True)
    run_taped(engine, PROMPTS[:1], [params])
    assert seen == [temperature > 0.0]
