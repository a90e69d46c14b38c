"""What is supported, and that the rest is refused by name."""

from __future__ import annotations

import pytest
from transformers import (
    FalconConfig,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PhimoeConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from forerun.errors import InvalidModel
from forerun.models.architecture import read_architecture
from forerun.models.families import FAMILIES


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


def test_gpt2_has_names_of_its_own():
    config = GPT2Config(n_embd=64, n_head=8, n_layer=3, n_positions=77, vocab_size=99)
    architecture = read_architecture("GPT2LMHeadModel", config.to_dict())
    assert (architecture.hidden_size, architecture.num_layers) == (64, 3)
    assert (architecture.num_heads, architecture.num_kv_heads, architecture.head_dim) == (8, 8, 8)
    assert (architecture.max_positions, architecture.learned_positions) == (77, True)


# Recurrent state, local attention that slices its cache, an encoder, biases by distance.
@pytest.mark.parametrize(
    "name",
    [
        "RwkvForCausalLM",
        "ZambaForCausalLM",
        "GPTNeoForCausalLM",
        "T5ForConditionalGeneration",
        "BloomForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma3ForConditionalGeneration",
        "LlamaForCausalLM2",
    ],
)
def test_other_architectures_are_refused_with_what_is_supported(name):
    with pytest.raises(InvalidModel, match=rf"{name} is not supported") as refused:
        read_architecture(name, {})
    assert f"{len(FAMILIES)} model classes" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "config", "windows"),
    [
        ("LlamaForCausalLM", LlamaConfig(), (None,)),
        ("MistralForCausalLM", MistralConfig(), (4096,)),
        ("MistralForCausalLM", MistralConfig(sliding_window=None), (None,)),
        ("Qwen2ForCausalLM", Qwen2Config(sliding_window=4096), (None,)),
        (
            "Qwen2ForCausalLM",
            Qwen2Config(use_sliding_window=True, max_window_layers=3),
            (None, 4096),
        ),
        ("Qwen3ForCausalLM", Qwen3Config(use_sliding_window=True, max_window_layers=0), (4096,)),
        ("Gemma3ForCausalLM", Gemma3TextConfig(sliding_window=512), (512, None)),
        ("Phi3ForCausalLM", Phi3Config(sliding_window=2047), (2047,)),
    ],
)
def test_windows_of_the_layers(name, config, windows):
    assert read_architecture(name, config.to_dict()).windows == windows


@pytest.mark.parametrize("window", [0, -4, 8.5])
def test_windows_that_hide_every_key_are_refused(window):
    """The native runner would take 0 for no window, and the eager one would see no key at all."""
    settings = MistralConfig().to_dict() | {"sliding_window": window}
    with pytest.raises(InvalidModel, match=rf"sliding_window={window}; it must be from 1 to"):
        read_architecture("MistralForCausalLM", settings)
    mixed = Gemma3TextConfig().to_dict() | {"sliding_window": window}
    with pytest.raises(InvalidModel, match="sliding_window"):
        read_architecture("Gemma3ForCausalLM", mixed)
    mixed["layer_types"] = ["full_attention"] * len(mixed["layer_types"])
    assert read_architecture("Gemma3ForCausalLM", mixed).windows == (None,)


def test_a_window_that_is_both_on_and_off_is_refused():
    """transformers' masks follow layer_types, its flash attention use_sliding_window."""
    config = SmolLM3Config(
        num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    )
    with pytest.raises(InvalidModel, match="use_sliding_window=False"):
        read_architecture("SmolLM3ForCausalLM", config.to_dict())
    switched_on = config.to_dict() | {"use_sliding_window": True}
    assert read_architecture("SmolLM3ForCausalLM", switched_on).windows == (8, None)


def test_other_layer_types_are_refused():
    settings = Qwen3Config(num_hidden_layers=2).to_dict()
    settings["layer_types"] = ["full_attention", "chunked_attention"]
    with pytest.raises(InvalidModel, match="layers of type 'chunked_attention'"):
        read_architecture("Qwen3ForCausalLM", settings)


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        (
            "Gemma3ForCausalLM",
            Gemma3TextConfig(use_bidirectional_attention=True),
            r"attention to later tokens \(use_bidirectional_attention=True\)",
        ),
        ("PhimoeForCausalLM", PhimoeConfig(sliding_window=8), "sliding_window=8"),
        ("FalconForCausalLM", FalconConfig(alibi=True), r"scores that fall .* \(ALiBi\)"),
        ("GPT2LMHeadModel", GPT2Config(add_cross_attention=True), "attention to an encoder"),
    ],
)
def test_options_of_supported_models_that_are_refused(name, config, message):
    with pytest.raises(InvalidModel, match=f"{name} with {message}"):
        read_architecture(name, config.to_dict())


def test_unknown_rope_is_refused():
    settings = LlamaConfig().to_dict() | {"rope_parameters": {"rope_type": "su", "factor": 2.0}}
    with pytest.raises(InvalidModel, match=r"rope_type 'su'.*default, dynamic, linear, llama3"):
        read_architecture("LlamaForCausalLM", settings)


def test_unknown_settings_of_rope_are_refused_by_name():
    rope = {"type": "linear", "factor": 2.0, "attn_factor": 3.0}
    config = LlamaConfig(rope_scaling=rope)
    with pytest.raises(InvalidModel, match="attn_factor, which rope_type 'linear' does not have"):
        read_architecture("LlamaForCausalLM", config.to_dict())


def test_rope_is_read_layer_type_by_layer_type():
    default = {"rope_type": "default", "rope_theta": 10000.0}
    settings = Gemma3TextConfig().to_dict()
    settings["rope_parameters"] = {
        "sliding_attention": default,
        "full_attention": default | {"rope_type": "su"},
    }
    with pytest.raises(InvalidModel, match="Gemma3ForCausalLM with rope_type 'su'"):
        read_architecture("Gemma3ForCausalLM", settings)


def test_contexts_end_where_the_rotation_would_change():
    factors = [1.0] * 48
    rope = {"type": "longrope", "short_factor": factors, "long_factor": factors}
    config = Phi3Config(
        rope_scaling=rope, max_position_embeddings=131072, original_max_position_embeddings=4096
    )
    long = read_architecture("Phi3ForCausalLM", config.to_dict())
    assert long.max_positions == 4096
    assert "longrope" in str(long.position_limit)
    dynamic = LlamaConfig(rope_scaling={"type": "dynamic", "factor": 2.0})
    limited = read_architecture("LlamaForCausalLM", dynamic.to_dict())
    assert limited.max_positions == dynamic.max_position_embeddings
    assert "dynamic" in str(limited.position_limit)


def test_quantised_weights_are_refused():
    settings = LlamaConfig().to_dict() | {"quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(InvalidModel, match=r"quantised checkpoints \(gptq\)"):
        read_architecture("LlamaForCausalLM", settings)
