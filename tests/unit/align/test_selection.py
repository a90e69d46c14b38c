"""The best draft is kept; damaged judgements are noticed and named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.unit.measure.judge.judgements import figures, judged

from forerun.align.results import DraftSelector, Judgement
from forerun.align.workspace import Workspace
from forerun.drafters.base import Drafter
from forerun.measure.judge import DraftFigures, Judge


class FakeJudge(Judge):
    """Finds what the weights of a snapshot say: the number of accepted tokens."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def judge(
        self,
        draft: str | Path | Drafter,
        *,
        name: str | None = None,
        max_prompts: int | None = None,
    ) -> DraftFigures:
        assert isinstance(draft, Path)
        self.asked.append(draft.name)
        accepted = int((draft / "weights").read_text()[0])
        return figures([judged([accepted]), judged([accepted])])


def selector(root: Path, *accepted: int) -> tuple[DraftSelector, FakeJudge]:
    workspace = Workspace(root=root)
    for step, number in enumerate(accepted):
        folder = workspace.snapshot(step)
        folder.mkdir(parents=True)
        (folder / "weights").write_text(f"{number} and more")
    judge = FakeJudge()
    return DraftSelector(workspace, judge, 2), judge


def test_the_best_draft_is_kept_and_judged_once(tmp_path: Path) -> None:
    found, judge = selector(tmp_path, 1, 3, 2)
    for step in (0, 1, 2, 1):
        found.consider(step)
    assert found.best.step == 1 and found.latest.step == 2
    assert (tmp_path / "draft" / "weights").read_text() == "3 and more"
    assert judge.asked == ["0", "1", "2"]
    again = DraftSelector(found.workspace, judge, 2)
    assert again.judgements == found.judgements


def test_the_first_of_equal_drafts_is_kept(tmp_path: Path) -> None:
    found, _ = selector(tmp_path, 2, 2)
    found.consider(0)
    found.consider(1)
    assert found.best.step == 0


def test_a_damaged_judgement_is_named_and_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found, judge = selector(tmp_path, 1, 3, 2)
    for step in (0, 1, 2):
        found.consider(step)
    path = found.workspace.judgements
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"step": 1', '"step": "one"')
    path.write_text("\n".join(lines) + "\n")
    with caplog.at_level(logging.WARNING, "forerun.align"):
        again = DraftSelector(found.workspace, judge, 2)
    assert f"{path} line 2 is damaged" in caplog.text
    assert sorted(again.judgements) == [0, 2]
    assert again.consider(1).acceptance_length == 4.0 and again.best.step == 1


def test_predicted_speedup_decides_before_tau() -> None:
    long, fast = (
        Judgement(
            step=0,
            acceptance_length=tau,
            acceptance_probability=None,
            predicted_speedup=speedup,
            duration_s=0.0,
        )
        for tau, speedup in ((4.0, 0.9), (3.0, 1.1))
    )
    assert fast.worth > long.worth
