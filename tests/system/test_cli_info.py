"""`forerun info` on tiny models."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace

import pytest
from gguf import GGMLQuantizationType as Kind
from tests.cards import card_for
from tests.gguf_files import all_of, write_gguf, write_tiny_folder

from forerun.cli.main import main
from forerun.models.draft_card import CardFigures, identify, write_card
from forerun.theory.intervals import Interval


@pytest.fixture
def info(capsys):
    def call(*arguments):
        code = main(["info", *map(str, arguments)])
        return code, capsys.readouterr()

    return call


def test_table_says_what_a_model_is(info, tiny_pair):
    code, captured = info(tiny_pair.target)
    assert code == 0
    for word in ("LlamaForCausalLM, 2 layers", "26,816 in float32", "257 tokens", "per sequence"):
        assert word in captured.out


def test_json_has_sizes_memory_and_hashes(info, tiny_pair):
    code, captured = info(tiny_pair.target, "--json", "--max-batch", 2, "--max-context", 100)
    content = json.loads(captured.out)
    assert code == 0
    assert content["num_parameters"] == 26816
    assert content["context"] == 100
    assert content["kv_bytes_per_token"] == 2 * 2 * 1 * 16 * 4  # keys, values; layers; heads; fp32
    assert content["memory"]["kv_bytes"] == 2 * content["kv_bytes_per_slot"]
    assert content["memory"]["weights_bytes"] == 4 * 26816
    assert len(content["weights_hash"]) == 16


def test_dtype_changes_the_memory_needed(info, tiny_pair):
    sizes = {
        dtype: json.loads(info(tiny_pair.target, "--json", "--dtype", dtype)[1].out)["memory"]
        for dtype in ("float32", "bfloat16")
    }
    assert sizes["float32"]["weights_bytes"] == 2 * sizes["bfloat16"]["weights_bytes"]


def test_a_draft_that_fits_but_cannot_pay_is_warned_about(info, tiny_pair):
    code, captured = info(tiny_pair.target, "--draft", tiny_pair.draft)
    assert code == 0
    assert "the draft fits" in captured.out
    assert "not smaller than the target" in captured.out


@pytest.fixture
def unfit(tiny_pair, tmp_path):
    """A draft whose tokenizer lower-cases every text."""
    folder = shutil.copytree(tiny_pair.stranger, tmp_path / "unfit")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def test_a_draft_with_another_tokenizer_shows_what_is_shared_and_how_it_drafts(info, tiny_pair):
    code, captured = info(tiny_pair.target, "--draft", tiny_pair.stranger)
    assert code == 0
    text = " ".join(captured.out.split())
    assert "257 of the target's 257 tokens are the draft's too" in text
    assert "drafts by shared tokens (TLI)" in text
    fit = json.loads(info(tiny_pair.target, "--draft", tiny_pair.stranger, "--json")[1].out)["fit"]
    assert fit["method"] == "tli"
    assert fit["vocabularies"]["first_differences"] == [[257, None, "zz"]]


def test_a_draft_that_does_not_fit_is_exit_1_with_the_reason(info, tiny_pair, unfit):
    code, captured = info(tiny_pair.target, "--draft", unfit)
    assert code == 1
    assert "does not fit" in captured.out
    assert "turns 'Ab' into 'ab'" in " ".join(captured.out.split())
    assert "id 257: target None, draft 'zz'" in captured.out
    code, captured = info(tiny_pair.target, "--draft", unfit, "--json")
    assert code == 1
    assert json.loads(captured.out)["fit"]["fits"] is False


def test_an_aligned_draft_shows_its_figures_and_whether_its_target_has_changed(
    info, tiny_pair, tmp_path
):
    draft = shutil.copytree(tiny_pair.draft, tmp_path / "draft")
    made_for = identify(tiny_pair.target)
    judged = {"temperature": 1.0, "num_speculative_tokens": 4}
    card = replace(
        card_for(made_for),
        target_hash="0123",
        before=(CardFigures(**judged, acceptance_length=Interval(estimate=1.5, low=1, high=2)),),
        after=(CardFigures(**judged, acceptance_length=Interval(estimate=2.5, low=2, high=3)),),
    )
    write_card(card, draft)
    _, captured = info(tiny_pair.target, "--draft", draft)
    assert "to my/target (0123) by lk for T=1" in captured.out
    assert "T=1, K=4: tau 1.50 -> 2.50 (2.00 to 3.00)" in captured.out
    assert "has other" not in captured.out
    write_card(replace(card, made_for=replace(made_for, template="another")), draft)
    code, captured = info(tiny_pair.target, "--draft", draft, "--json")
    content = json.loads(captured.out)
    assert code == 0
    assert content["draft"]["card"]["objective"] == "lk"
    assert any("has other chat template" in warning for warning in content["fit"]["warnings"])


def test_a_folder_without_a_model_is_an_error(info, tmp_path):
    code, captured = info(tmp_path)
    assert code == 2
    assert "config.json is missing" in captured.err


def test_bad_k_is_a_usage_error(info, tiny_pair):
    code, captured = info(tiny_pair.target, "--k", -1)
    assert code == 2
    assert "num_speculative_tokens is -1" in captured.err


def test_bits_and_stored_types_are_said(info, tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", write_tiny_folder(tmp_path / "folder"), all_of(Kind.Q4_0)
    )
    content = json.loads(info(path, "--json")[1].out)
    assert content["stored_types"]["Q4_0"] > 0.98
    # The embedding is the head too: in bf16 for one, in 4 bits for the other.
    expected = 256 * 32 * (2 + 4.5 / 8) + 7 * 32 * 32 * 4.5 / 8 + 3 * 32 * 2
    assert content["memory"]["weights_bytes"] == expected
    assert "bits per weight; stored as Q4_0" in info(path)[1].out


def test_a_file_says_its_types_and_each_size_what_it_is(info, tmp_path):
    path = write_gguf(
        tmp_path / "m.gguf", write_tiny_folder(tmp_path / "folder"), all_of(Kind.Q4_1)
    )
    said = " ".join(info(path)[1].out.split())
    for words in (
        "in Q4_1, as stored; bf16 after dequantisation with --dtype bfloat16",
        "on disk",
        "of memory in this type",
        "runner native",
        "self:int4:",
        "suffix: copies",
    ):
        assert words in said
    said = " ".join(info(path, "--dtype", "bfloat16")[1].out.split())
    assert "in bfloat16 after dequantisation of Q4_1" in said
    content = json.loads(info(path, "--json")[1].out)
    assert content["keeps_blocks"] and content["file_bytes"] == path.stat().st_size
    assert content["runner"] == "native" and content["has_chat_template"] is False


def test_drafts_of_the_catalogue_are_listed_with_the_command_that_measures_them(info):
    target, draft, head = "zoo:code-40m", "zoo:code-2m-for-40m", "zoo:eagle3-for-40m"
    content = json.loads(info(target, "--json")[1].out)
    assert list(content["drafts"]) == [draft, head, "self:int4", "self:int8", "suffix"]
    said = " ".join(info(target)[1].out.split())
    assert f"forerun profile --target {target} --draft {draft}" in said


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"architectures": ["BloomForCausalLM"]}, "biases by distance"),
        ({"architectures": ["Gemma4AssistantForCausalLM"]}, "keys and values of its target"),
        ({"architectures": ["Qwen3MoEForCausalLM"]}, "of similar name is Qwen3MoeForCausalLM"),
        (
            {
                "architectures": ["MiMoForCausalLM"],
                "auto_map": {"AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"},
            },
            "remote code is never run.*its layers are those of Qwen2",
        ),
        (
            {
                "architectures": ["DeepseekV3ForCausalLM"],
                "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
            },
            r"quantised checkpoints \('fp8'\) are not supported",
        ),
    ],
)
def test_a_refusal_needs_no_weights(info, tmp_path, settings, reason):
    model_type = "deepseek_v3" if "quantization_config" in settings else "llama"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type} | settings))
    code, captured = info(tmp_path)
    assert code != 0
    assert re.search(reason, " ".join(captured.err.split()))
