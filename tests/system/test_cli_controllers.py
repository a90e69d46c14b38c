"""`forerun generate` under every controller, and profiles that are not of this pair."""

from __future__ import annotations

import json

import pytest
from tests.profiles import exact_times

from forerun.cli.main import main
from forerun.control.config import CONTROLLER_NAMES
from forerun.theory.record import StepRecord, TraceHeader
from forerun.trace.files import read_trace

FEW = ["--rows", "1,2,5", "--batches", "1,2", "--contexts", "8", "--budget-s", "0.001"]
ASKED = ["generate", "def add", "--max-tokens", "12", "--temperature", "0", "--json", "--quiet"]


@pytest.fixture(scope="module")
def models(tiny_pair):
    return ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)]


@pytest.fixture(scope="module")
def profile(models, tmp_path_factory):
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    assert main(["profile", *models, *FEW, "--out", str(path)]) == 0
    exact_times(path)
    return str(path)


def ids(capsys) -> list[int]:
    return json.loads(capsys.readouterr().out)["token_ids"]


def test_every_controller_generates_the_same_text(models, profile, capsys):
    assert main([*ASKED, *models]) == 0
    expected = ids(capsys)
    for name in CONTROLLER_NAMES:
        assert main([*ASKED, *models, "--controller", name, "--profile", profile]) == 0
        assert ids(capsys) == expected


def test_auto_without_a_profile_learns_costs(models, capsys):
    assert main([*ASKED, *models, "--controller", "auto"]) == 0


def test_a_profile_of_another_pair_is_refused(models, tiny_pair, profile, capsys):
    other = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.target)]
    assert main([*ASKED, *other, "--profile", profile]) != 0
    assert "draft_hash" in capsys.readouterr().err


@pytest.mark.parametrize("draft", ["none", "suffix"])
def test_a_profile_without_a_draft_model_is_refused(tiny_pair, profile, draft, capsys):
    assert main([*ASKED, "--target", str(tiny_pair.target), "--draft", draft, "--profile", profile])
    assert "profile" in capsys.readouterr().err


def test_several_drafters_generate_the_same_text_and_are_told_apart(
    models, tiny_pair, profile, tmp_path, capsys
):
    assert main([*ASKED, *models]) == 0
    expected = ids(capsys)
    path = tmp_path / "trace.jsonl"
    several = [*models, "--draft", "suffix", "--trace", str(path)]
    for chosen in (["--controller", "auto"], ["--profile", profile]):
        assert main([*ASKED, *several, *chosen]) == 0
        assert ids(capsys) == expected
    items = list(read_trace(path))
    headers = [item for item in items if isinstance(item, TraceHeader)]
    assert [header.draft for header in headers] == [str(tiny_pair.draft), "suffix"]
    hashes = {header.draft: header.draft_hash for header in headers}
    steps = [item for item in items if isinstance(item, StepRecord) and item.num_drafted]
    assert "draft_model" in {step.method for step in steps}
    for step in steps:
        drafter = "suffix" if step.method == "suffix" else str(tiny_pair.draft)
        assert step.drafter_hash == hashes[drafter]


def test_a_second_profile_of_a_draft_is_refused(models, profile, capsys):
    assert main([*ASKED, *models, "--profile", profile, "--profile", profile]) != 0
    assert "second profile" in capsys.readouterr().err


def test_a_self_draft_learns_its_costs_beside_a_draft_with_a_profile(models, profile, capsys):
    assert main([*ASKED, *models, "--draft", "self:1", "--profile", profile]) == 0
    alone = [*ASKED, *models[:2], "--draft", "self:1", "--profile", profile]
    assert main(alone) != 0
    assert "draft_hash" in capsys.readouterr().err


def test_bench_has_an_arm_per_draft_and_controller(tiny_pair, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": f"def f{n}(x):"}) for n in range(8)))
    pair = ["--target", str(tiny_pair.target), "--arms", f"d={tiny_pair.draft}@1,3"]
    small = ["--blocks", "4", "--max-tokens", "18", "--threads", "1"]
    chosen = ["--controller", "auto", "fixed", "--temperatures", "1"]
    assert main(["bench", *pair, "--prompts", str(prompts), *small, *chosen, "--json"]) == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    rows = {row["name"]: row for row in cell["rows"]}
    assert list(rows) == ["plain", "d K=1", "d K=3", "d auto", "d fixed"]


@pytest.mark.parametrize("flag", ["--weights", "--draft-weights"])
def test_a_profile_is_of_weights_as_they_are_stored(models, profile, flag, capsys):
    assert main([*ASKED, *models, "--profile", profile, flag, "int8"]) != 0
    assert "a --profile is of weights as they are stored" in capsys.readouterr().err
