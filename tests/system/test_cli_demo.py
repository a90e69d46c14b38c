"""`forerun demo` on a tiny random pair and a clock that only counts its calls."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from itertools import count

import pytest

from forerun.cli import demo as command
from forerun.cli.main import main
from forerun.measure.bench.comparison import Demo
from forerun.measure.bench.config import DemoConfig, DraftArms
from forerun.measure.bench.report import Mismatch

ROW_KEYS = {
    "name",
    "method",
    "k",
    "tokens_per_s",
    "speedup",
    "speedup_ci",
    "acceptance_length",
    "acceptance_rate_per_position",
    "verdict",
}


NUM_PROMPTS = 8


@pytest.fixture(scope="module")
def small(tiny_pair):
    """A demonstration of few and short completions."""
    return partial(
        DemoConfig,
        target=str(tiny_pair.target),
        general=DraftArms(name="off-the-shelf", draft=str(tiny_pair.small), ks=(2,)),
        max_tokens=18,
        num_calibration=2,
        num_exact=1,
        exact_tokens=8,
        max_context=128,
        copied_k=4,
    )


@pytest.fixture(scope="module")
def drafts(tiny_pair):
    """The drafts of which the best K is shown."""
    return (DraftArms(name="domain draft", draft=str(tiny_pair.draft), ks=(1, 3)),)


def demo_of(config):
    ticks = count()
    prompts = [f"def f{i}({'x' * i}):" for i in range(NUM_PROMPTS)]
    edits = [f"def g{i}({'y' * i}):" for i in range(NUM_PROMPTS)]
    return Demo(
        config,
        prompts,
        edits,
        clock=lambda: next(ticks) / 1000,
        started_s=0.0,
        notify=lambda stage: None,
    )


@pytest.fixture(scope="module")
def finished(small, drafts):
    """A demonstration with time for everything, run once."""
    demo = demo_of(small(seconds=10.0, drafts=drafts))
    demo.run()
    return demo


@pytest.fixture
def replay(small, drafts, finished, monkeypatch):
    """Let the command find what `finished` found, with changes, or an interruption."""

    def prepare(interrupted=False, **changes):
        def run(self):
            for name in vars(finished):
                setattr(self, name, changes.get(name, getattr(finished, name)))
            if interrupted:
                raise KeyboardInterrupt

        def configured(**options):
            given = {name: options[name] for name in ("seconds", "runner", "num_threads")}
            return small(drafts=drafts, **given)

        monkeypatch.setattr(command, "DemoConfig", configured)
        monkeypatch.setattr(Demo, "run", run)

    return prepare


def test_every_stage_measures_what_it_should(finished):
    report = finished.report()
    assert report.exactness.passed
    assert report.exactness.num_accepted > 0
    assert [row.arm.num_speculative_tokens for row in report.rows][:2] == [0, 2]
    assert report.rows[2].arm.num_speculative_tokens in (1, 3)
    assert report.rows[2].acceptance_length > report.rows[1].acceptance_length
    assert 0 < report.rows[0].num_blocks <= NUM_PROMPTS - 2
    assert [row.arm.method for row in report.sampled_rows] == ["plain", "draft_model"]
    assert report.sampled_rows[0].num_blocks == NUM_PROMPTS - 2
    assert [row.arm.method for row in report.edit_rows] == ["plain", "suffix"]
    assert len(finished.example.completion.token_ids) > 8


def test_json_and_files(replay, tmp_path, capsys):
    replay()
    folder = tmp_path / "new" / "folder"
    assert main(["demo", "--json", "--out", str(folder)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert all(row.keys() >= ROW_KEYS for row in content["rows"] + content["sampled_rows"])
    assert [row["method"] for row in content["rows"]] == ["plain", "draft_model", "draft_model"]
    assert content["rows"][0]["speedup_ci"] == [1.0, 1.0]
    assert content["exactness"]["passed"] is True
    assert len(content["provenance"]["models"]) == 3
    written = json.loads((folder / "demo.json").read_text())
    assert written["rows"] == content["rows"]
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (folder / "demo.svg").read_text()


def test_tables_verdicts_and_exactness_for_people(replay, capsys):
    replay()
    assert main(["demo"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "off-the-shelf K=2",
        "the baseline, one pass of the target per token",
        "a step emits",
        "prompts that ask for an edit",
        "where every token came from",
        "identical to plain decoding in fp32",
        "Sampled (T=1)",
    ):
        assert words in out


def test_text_that_differs_fails_the_command(replay, finished, capsys):
    off = Mismatch(case="greedy", prompt=0, position=2, plain=5, speculative=6)
    replay(exactness=replace(finished.exactness, mismatches=(off,)))
    assert main(["demo"]) == 1
    assert "plain 5, speculative 6" in " ".join(capsys.readouterr().out.split())


def test_ctrl_c_shows_what_was_measured(replay, capsys):
    replay(interrupted=True, sampled_blocks=[], example=None)
    assert main(["demo"]) == 130
    captured = capsys.readouterr()
    assert "off-the-shelf K=2" in captured.out
    assert captured.err.rstrip().endswith("forerun: interrupted")


def test_ctrl_c_before_anything_was_measured(replay, capsys):
    replay(interrupted=True, blocks=[])
    assert main(["demo"]) == 130
    assert capsys.readouterr().out == ""


def test_a_folder_that_cannot_be_made_is_refused_before_anything_slow(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["demo", "--out", str(tmp_path / "file" / "folder")]) == 2
    assert "cannot be created" in capsys.readouterr().err
