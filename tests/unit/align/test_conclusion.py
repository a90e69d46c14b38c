"""What is exported follows what was found: K, or no speculation where none pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests import training
from tests.unit.align.test_json_files import report

from forerun.align import run as alignment
from forerun.align.config import AlignConfig, DataConfig, EvaluationConfig
from forerun.align.objectives import OBJECTIVES
from forerun.align.results import AlignReport
from forerun.align.workspace import Phases, Workspace
from forerun.measure.judge import PredictedSpeedup
from forerun.models.checkpoint import ModelFiles
from forerun.theory.intervals import Interval

SLOW = Interval(estimate=0.32, low=0.3, high=0.34)
CONFIG = AlignConfig(
    target="t",
    draft="d",
    data=DataConfig(prompts=Path("p")),
    evaluation=EvaluationConfig(num_speculative_tokens=5),
)


def with_best_k(found: AlignReport, k: int) -> AlignReport:
    pair = found.judged[0]
    speedup = PredictedSpeedup(
        **asdict(SLOW), num_speculative_tokens=k, best=SLOW, per_k=(SLOW,) * 5
    )
    overall = replace(pair.after.overall, speedup=speedup)
    after = replace(pair.after, overall=overall)
    return replace(found, judged=(replace(pair, after=after),))


@pytest.mark.parametrize(("best_k", "expected"), [(0, 0), (3, 3), (None, 5)])
def test_the_exported_k_is_the_one_that_pays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    best_k: int | None,
    expected: int,
) -> None:
    exported: list[int] = []

    def describe(
        target: ModelFiles, draft: Path, k: int, sampling: object, method: str
    ) -> SimpleNamespace:
        exported.append(k)
        return SimpleNamespace(speculates=k > 0)

    def write(engines: Sequence[str], serving: SimpleNamespace) -> tuple[Path, ...]:
        return ()

    monkeypatch.setattr(alignment, "describe_pair", describe)
    monkeypatch.setattr(alignment, "export_draft", write)
    found = report(tmp_path)
    if best_k is not None:
        found = with_best_k(found, best_k)
    assert found.best_k == best_k
    config = replace(CONFIG, out=tmp_path)
    run = alignment.Run(
        config=config,
        target=ModelFiles("t", tmp_path),
        objective=OBJECTIVES["nla"],
        accelerator=training.fresh_accelerator(),
        dtypes={},
        workspace=Workspace(root=tmp_path),
        phases=Phases(None),
        num_threads=1,
    )
    run.export(found)
    assert exported == [expected]
    warned = "no number of speculative tokens up to 5" in caplog.text
    assert warned == (best_k == 0)
