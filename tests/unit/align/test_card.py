"""The card of a finished alignment says what was asked for, learned and found."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tests import tiny
from tests.unit.align.test_json_files import report
from tests.unit.measure.judge.judgements import figures, judged

from forerun.align.config import AlignConfig, DataConfig
from forerun.align.results import JudgedPair
from forerun.align.run import card_of
from forerun.align.samples import Sample, data_hash
from forerun.align.workspace import settings_of
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import read_card, staleness, write_card
from forerun.sampling.config import SamplingParams

SAMPLE = Sample(prompt_hash="p", token_ids=(1, 2, 3, 4), spans=((2, 4),))


def test_a_card_holds_both_judgements_and_knows_its_target(tmp_path: Path) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    tiny.network().save_pretrained(target)
    tiny.backend().save_pretrained(target)
    draft.mkdir()
    config = AlignConfig(
        target=str(target),
        data=DataConfig(prompts=Path("prompts.jsonl")),
        sampling=SamplingParams(temperature=0.8),
    )
    before = figures([judged([0, 1]), judged([1, 0])], temperature=0.8)
    after = figures([judged([3, 2], alphas=[0.9, 0.7]), judged([3, 3], alphas=[0.8])])
    found = replace(
        report(tmp_path),
        judged=(
            JudgedPair(before=before, after=replace(after, temperature=0.8)),
            JudgedPair(before=after, after=after),
        ),
        identity={"target": "t0"},
    )
    data = data_hash([SAMPLE])
    card = card_of(found, target=ModelFiles.open(target), settings=settings_of(config), data=data)
    write_card(card, draft)
    assert read_card(draft) == card
    assert staleness(draft, target) is None
    assert (card.temperature, card.objective, card.target_hash) == (0.8, "lk", "t0")
    assert card.settings["data"]["prompts"] == "prompts.jsonl"
    assert [entry.temperature for entry in card.after] == [0.8, 1.0]
    was, _ = card.before
    assert was.acceptance_length is not None and was.acceptance_length.estimate == 1.5
    now = card.after[0]
    assert now.acceptance_length is not None and now.acceptance_length.estimate == 3.75
    assert now.acceptance_probability is not None
    assert now.acceptance_probability.low <= 0.8 <= now.acceptance_probability.high
    assert was.acceptance_probability is None and now.speedup is None
    assert set(card.versions) >= {"forerun", "torch"}


def test_the_data_hash_follows_what_is_learned_and_nothing_else() -> None:
    other = replace(SAMPLE, token_ids=(1, 2, 3, 5))
    hashes = {
        data_hash([SAMPLE]),
        data_hash([other]),
        data_hash([SAMPLE, SAMPLE]),
        data_hash([SAMPLE, other]),
        data_hash([replace(SAMPLE, spans=((1, 4),))]),
    }
    assert len(hashes) == 5
    assert data_hash([SAMPLE, other]) == data_hash([other, SAMPLE])
    assert data_hash([replace(SAMPLE, tag="t", source="fixed")]) == data_hash([SAMPLE])
