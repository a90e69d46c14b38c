"""GGUF files of every family: the logits are those of the model in transformers.

Names of tensors come from the `gguf` package. The settings are those that llama.cpp's converter
writes, checked once against files that it wrote of the same models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests import tiny
from tests.gguf_files import add_byte_tokenizer, interleaved
from transformers import AutoConfig, AutoModelForCausalLM

from forerun.errors import InvalidModel
from forerun.models.checkpoint import ModelFiles
from forerun.models.families import FAMILIES
from forerun.models.gguf.file import GGUFFile
from forerun.models.gguf.settings import translate_settings
from forerun.models.huggingface import read_weights
from forerun.models.load import load_model

IDS = [5, 9, 2, 7, 30, 1, 4, 4, 8, 77, 100, 3, 2, 9, 11, 200, 31, 8, 8, 1]
SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
PART = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts_per_tok": 2}
SLIDING = ["sliding_attention"] * 3 + ["full_attention"] + ["sliding_attention"] * 2
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # name: architecture in the file, configuration of transformers, settings of the file
    "llama": ("llama", {"head_dim": 16}, {"rope.dimension_count": 16}),
    "mixtral": ("llama", {"num_local_experts": 4, **EXPERTS}, {"rope.dimension_count": 16}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {"head_dim": 32}, {}),
    "qwen3_moe": (
        "qwen3moe",
        {
            "head_dim": 32,
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            **EXPERTS,
        },
        {"expert_feed_forward_length": 32},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, **EXPERTS}, {}),
    "gemma": ("gemma", {"head_dim": 32}, {}),
    "gemma2": (
        "gemma2",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
        {
            "attention.sliding_window": 8,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3_text": (
        "gemma3",
        {
            "head_dim": 32,
            "sliding_window": 8,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            "attention.sliding_window": 8,
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
        },
    ),
    "phi3": (
        "phi3",
        {"sliding_window": 8, "rope_parameters": PART},
        {
            "attention.sliding_window": 8,
            "rope.dimension_count": 8,
            "rope.scaling.original_context_length": 128,
        },
    ),
    "smollm3": ("smollm3", {}, {"rope.dimension_count": 16, "rope.freq_base": 2e6}),
    "granite": (
        "granite",
        {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 4.0,
        },
        {
            "rope.dimension_count": 16,
            "attention.scale": 0.3,
            "embedding_scale": 3.0,
            "residual_scale": 0.22,
            "logit_scale": 4.0,
        },
    ),
    "olmo2": ("olmo2", {}, {}),
    "olmo3": (
        "olmo2",
        {"sliding_window": 8, "layer_types": SLIDING},
        {
            "attention.sliding_window": 8,
            "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in SLIDING],
        },
    ),
    "exaone4": (
        "exaone4",
        {"head_dim": 32, "sliding_window": 8, "layer_types": SLIDING},
        {"attention.sliding_window": 8},
    ),
    "glm4": (
        "glm4",
        {"head_dim": 32, "attention_bias": True, "rope_parameters": PART},
        {"rope.dimension_count": 16},
    ),
    "glm": ("chatglm", {"head_dim": 16, "attention_bias": True, "rope_parameters": PART}, {}),
    "ernie4_5": ("ernie4_5", {"head_dim": 32}, {}),
    "seed_oss": ("seed_oss", {"head_dim": 32, "attention_bias": True}, {}),
}
PAIRED = ("llama", "mixtral", "granite", "smollm3")


def stacked(name: str, weights: dict[str, np.ndarray], num_experts: int) -> tuple[str, np.ndarray]:
    """Return the name in the layer, without the number, and the tensor of all experts."""
    stem, number = name.split(".experts.0.")
    each = [weights[f"{stem}.experts.{n}.{number}"] for n in range(num_experts)]
    return number.removesuffix(".weight"), np.stack(each)


EXPERT_NAMES = {
    **{"w1": "ffn_gate_exps", "w3": "ffn_up_exps", "w2": "ffn_down_exps"},
    **{"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"},
}


def add_weights(writer: gguf.GGUFWriter, name: str, folder: Path, config: Any) -> None:
    """Write the tensors of a folder as llama.cpp's converter does."""
    weights = {key: value.float().numpy() for key, value in load_file(folder).items()}
    known = gguf.get_tensor_name_map(
        gguf.MODEL_ARCH[CASES[name][0].upper()], config.num_hidden_layers
    )
    for key, values in weights.items():
        if ".experts." in key:
            if ".experts.0." not in key:
                continue
            number = getattr(config, "num_local_experts", None) or config.num_experts
            part, values = stacked(key, weights, number)
            layer = key.split(".")[2]
            writer.add_tensor(f"blk.{layer}.{EXPERT_NAMES[part]}.weight", values)
            continue
        if name.startswith("gemma") and key.endswith("norm.weight"):
            values = values + 1
        for part, heads in (("q_proj", 4), ("k_proj", 2)):
            if part in key and name in PAIRED:
                values = interleaved(values, heads)
        short = known.get_name(key, try_suffixes=(".weight", ".bias"))
        assert short is not None, key
        writer.add_tensor(short, np.ascontiguousarray(values))


