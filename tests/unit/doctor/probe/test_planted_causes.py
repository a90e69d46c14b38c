"""What is planted in a pair is measured by a probe and named by a diagnosis; near misses not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.tabular import TabularModel
from tests.tiny import cousin, drafting, engine_over, tabular

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence
from forerun.doctor.probe.config import EvidenceConfig
from forerun.doctor.probe.run import ProbedEngine, add_files, probe_engine
from forerun.engine import step as engine_step
from forerun.models.catalog import zoo_path
from forerun.sampling.config import SamplingParams

WIDE = 16
LONG = 200
CONFIG = EvidenceConfig(num_prompts=8, num_tokens=40, num_self_prompts=0, costs_s=0.0)


def named(evidence: Evidence) -> list[str]:
    return [ranked.scored.cause.label for ranked in diagnose(evidence).causes]


# ------------------------------------------------------------------------------------- the context


class NearSighted(TabularModel):
    """Takes every token behind a position for the first one of the vocabulary."""

    window = 0

    def forward(self, batch):
        positions = torch.cat(
            [torch.arange(span.start, span.start + span.num_rows) for span in batch.spans]
        )
        scores = super().forward(batch)
        scores.logits[positions[batch.logit_rows] >= self.window] = torch.arange(float(WIDE))
        return scores


def of_window(window: int) -> Evidence:
    """A probe of a draft that sees so far, under prompts of some 150 tokens."""
    target = TabularModel.from_seed(
        0, vocab_size=WIDE, order=2, num_slots=4, max_context=LONG, scale=2.0
    )
    law = cousin(tabular(0, vocab_size=WIDE, scale=2.0), 1).log_probs
    store = type(target.store)(4, LONG, max_staged_rows=64)
    draft = NearSighted(log_probs=law, order=2, store=store)
    draft.window = window
    prompts = [[1 + (i * j) % 7 for j in range(3, 153)] for i in range(8)]
    engine = engine_over(target, drafting(draft, WIDE), k=2, max_context=LONG)
    return probe_engine(
        ProbedEngine(engine=engine), prompts, SamplingParams(ignore_eos=True), CONFIG
    )


@pytest.mark.usefixtures("unchecked")
def test_a_draft_past_its_window_is_worse_with_all_of_the_context_than_with_some():
    found = of_window(120)
    assert found.number("context_ratio") < 0.8
    assert named(found)[0] == "draft_context_overflow"


@pytest.mark.usefixtures("unchecked")
def test_a_draft_within_its_window_is_not():
    found = of_window(195)
    assert found.number("context_ratio") > 0.97
    assert "draft_context_overflow" not in named(found)


# ------------------------------------------------------------------------------------ the template


def beside(folder: Path, change: str, text: str) -> Evidence:
    """The shipped draft and a copy of its target with another file."""
    shutil.copytree(zoo_path("code-11m"), folder)
    (folder / change).write_text(text)
    evidence = Evidence()
    evidence.add("alpha_1", 0.5, "planted")
    add_files(evidence, folder, zoo_path("code-2m"), is_foreign=False)
    return evidence


def test_a_target_that_is_asked_in_another_format_than_its_draft_was_made_for(tmp_path: Path):
    found = beside(tmp_path / "target", "chat_template.jinja", "<s>{{ messages }}</s>")
    assert found.flag("template_differs") is True
    assert found.flag("draft_of_other_target") is False
    assert named(found)[0] == "prompt_format_mismatch"


def test_a_target_with_other_defaults_has_the_same_format(tmp_path: Path):
    found = beside(tmp_path / "target", "generation_config.json", '{"temperature": 0.3}')
    assert found.flag("template_differs") is False
    assert "prompt_format_mismatch" not in named(found)


# ---------------------------------------------------------------------------------- the rejections


def astray(monkeypatch: pytest.MonkeyPatch, *, after_rejection: bool) -> Evidence:
    """A probe of a target that says the wrong thing in some steps: after a rejection, or anywhere.

    After a rejection it is the next step that is wrong, whose rows were read from a state that
    still has what was rejected; the rule that rejected is right.
    """
    sound = engine_step.verify
    rejected: dict[int, bool] = {}
    seen: dict[int, int] = {}

    def verify(turns, logits, tokens):
        verdicts = []
        for turn, verdict in zip(turns, sound(turns, logits, tokens), strict=True):
            key = id(turn.sequence)
            seen[key] = seen.get(key, 0) + 1
            wrong = rejected.get(key, False) if after_rejection else seen[key] % 5 == 4
            if turn.proposal is not None:
                rejected[key] = verdict.num_accepted < turn.num_drafted
                if wrong:
                    other = (verdict.tokens[-1] + 5) % WIDE
                    verdict = replace(verdict, tokens=(*verdict.tokens[:-1], other))
            verdicts.append(verdict)
        return verdicts

    monkeypatch.setattr(engine_step, "verify", verify)
    target = tabular(0, vocab_size=WIDE, scale=2.0)
    engine = engine_over(target, drafting(cousin(target, 1), WIDE), k=2)
    prompts = [[1 + (i * j) % 7 for j in range(3, 8)] for i in range(8)]
    return probe_engine(
        ProbedEngine(engine=engine), prompts, SamplingParams(ignore_eos=True), CONFIG
    )


@pytest.mark.usefixtures("unchecked")
def test_text_that_goes_astray_after_rejections_points_at_what_is_rolled_back(monkeypatch):
    found = astray(monkeypatch, after_rejection=True)
    assert found.number("greedy_margin") > 4.0
    assert found.flag("output_differs_after_partial") is True
    assert named(found)[0] == "kv_position_misalignment"


@pytest.mark.usefixtures("unchecked")
def test_text_that_goes_astray_anywhere_does_not(monkeypatch):
    found = astray(monkeypatch, after_rejection=False)
    assert found.flag("output_differs") is True
    assert found.flag("output_differs_after_partial") is False
    assert "kv_position_misalignment" not in named(found)
    assert "recurrent_state_rollback" not in named(found)
