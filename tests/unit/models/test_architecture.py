"""What is supported, and that the rest is refused by name."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from forerun.errors import InvalidModel
from forerun.models.architecture import read_architecture


def test_sizes_of_a_configuration():
    config = Qwen3Config(
        hidden_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_hidden_layers=3,
        vocab_size=99,
        max_position_embeddings=512,
    )
    architecture = read_architecture("Qwen3ForCausalLM", config.to_dict())
    assert architecture.head_dim == 32
    assert (architecture.num_layers, architecture.num_heads, architecture.num_kv_heads) == (3, 8, 2)
    assert (architecture.vocab_size, architecture.max_positions) == (99, 512)


def test_head_dim_may_be_left_to_the_hidden_size():
    config = Qwen2Config(hidden_size=64, num_attention_heads=8, num_key_value_heads=4)
    assert "head_dim" not in config.to_dict()
    assert read_architecture("Qwen2ForCausalLM", config.to_dict()).head_dim == 8


def test_other_architectures_are_refused():
    with pytest.raises(InvalidModel, match=r"GPT2LMHeadModel is not supported.*LlamaForCausalLM"):
        read_architecture("GPT2LMHeadModel", {})


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("MistralForCausalLM", MistralConfig()),
        ("Qwen2ForCausalLM", Qwen2Config(use_sliding_window=True, max_window_layers=0)),
        ("Qwen3ForCausalLM", Qwen3Config(use_sliding_window=True, max_window_layers=0)),
    ],
)
def test_sliding_window_is_refused(name, config):
    with pytest.raises(InvalidModel, match=rf"{name} .*sliding_window=4096"):
        read_architecture(name, config.to_dict())


def test_unused_sliding_window_is_no_obstacle():
    config = Qwen2Config(use_sliding_window=False, sliding_window=4096)
    assert read_architecture("Qwen2ForCausalLM", config.to_dict()).num_layers == 32


@pytest.mark.parametrize("kind", ["dynamic", "yarn", "longrope"])
def test_unverified_rope_is_refused(kind):
    settings = LlamaConfig().to_dict() | {"rope_parameters": {"rope_type": kind, "factor": 2.0}}
    with pytest.raises(InvalidModel, match=rf"rope_type '{kind}'.*default, linear, llama3"):
        read_architecture("LlamaForCausalLM", settings)


def test_old_spelling_of_rope_is_refused_too():
    config = LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0})
    with pytest.raises(InvalidModel, match="rope_type 'dynamic'"):
        read_architecture("LlamaForCausalLM", config.to_dict())


def test_quantised_weights_are_refused():
    settings = LlamaConfig().to_dict() | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(InvalidModel, match=r"quantised checkpoints \(gptq\)"):
        read_architecture("LlamaForCausalLM", settings)
