"""Sizes and flags of an EAGLE-3 head, and config.json in its two forms; torch-free.

The forms are that of speculators, and the raw form of EAGLE, SpecForge and SGLang. Both name layers
whose input is read. SGLang's own field, inside `eagle_config`, names layers whose output is read;
such ids are one lower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import InvalidModel
from forerun.models.architecture import checked_size, optional_size


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the feature layers of checkpoints that name none: layers 2, L/2 and L - 3.

    Source: EAGLE-3 (arXiv 2503.01840), as vLLM and speculators read it.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] <= layers[1] <= layers[2]:
        raise InvalidModel(
            f"a target with {num_layers} layers has no layers 2, L/2 and L - 3; name the layers"
        )
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Sizes and flags of an EAGLE-3 head.

    Attributes:
        feature_layers: layers of the target whose input is concatenated, in this order; layer 0
            stands for the embeddings, the number of layers for what leaves the last one.
        hidden_size: width of the head; with the target's embedding it is that of the target.
        rope: rotary positions as transformers writes them (`rope_parameters`).
        norm_before_residual: the residual carries the normed instead of the un-normed state.
        norm_output: what is fed back is the state after the final norm instead of before it
            (vLLM, speculators and TensorRT-LLM use the flag in this sense, SpecForge in another).
        norm_before_fc: one RMS norm over the concatenated states, ahead of `fc`.
        fc_norm: one RMS norm per state, ahead of `fc`.
    """

    target_hidden_size: int
    target_vocab_size: int
    feature_layers: tuple[int, ...]
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float = 1e-6
    rope: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_positions: int = 2048
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    own_embedding: bool = False

    def __post_init__(self) -> None:
        """Refuse sizes and flags that contradict each other."""
        if self.norm_before_fc and self.fc_norm:
            raise InvalidModel(
                "an EAGLE-3 head has norm_before_fc (one norm over all states) or fc_norm (one per "
                "state), not both"
            )
        if not 1 <= self.draft_vocab_size <= self.target_vocab_size:
            raise InvalidModel(
                f"draft_vocab_size is {self.draft_vocab_size}; it must be from 1 to the target's "
                f"{self.target_vocab_size} tokens"
            )
        if self.num_heads % self.num_kv_heads:
            raise InvalidModel(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key/value heads"
            )
        if not self.own_embedding and self.hidden_size != self.target_hidden_size:
            raise InvalidModel(
                f"the head is {self.hidden_size} wide and has no embeddings of its own, but those "
                f"of the target are {self.target_hidden_size} wide"
            )
        if not self.feature_layers:
            raise InvalidModel("an EAGLE-3 head reads no layer of the target; name its layers")


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
RAW_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
SPECULATORS_VERSION = "0.3.0"
"""Of the form of the file that is written; see vllm-project/speculators."""
FLAGS = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm")


def is_eagle3(config: Mapping[str, Any]) -> bool:
    """Whether the contents of a config.json describe an EAGLE-3 head."""
    if config.get("speculators_model_type") is not None:
        return bool(config["speculators_model_type"] == "eagle3")
    named = config.get("architectures")
    names = named if isinstance(named, list) else []
    return any(name in (*RAW_ARCHITECTURES, *SPECULATORS_ARCHITECTURES) for name in names)


