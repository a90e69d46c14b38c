"""`forerun info TARGET --draft HEAD`, and decoding with the head, as a user runs them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tests.cards import card_for
from tests.profiles import exact_times

from forerun.cli.main import main
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head
from forerun.drafters.eagle3.load import write_eagle3_head
from forerun.drafters.medusa import MedusaConfig, MedusaHeads, write_medusa
from forerun.measure.profile import load_profile
from forerun.models.checkpoint import ModelFiles
from forerun.models.draft_card import identify, write_card
from forerun.models.load import load_model

TARGET = "zoo:code-2m"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A random EAGLE-3 head for the small shipped model."""
    folder = tmp_path_factory.mktemp("head")
    target = load_model(TARGET, max_batch=1, max_context=32, runner="eager")
    torch.manual_seed(0)
    layers = (0, 1, target.num_layers)
    head = Eagle3Head(
        Eagle3Config(
            target_hidden_size=target.hidden_size,
            target_vocab_size=target.vocab_size,
            feature_layers=layers,
            draft_vocab_size=512,
            hidden_size=target.hidden_size,
            intermediate_size=64,
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            max_positions=1024,
        )
    )
    write_eagle3_head(head.to(torch.bfloat16), folder, target=TARGET)
    return folder


def info(capsys, folder):
    code = main(["info", TARGET, "--draft", str(folder), "--json"])
    return code, json.loads(capsys.readouterr().out)["draft"]


def test_a_fitting_head_is_described(capsys, folder):
    code, found = info(capsys, folder)
    assert code == 0
    assert found["fits"]
    assert found["sizes"]["draft_vocab_size"] == 512


def test_a_head_for_another_target_does_not_fit(capsys, folder):
    assert main(["info", "zoo:code-11m", "--draft", str(folder)]) == 1
    assert "made for a target with hidden size" in " ".join(capsys.readouterr().out.split())


def test_medusa_heads_are_described_and_draft(capsys, tmp_path):
    heads = MedusaHeads(MedusaConfig(hidden_size=128, vocab_size=8192, num_heads=2))
    write_medusa(heads, tmp_path, target=TARGET)
    code, found = info(capsys, tmp_path)
    assert code == 0, found["problems"]
    assert found["method"] == "medusa"
    assert found["sizes"]["num_heads"] == 2


def test_text_with_a_head_is_that_without(capsys, folder):
    args = ["generate", "def add(a, b):", "--target", TARGET, "--dtype", "float32"]
    args += ["--max-tokens", "16", "--temperature", "0"]
    assert main(args) == 0
    plain = capsys.readouterr().out
    assert main([*args, "--draft", str(folder), "--k", "3", "--controller", "fixed"]) == 0
    assert capsys.readouterr().out == plain


def test_a_profile_of_a_head_plans_and_controls_it(capsys, folder, tmp_path):
    out = tmp_path / "profile.json"
    pair = ("--target", TARGET, "--draft", str(folder))
    sizes = ("--rows", "1,2,3,5", "--batch", "1", "--context", "32", "--budget-s", "0.1")
    assert main(["profile", *pair, *sizes, "--out", str(out)]) == 0
    assert "draft pass over 5 tokens" in capsys.readouterr().out
    profile = load_profile(out)
    assert profile.setup.draft_runner in ("NativeEagle3Model", "Eagle3Model")
    assert profile.reading is not None
    assert all(s > 0 for line in profile.greedy.lines for s in (*line.verify_s, line.plain_s))
    exact_times(out)
    flags = ("--profile", str(out), "--acceptance", "0.8", "--temperature", "0", "--json")
    assert main(["plan", *flags]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert str(folder) in json.dumps(planned)
    controlled = ("--profile", str(out), "--controller", "auto", "--max-tokens", "8")
    assert main(["generate", "x =", *pair, *controlled]) == 0


def test_a_profile_of_medusa_heads_has_the_costs_of_whole_steps(tmp_path):
    heads = MedusaHeads(MedusaConfig(hidden_size=128, vocab_size=8192, num_heads=2))
    write_medusa(heads, tmp_path, target=TARGET)
    out = tmp_path / "profile.json"
    sizes = ("--rows", "1,2,3,5", "--batch", "1", "--context", "32", "--budget-s", "0.1")
    pair = ("--target", TARGET, "--draft", str(tmp_path))
    assert main(["profile", *pair, *sizes, "--out", str(out)]) == 0
    profile = load_profile(out)
    assert profile.setup.draft_runner == "MedusaDrafter"
    assert profile.greedy.lines[0].overhead_ks == (1, 4)


def test_traces_name_medusa_heads_by_their_hash(capsys, tmp_path):
    heads = MedusaHeads(MedusaConfig(hidden_size=128, vocab_size=8192, num_heads=2))
    write_medusa(heads, tmp_path / "heads", target=TARGET)
    trace = tmp_path / "trace.jsonl"
    args = ["generate", "x =", "--target", TARGET, "--draft", str(tmp_path / "heads")]
    assert main([*args, "--max-tokens", "6", "--controller", "fixed", "--trace", str(trace)]) == 0
    header = json.loads(trace.read_text().splitlines()[0])
    assert header["draft_hash"]


def test_a_head_whose_card_names_other_weights_drafts_with_a_warning(capsys, tmp_path):
    heads = MedusaHeads(MedusaConfig(hidden_size=128, vocab_size=8192, num_heads=2))
    write_medusa(heads, tmp_path, target="my/target")
    made_for = replace(identify(ModelFiles.find(TARGET).folder), weights="a1b2c3")
    write_card(card_for(made_for), tmp_path)
    code, found = info(capsys, tmp_path)
    assert code == 0
    assert "has other weights" in found["warnings"][0]
    assert main(["generate", "x =", "--target", TARGET, "--draft", str(tmp_path)]) == 0
    assert "has other weights" in " ".join(capsys.readouterr().err.split())
