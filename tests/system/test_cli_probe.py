"""`forerun probe` on a tiny random pair, and what diagnose makes of its facts."""

from __future__ import annotations

import json
import shutil

import pytest

from forerun.cli.main import main

FEW = ["--num-prompts", "2", "--num-tokens", "24", "--k", "3", "--max-context", "160"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text("def add(left, right):\nimport os\nclass Stack:\nfor name in names:\n")
    return ["--prompts", str(path)]


@pytest.fixture
def models(tiny_pair):
    return ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]


def test_facts_go_to_diagnose(models, prompts, tmp_path, capsys):
    out = tmp_path / "facts.json"
    assert main(["probe", *models, *prompts, *FEW, "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(out.read_text())
    facts = printed["facts"]
    assert facts["output_differs"]["value"] is False
    assert facts["self_draft_rate"]["value"] > 0.99
    assert facts["draft_one_hot"]["value"] is False  # also where steps are computed ahead
    assert facts["verify_rows"]["value"] == [1, 2, 3, 4]
    assert "accepted" in facts["calibration"]["source"]
    assert main(["diagnose", str(out), "--json"]) in (0, 3, 4)
    read = json.loads(capsys.readouterr().out)
    assert read["sources"][0]["kinds"] == ["facts"]
    assert read["evidence"]["self_draft_rate"]["value"] > 0.99


def test_a_table_for_people(models, prompts, capsys):
    assert main(["probe", *models, *prompts, *FEW, "--once"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for words in ("calibration", "output_differs", "no", "forerun diagnose trace.jsonl facts.json"):
        assert words in text


def test_a_draft_whose_tokens_cannot_be_matched_is_a_finding(tiny_pair, prompts, tmp_path, capsys):
    lossy = tmp_path / "lossy"
    shutil.copytree(tiny_pair.stranger, lossy)
    file = lossy / "tokenizer.json"
    file.write_text(
        json.dumps(json.loads(file.read_text()) | {"normalizer": {"type": "Lowercase"}})
    )
    out = tmp_path / "facts.json"
    pair = ["--target", str(tiny_pair.target), "--draft", str(lossy)]
    assert main(["probe", *pair, *prompts, *FEW, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["facts"]["vocabularies_differ"]["value"] is True
    assert main(["diagnose", str(out), "--json"]) == 3
    text = capsys.readouterr().out
    found = json.loads(text[text.index('{"verdict"') :])
    assert found["causes"][0]["label"] == "tokenizer_mismatch"


def test_a_draft_with_another_tokenizer_is_no_finding(tiny_pair, prompts, tmp_path):
    out = tmp_path / "facts.json"
    pair = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.stranger)]
    assert main(["probe", *pair, *prompts, *FEW, "--once", "--out", str(out)]) == 0
    facts = json.loads(out.read_text())["facts"]
    assert facts["vocabularies_differ"]["value"] is False
    assert facts["output_differs"]["value"] is False


SHIPPED = ("--model", "zoo:code-40m")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--draft", "none"], "--draft"),
        ([], "name a --draft for zoo:smollm2-135m"),
        (["--target", "some/model", "--draft", "other/model"], "--prompts"),
        ([*SHIPPED, "--k", "0"], "--num-speculative-tokens is 0"),
        ([*SHIPPED, "--num-tokens", "1"], "num_tokens is 1"),
        ([*SHIPPED, "--temperature", "-1"], "temperature"),
        ([*SHIPPED, "--out", "missing/folder/facts.json"], "--out"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_loaded(arguments, words, capsys):
    assert main(["probe", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help_shows_examples(capsys):
    with pytest.raises(SystemExit):
        main(["probe", "--help"])
    assert "forerun diagnose trace.jsonl facts.json" in capsys.readouterr().out
