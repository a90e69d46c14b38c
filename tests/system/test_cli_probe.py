"""`forerun diagnose --probe` on a tiny random pair, and what it makes of the facts."""

from __future__ import annotations

import json
import shutil

import pytest

from forerun.cli.main import main
from forerun.doctor.probe.config import EvidenceConfig

FEW = ["--k", "3"]
VERDICTS = (0, 3, 4)


@pytest.fixture(autouse=True)
def few(monkeypatch):
    config = EvidenceConfig(num_prompts=2, num_tokens=24, num_self_tokens=8)
    monkeypatch.setattr("forerun.cli.probe.EvidenceConfig", lambda: config)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def add(left, right):\nimport os\nclass Stack:\nfor name in names:\n")
    return ["--prompts", str(path)]


@pytest.fixture
def models(tiny_pair):
    return ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]


def test_facts_are_diagnosed_and_written(models, prompts, tmp_path, capsys):
    out = tmp_path / "facts.json"
    arguments = ["--probe", *models, *prompts, *FEW, "--out", str(out), "--json"]
    assert main(["diagnose", *arguments]) in VERDICTS
    printed = json.loads(capsys.readouterr().out)["evidence"]
    facts = json.loads(out.read_text())["facts"]
    assert all(printed[name]["value"] == fact["value"] for name, fact in facts.items())
    assert facts["output_differs"]["value"] is False
    assert facts["self_draft_rate"]["value"] > 0.99
    assert facts["draft_one_hot"]["value"] is False  # also where steps are computed ahead
    assert facts["verify_rows"]["value"] == [1, 2, 3, 4]
    assert "accepted" in facts["calibration"]["source"]
    assert main(["diagnose", str(out), "--json"]) in VERDICTS
    read = json.loads(capsys.readouterr().out)
    assert read["sources"][0]["kinds"] == ["facts"]
    assert read["evidence"]["self_draft_rate"]["value"] > 0.99


def test_a_draft_whose_tokens_cannot_be_matched_is_a_finding(tiny_pair, prompts, tmp_path, capsys):
    lossy = tmp_path / "lossy"
    shutil.copytree(tiny_pair.stranger, lossy)
    file = lossy / "tokenizer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )
    out = tmp_path / "facts.json"
    pair = ["--target", str(tiny_pair.target), "--draft", str(lossy)]
    assert main(["probe", *pair, *prompts, *FEW, "--out", str(out)]) == 3  # its former name
    captured = capsys.readouterr()
    assert captured.err.startswith("forerun probe is forerun diagnose --probe now\n")
    assert json.loads(out.read_text())["facts"]["vocabularies_differ"]["value"] is True
    assert main(["diagnose", str(out), "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["causes"][0]["label"] == "tokenizer_mismatch"


def test_a_draft_with_another_tokenizer_is_no_finding(tiny_pair, prompts, tmp_path):
    out = tmp_path / "facts.json"
    pair = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.stranger)]
    assert main(["diagnose", "--probe", *pair, *prompts, *FEW, "--out", str(out)]) in VERDICTS
    facts = json.loads(out.read_text())["facts"]
    assert facts["vocabularies_differ"]["value"] is False
    assert facts["output_differs"]["value"] is False


SHIPPED = ("--model", "zoo:code-40m")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], "--draft"),
        (["--target", "zoo:code-2m"], "name a --draft for zoo:code-2m"),
        (["--target", "some/model", "--draft", "other/model"], "--prompts"),
        ([*SHIPPED, "--k", "0"], "--num-speculative-tokens is 0"),
        ([*SHIPPED, "--k", "1.5"], "k is 1.5; it must be a whole number"),
        ([*SHIPPED, "--temperature", "-1"], "temperature"),
        ([*SHIPPED, "--out", "missing/folder/facts.json"], "--out"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(arguments, words, capsys):
    assert main(["diagnose", "--probe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_flags_of_the_pair_need_the_probe(capsys):
    assert main(["diagnose", "trace.jsonl", "--draft", "some/draft"]) == 2
    assert "need --probe" in capsys.readouterr().err