def config_of(
    settings: Mapping[str, Any], *, num_target_layers: int | None, own_embedding: bool
) -> Eagle3Config:
    """Read the sizes and flags of a head from the contents of its config.json."""
    nested = settings.get("transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else settings
    _check_layer(layer)
    hidden_size = checked_size(layer.get("hidden_size"), "hidden_size")
    num_heads = checked_size(layer.get("num_attention_heads"), "num_attention_heads")
    vocab_size = checked_size(layer.get("vocab_size"), "vocab_size")
    flags = {name: flag(settings, name) for name in FLAGS}
    if nested is not None and settings.get("norm_before_residual") is None:
        flags["norm_before_residual"] = True  # vLLM's default for this form
    return Eagle3Config(
        target_hidden_size=optional_size(settings, "target_hidden_size", hidden_size),
        target_vocab_size=vocab_size,
        feature_layers=feature_layers_of(settings, num_target_layers),
        draft_vocab_size=optional_size(settings, "draft_vocab_size", vocab_size),
        hidden_size=hidden_size,
        intermediate_size=checked_size(layer.get("intermediate_size"), "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=optional_size(layer, "num_key_value_heads", num_heads),
        head_dim=optional_size(layer, "head_dim", max(1, hidden_size // num_heads)),
        norm_eps=number(layer, "rms_norm_eps", 1e-6),
        rope=rope_of(layer),
        max_positions=optional_size(layer, "max_position_embeddings", 2048),
        own_embedding=own_embedding,
        **flags,
    )


def _check_layer(layer: Mapping[str, Any]) -> None:
    """Refuse a head whose decoder is not exactly one Llama layer."""
    count = layer.get("num_hidden_layers", 1)
    if count != 1:
        raise InvalidModel(f"an EAGLE-3 head with {count!r:.40} layers is not supported, only 1")
    for name in ("attention_bias", "mlp_bias"):
        if layer.get(name):
            raise InvalidModel(f"an EAGLE-3 head with {name} is not supported")
    if layer.get("model_type", "llama") not in ("llama", "eagle3"):
        raise InvalidModel(
            f"an EAGLE-3 head with a layer of type {layer['model_type']!r:.40} is not supported, "
            "only llama"
        )
    if layer.get("hidden_act", "silu") not in ("silu", "swish"):
        raise InvalidModel(
            f"an EAGLE-3 head with hidden_act={layer['hidden_act']!r:.40} is not supported, only "
            "silu"
        )


def flag(settings: Mapping[str, Any], name: str) -> bool:
    """Return a boolean field of a configuration; a missing one is False."""
    value = settings.get(name, False)
    if not isinstance(value, bool | None):
        raise InvalidModel(f"config.json has {name}={value!r:.40}; it must be true or false")
    return bool(value)


def number(settings: Mapping[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e12:
        raise InvalidModel(f"config.json has {name}={value!r:.40}; it must be a positive number")
    return float(value)


ROPE_FACTORS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": (
        *("factor", "low_freq_factor", "high_freq_factor"),
        "original_max_position_embeddings",
    ),
}


def rope_of(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary settings, which older files spread over several fields."""
    found = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    if not isinstance(found, Mapping):
        raise InvalidModel(f"config.json has rotary settings {found!r:.60}; they must be an object")
    rope = {name: value for name, value in found.items() if name != "type"}
    rope["rope_type"] = found.get("rope_type", found.get("type", "default"))
    if "rope_theta" not in rope:
        rope["rope_theta"] = number(layer, "rope_theta", 10000.0)
    number(rope, "rope_theta", 10000.0)
    if str(rope["rope_type"]) not in ROPE_FACTORS:
        raise InvalidModel(
            f"rotary embeddings of type {rope['rope_type']!r:.40} are not supported; supported "
            f"are {', '.join(ROPE_FACTORS)}"
        )
    for name in ROPE_FACTORS[str(rope["rope_type"])]:
        number(rope, name, 0.0)  # 0 is refused: it must be given
    return rope


def feature_layers_of(
    settings: Mapping[str, Any], num_target_layers: int | None
) -> tuple[int, ...]:
    """Return the layers of the target whose input the head reads."""
    nested = settings.get("eagle_config")
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    listed, offset = settings.get(LAYER_IDS), 0
    if listed is None and inner is not None:
        listed, offset = inner, 1
    if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
        raise InvalidModel(
            "an EAGLE-3 head that reads the target's last state alone (use_aux_hidden_state is "
            "false) is not supported, only one that reads several layers"
        )
    if listed is None or listed == []:  # ModelOpt writes an empty list for the default layers
        if num_target_layers is None:
            raise InvalidModel(f"config.json names no layers of the target ({LAYER_IDS})")
        return default_feature_layers(num_target_layers)
    valid = isinstance(listed, list) and listed
    if not valid or not all(isinstance(i, int) and not isinstance(i, bool) for i in listed):
        raise InvalidModel(f"config.json has {LAYER_IDS}={listed!r:.60}; it must list layers")
    return tuple(i + offset for i in listed)


def _layer_settings(config: Eagle3Config) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_parameters": dict(config.rope),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "max_position_embeddings": config.max_positions,
        "vocab_size": config.target_vocab_size,
    }


def _common_settings(config: Eagle3Config) -> dict[str, Any]:
    """Return the fields that both forms have at the top level; every flag is written."""
    return {
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        LAYER_IDS: list(config.feature_layers),
        **{name: getattr(config, name) for name in FLAGS},
    }


def speculators_settings(
    config: Eagle3Config, *, target: str, target_architecture: str, num_speculative_tokens: int
) -> dict[str, Any]:
    """Return the contents of config.json in the form that speculators writes and vLLM reads."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_speculative_tokens,
        "accept_tolerance": 0.0,
        "verifier_accept_k": 1,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS_VERSION,
        **_common_settings(config),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "transformer_layer_config": _layer_settings(config),
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": [target_architecture]},
        },
    }


def raw_settings(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_settings(config),
        **_common_settings(config),
        "eagle_config": {
            LAYER_IDS: [layer - 1 for layer in config.feature_layers],
            "use_aux_hidden_state": True,
        },
    }