def write_family(place: Path, name: str) -> tuple[Path, torch.Tensor]:
    """Write a random model as a GGUF file; returns its path and the logits by transformers."""
    architecture, given, settings = CASES[name]
    config = AutoConfig.for_model(name, **SIZES, **given)
    network = AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(1)
    for key, parameter in network.named_parameters():
        is_scale = "norm" in key and not name.startswith("gemma")
        parameter.data.normal_(float(is_scale), 0.1, generator=generator)
    network.save_pretrained(place)
    writer = gguf.GGUFWriter(place / f"{name}.gguf", architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(6)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if "num_experts_per_tok" in given:
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
    width = given.get("head_dim")
    if width is not None and name != "glm":
        writer.add_key_length(width)
        writer.add_value_length(width)
    if "rope.freq_base" not in settings and architecture not in ("gemma", "gemma2"):
        rope = config.rope_parameters
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if name == "glm":
        writer.add_rope_dimension_count(8)
    for key, value in settings.items():
        add_setting(writer, f"{architecture}.{key}", value)
    add_byte_tokenizer(writer)
    add_weights(writer, name, place / "model.safetensors", config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with torch.no_grad():
        return place / f"{name}.gguf", network(torch.tensor([IDS])).logits[0]


def add_setting(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_the_model_in_transformers(name, tmp_path):
    path, expected = write_family(tmp_path, name)
    model = load_model(path, dtype="float32", device="cpu", max_batch=1, num_threads=1)
    torch.testing.assert_close(tiny.logits_of(model, IDS), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "gemma2"])
def test_transformers_modules_are_given_the_weights_of_a_file(name, tmp_path):
    """As a target that is only trained for."""
    path, expected = write_family(tmp_path, name)
    with torch.no_grad():
        found = read_weights(ModelFiles.open(path), torch.float32)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(found, expected, atol=3e-5, rtol=1e-4)


def test_every_family_is_tried():
    assert CASES.keys() == {row.model_type for row in FAMILIES.values() if row.gguf is not None}


@pytest.mark.parametrize(("layers", "scalar"), [(46, 144), (42, 128)])
def test_the_largest_gemma_2_divides_scores_by_another_width(layers, scalar):
    given = {
        "embedding_length": 4608,
        "block_count": layers,
        "attention.head_count": 32,
        "attention.key_length": 128,
        "attention.value_length": 128,
    }
    settings = translate_settings(FAMILIES["Gemma2ForCausalLM"], given, **PLAIN_FACTS)
    assert settings["query_pre_attn_scalar"] == scalar


FOUR_LAYERS = {"embedding_length": 64, "block_count": 4, "attention.head_count": 4}
PLAIN_FACTS = {"vocab_size": 256, "has_head": True, "has_biases": False}


def test_a_window_of_0_is_none():
    given = FOUR_LAYERS | {"attention.sliding_window": 0}
    settings = translate_settings(FAMILIES["Gemma2ForCausalLM"], given, **PLAIN_FACTS)
    assert settings["sliding_window"] is None
    assert settings["layer_types"] == ["full_attention"] * 4


@pytest.mark.parametrize("num_layers", [3, 5])
def test_a_pattern_of_windows_for_other_layers_is_refused(num_layers):
    pattern = {"attention.sliding_window_pattern": (True,) * num_layers}
    given = FOUR_LAYERS | {"attention.sliding_window": 8} | pattern
    with pytest.raises(InvalidModel, match=r"its pattern of windows .* is none of 4 layers"):
        translate_settings(FAMILIES["Gemma3ForCausalLM"], given, **PLAIN_FACTS)


@pytest.mark.parametrize("factor", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_factor_of_0_or_1_scales_no_rotation(kind, factor):
    given = FOUR_LAYERS | {"rope.scaling.type": kind, "rope.scaling.factor": factor}
    settings = translate_settings(FAMILIES["LlamaForCausalLM"], given, **PLAIN_FACTS)
    assert settings["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


def test_heads_of_an_odd_number_of_rows_are_refused(tmp_path):
    """The rows of queries lie in pairs."""
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    for name, value in FOUR_LAYERS.items():
        writer.add_uint32(f"llama.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((60, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="has 4 heads of 60 rows"):
        _ = GGUFFile(tmp_path / "x.gguf").tensors


def test_fused_queries_keys_and_values_are_taken_apart(tmp_path):
    """Files of chatglm have them in one tensor, whose rows are those of the three."""
    path, expected = write_family(tmp_path, "glm")
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(tmp_path / "fused.gguf", "chatglm")
    for key in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"chatglm.{key}", reader.fields[f"chatglm.{key}"].contents())
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_layer_norm_rms_eps(
        reader.fields["chatglm.attention.layer_norm_rms_epsilon"].contents()
    )
    add_byte_tokenizer(writer)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    for layer in range(6):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"blk.{layer}.attn_{part}.{kind}") for part in "qkv"]
            tensors[f"blk.{layer}.attn_qkv.{kind}"] = np.concatenate(parts)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model(
        tmp_path / "fused.gguf", dtype="float32", device="cpu", max_batch=1, num_threads=1
    )
    torch.testing.assert_close(tiny.logits_of(model, IDS), expected, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.attention.causal", False, "attention.causal=False"),
        ("llama.use_parallel_residual", True, "use_parallel_residual=True"),
        ("llama.pooling_type", 1, "pooling_type=1"),
        ("llama.attention.clamp_kqv", 8.0, "clamp_kqv=8.0"),
        ("llama.attention.head_count", [4, 4, 2], "num_attention_heads"),
        ("llama.attention.key_length", 32, "several widths"),
        ("llama.attention.value_length", 32, "several widths"),
        ("llama.rope.dimension_count", 8, "several widths"),
        ("llama.rope.scaling.type", "su", "scales rotations"),
        ("split.count", 3, "llama-gguf-split --merge"),
        ("general.architecture", "mamba", "folder with config.json"),
    ],
)
def test_settings_that_are_not_honoured_are_refused(key, value, said, tmp_path):
    settings: dict[str, object] = {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 1,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.key_length": 16,
        "llama.attention.value_length": 16,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": 16,
        "llama.rope.scaling.factor": 2.0 if "scaling" in key else 0.0,
    }
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", str(settings["general.architecture"]))
    writer.kv_data[0].clear()
    for name, kept in (settings | {key: value}).items():
        if isinstance(kept, bool):
            writer.add_bool(name, kept)
        else:
            add_setting(writer, name, kept)
    writer.add_tensor("token_embd.weight", np.zeros((256, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match=said) as raised:
        _ = GGUFFile(tmp_path / "x.gguf").settings
    assert "x.gguf" in str(raised.value) and "\n" not in str(raised.value)


def test_a_file_of_another_family_names_where_it_came_from(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_string("general.base_model.0.repo_url", "https://huggingface.co/someone/a-model")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InvalidModel, match="--model someone/a-model"):
        GGUFFile(tmp_path / "x.gguf")
