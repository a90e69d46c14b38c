"""Settings and reports come back from JSON as they were."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from tests.unit.measure.judge.judgements import figures, judged

from forerun.align.config import AlignConfig, DataConfig
from forerun.align.results import AlignReport, DataSummary, JudgedPair, Judgement
from forerun.align.workspace import from_json, settings_of
from forerun.provenance import Provenance
from forerun.sampling.config import SamplingParams

CONFIG = AlignConfig(
    target="t",
    draft="d",
    data=DataConfig(prompts=Path("p"), held_out=Path("h")),
    sampling=SamplingParams(logit_bias={3: 1.5}, stop=("x",), allowed_token_ids=(1, 2), seed=4),
)


def test_settings_come_back():
    values = settings_of(CONFIG)
    assert from_json(AlignConfig, values) == CONFIG
    assert from_json(AlignConfig, {**values, "a_setting_that_was_off": None}) == CONFIG
    loaded = from_json(AlignConfig, {"target": "t", "data": {"prompts": "p"}})
    assert loaded.training.window == 512
    with pytest.raises(ValueError):
        from_json(AlignConfig, {})


def report(tmp_path: Path) -> AlignReport:
    return replace(made(), draft=tmp_path / "draft")


@cache
def made() -> AlignReport:
    before = figures([judged([0, 1]), judged([1, 0])])
    after = figures([judged([3, 2], alphas=[0.9, 0.7]), judged([3, 3], alphas=[0.8])])
    return AlignReport(
        draft=Path("draft"),
        objective="lk",
        data=DataSummary(
            num_training_prompts=3,
            num_held_out_prompts=2,
            num_samples=3,
            num_learned_tokens=12,
            num_rows=1,
        ),
        judged=(JudgedPair(before=before, after=after),),
        judgements=(
            Judgement(
                step=0,
                acceptance_length=1.5,
                acceptance_probability=None,
                predicted_speedup=None,
                duration_s=0.1,
            ),
        ),
        best_step=0,
        seconds={"judging": 0.1},
        provenance=Provenance(
            version="1",
            commit=None,
            machine="m",
            cpu="c",
            num_cores=2,
            num_threads=1,
            packages={"torch": "2"},
            models={"target": "t0"},
            date="d",
        ),
        identity={"target": "t0"},
    )


def test_a_report_comes_back_but_for_the_prompts(tmp_path):
    written = report(tmp_path)
    path = tmp_path / "report.json"
    assert AlignReport.read(path) is None
    written.write(path)
    found = AlignReport.read(path)
    assert found is not None
    assert found.to_dict() == written.to_dict()
    pair = written.judged[0]
    stripped = JudgedPair(
        before=replace(pair.before, prompts=()), after=replace(pair.after, prompts=())
    )
    assert found == replace(written, judged=(stripped,))


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"judged": []}', '{"judged": [{}]}'])
def test_a_report_that_is_none_is_not_read(tmp_path, damage):
    path = tmp_path / "report.json"
    path.write_text(damage)
    assert AlignReport.read(path) is None
