"""`forerun bench` on a tiny random pair."""

from __future__ import annotations

import json

import pytest

from forerun.cli.bench import BenchOptions
from forerun.cli.main import main
from forerun.measure.bench import compare as arms
from forerun.measure.bench.comparison import BenchComparison

SMALL = ("--blocks", "2", "--max-tokens", "18", "--threads", "1")


@pytest.fixture
def bench(tiny_pair, tmp_path):
    """Runs the command on four prompts; two of them tagged."""
    prompts = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": f"def f{i}({'x' * i}):", "tag": "even" if i % 2 == 0 else "odd"}
        for i in range(4)
    ]
    prompts.write_text("\n".join(map(json.dumps, records)))

    def run(*arguments, ks="1,3", draft=tiny_pair.draft):
        pair = ("--target", str(tiny_pair.target), "--arms", f"d={draft}@{ks}")
        return main(["bench", *pair, "--prompts", str(prompts), *SMALL, *arguments])

    return run


def test_tables_and_files(bench, tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench("--temperatures", "0", "1", "--batch", "1", "2", "--out", str(out), ks="2") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "greedy (T=0), batch 1, 2 blocks" in text
    assert "sampled (T=1), batch 2, 2 blocks" in text
    content = json.loads(out.read_text())
    cells = {(cell["temperature"], cell["batch"]): cell for cell in content["cells"]}
    assert cells.keys() == {(0, 1), (1, 1), (0, 2), (1, 2)}
    for cell in cells.values():
        if cell["temperature"] == 1 and not cell["rows"]:
            continue  # a sampled text that ends at its first token leaves too few blocks
        plain, draft = cell["rows"]
        assert plain["name"] == "plain"
        assert draft["name"] == "d K=2"
        assert len(cell["blocks"]) == 2
    # The draft is the target with noise: if it drafts at all, some of it is accepted.
    assert cells[0, 1]["rows"][1]["num_accepted"] > 0
    assert len(content["provenance"]["models"]) == 2


def test_completions_too_short_to_measure_are_named(bench, capsys):
    assert bench("--temperatures", "0", "--max-tokens", "8") == 2
    assert "nothing was measured" in capsys.readouterr().err


def test_json_on_standard_output_is_nothing_but_json(bench, capsys):
    assert bench("--temperatures", "0", "--json") == 0
    content = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in content["cells"][0]["rows"]] == ["plain", "d K=1", "d K=3"]


def test_ctrl_c_shows_and_writes_what_was_measured(bench, tmp_path, capsys, monkeypatch):
    progress = BenchComparison.progress.fget

    def interrupted(self):
        if sum(map(len, self.blocks.values())) == 3:
            raise KeyboardInterrupt
        return progress(self)

    monkeypatch.setattr(BenchComparison, "progress", property(interrupted))
    out = tmp_path / "bench.json"
    assert bench("--out", str(out)) == 130
    captured = capsys.readouterr()
    assert "d K=3" in captured.out
    assert "too few blocks for a table" in captured.out
    assert captured.err.rstrip().endswith("forerun: interrupted")
    cells = json.loads(out.read_text())["cells"]
    assert [len(cell["blocks"]) for cell in cells] == [2, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--batch", "5"), "do not fill a batch of 5"),
        (("--out", "no/such/folder/x.json"), "cannot be written"),
        (("--arms", "draft"), "is not [NAME=]DRAFT@K"),
        (("--blocks", "1"), "num_blocks is 1"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_loads(
    bench, capsys, monkeypatch, arguments, message
):
    monkeypatch.setattr(arms, "draft_arms", None)
    assert bench(*arguments) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_without_arms_the_shipped_draft_or_auto_is_compared():
    config = BenchOptions(model="zoo:code-40m").config
    assert [(arm.draft, arm.ks) for arm in config.arms] == [("zoo:code-2m-for-40m", (1, 2, 3, 4))]
    config = BenchOptions().config
    assert config.target == "zoo:smollm2-135m"
    assert [arm.draft for arm in config.arms] == ["zoo:eagle3-for-smollm2-135m"]
    assert [arm.draft for arm in BenchOptions(model="zoo:books-1m").config.arms] == ["auto"]


def test_auto_is_an_arm_beside_plain_and_fixed_k(tiny_pair, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):"}) for n in range(6)))
    small = ["--blocks", "2", "--max-tokens", "18", "--threads", "1"]
    common = ["bench", "--target", str(tiny_pair.target), "--prompts", str(prompts), *small]
    common += ["--temperature", "1", "--json"]
    trace = tmp_path / "t.jsonl"
    arms = ["--arms", "auto", "suffix@2", "--trace", str(trace)]
    assert main([*common, *arms]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert [row["name"] for row in cell["rows"]] == ["plain", "auto", "suffix K=2"]
    assert '"suffix"' in trace.read_text().splitlines()[0]
    for named in ("none", "plain"):
        assert main([*common, "--arms", named]) == 0
        (cell,) = json.loads(capsys.readouterr().out)["cells"]
        assert [row["name"] for row in cell["rows"]] == ["plain"]
    assert main([*common, "--arms", "auto@2,4"]) == 2
    assert "auto chooses K by itself" in capsys.readouterr().err
