"""Model families of GGUF files: their class in transformers, its settings, and names of parameters.

The modules of a layer follow from `VARIANTS`; what is written here beside them is what files of a
family say in a way of their own, or leave out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.errors import InvalidModel
from forerun.models.architecture import checked_size
from forerun.models.decoder import VARIANTS, DecoderVariant

Metadata = Mapping[str, Any]
"""Settings in a file by their names without the architecture's prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How GGUF files of one model family differ from those of others.

    Attributes:
        architecture: class in transformers.
        model_type: of its configuration.
        settings: further settings by their names in the file, with their names in transformers.
        fixed: settings that the files leave out.
        paired_rows: rows of queries and keys lie in pairs that are rotated together, which
            transformers has in the two halves of a head.
        rotates_part: `rope.dimension_count` may be a part of a head.
        window_period: every layer but the last of so many has a window; 0: all layers have it.
        rope_by_kind: layers with and without a window have rotations of their own.
        layers_scaled_by_hidden: number of layers of the model in which `query_pre_attn_scalar` is
            the hidden size over the number of heads, and not the width of a head.
    """

    architecture: str
    model_type: str
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    paired_rows: bool = False
    rotates_part: bool = False
    window_period: int = 0
    rope_by_kind: bool = False
    layers_scaled_by_hidden: int = 0

    @property
    def variant(self) -> DecoderVariant:
        return VARIANTS[self.architecture]

    @property
    def honoured(self) -> frozenset[str]:
        """Names of the settings that are honoured."""
        return frozenset(COMMON) | CHECKED | frozenset(self.settings)


COMMON: Mapping[str, str] = MappingProxyType(
    {
        "context_length": "max_position_embeddings",
        "embedding_length": "hidden_size",
        "block_count": "num_hidden_layers",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    }
)
CHECKED = frozenset(
    "vocab_size rope.freq_base rope.dimension_count attention.key_length attention.value_length "
    "rope.scaling.type rope.scaling.factor rope.scaling.original_context_length".split()
)
"""Settings that are honoured or checked by functions below."""
WINDOW: Mapping[str, str] = MappingProxyType({"attention.sliding_window": "sliding_window"})
BY_KIND: Mapping[str, str] = MappingProxyType(
    {**WINDOW, "attention.sliding_window_pattern": "", "rope.freq_base_swa": ""}
)
"""Settings of layers with and without a window; an empty name is looked up below."""
EXPERTS: Mapping[str, str] = MappingProxyType({"expert_used_count": "num_experts_per_tok"})
CAPS: Mapping[str, str] = MappingProxyType(
    {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    }
)

FAMILIES: Mapping[str, GGUFFamily] = MappingProxyType(
    {
        "llama": GGUFFamily(architecture="LlamaForCausalLM", model_type="llama", paired_rows=True),
        "llama with experts": GGUFFamily(
            architecture="MixtralForCausalLM",
            model_type="mixtral",
            settings={"expert_count": "num_local_experts", **EXPERTS},
            fixed={"sliding_window": None},
            paired_rows=True,
        ),
        "qwen2": GGUFFamily(architecture="Qwen2ForCausalLM", model_type="qwen2"),
        "qwen3": GGUFFamily(architecture="Qwen3ForCausalLM", model_type="qwen3"),
        "qwen3moe": GGUFFamily(
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            settings={
                "expert_count": "num_experts",
                "expert_feed_forward_length": "moe_intermediate_size",
                **EXPERTS,
            },
            fixed={"norm_topk_prob": True},
        ),
        "olmoe": GGUFFamily(
            architecture="OlmoeForCausalLM",
            model_type="olmoe",
            settings={"expert_count": "num_experts", **EXPERTS},
            fixed={"norm_topk_prob": False},
        ),
        "gemma": GGUFFamily(architecture="GemmaForCausalLM", model_type="gemma"),
        "gemma2": GGUFFamily(
            architecture="Gemma2ForCausalLM",
            model_type="gemma2",
            settings={**WINDOW, **CAPS, "attention.sliding_window_pattern": ""},
            fixed={"attn_logit_softcapping": None, "final_logit_softcapping": None},
            window_period=2,
            layers_scaled_by_hidden=46,
        ),
        "gemma3": GGUFFamily(
            architecture="Gemma3ForCausalLM",
            model_type="gemma3_text",
            settings={**BY_KIND, "final_logit_softcapping": "final_logit_softcapping"},
            window_period=6,
            rope_by_kind=True,
            layers_scaled_by_hidden=62,
        ),
        "phi3": GGUFFamily(
            architecture="Phi3ForCausalLM",
            model_type="phi3",
            settings={
                **WINDOW,
                "rope.scaling.attn_factor": "",
                "rope.scaling.original_context_length": "original_max_position_embeddings",
            },
            rotates_part=True,
        ),
        "smollm3": GGUFFamily(
            architecture="SmolLM3ForCausalLM", model_type="smollm3", paired_rows=True
        ),
        "granite": GGUFFamily(
            architecture="GraniteForCausalLM",
            model_type="granite",
            settings={
                "attention.scale": "attention_multiplier",
                "embedding_scale": "embedding_multiplier",
                "residual_scale": "residual_multiplier",
                "logit_scale": "logits_scaling",
            },
            paired_rows=True,
        ),
        "olmo2": GGUFFamily(architecture="Olmo2ForCausalLM", model_type="olmo2"),
        "olmo2 with windows": GGUFFamily(
            architecture="Olmo3ForCausalLM",
            model_type="olmo3",
            settings=BY_KIND,
            window_period=4,
            rope_by_kind=True,
        ),
        "exaone4": GGUFFamily(
            architecture="Exaone4ForCausalLM",
            model_type="exaone4",
            settings={**WINDOW, "attention.sliding_window_pattern": ""},
            fixed={"sliding_window": None, "sliding_window_pattern": None},
            window_period=4,
        ),
        "glm4": GGUFFamily(architecture="Glm4ForCausalLM", model_type="glm4", rotates_part=True),
        "chatglm": GGUFFamily(architecture="GlmForCausalLM", model_type="glm", rotates_part=True),
        "ernie4_5": GGUFFamily(architecture="Ernie4_5ForCausalLM", model_type="ernie4_5"),
        "seed_oss": GGUFFamily(
            architecture="SeedOssForCausalLM",
            model_type="seed_oss",
            fixed={"attention_out_bias": False},
        ),
    }
)
"""Families by the architecture that files name, two of which stand for two families each."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"attention.causal": (True,), "rope.scaling.finetuned": (True, False)}
)
"""Values with which a setting changes nothing, where these are others than `OFF`."""
OFF = (0, False, "none")


def find_family(architecture: str, settings: Metadata) -> GGUFFamily | None:
    """Return the family of a file; None where it is not supported."""
    name = architecture
    if name == "llama" and settings.get("expert_count", 0) != 0:
        name = "llama with experts"
    if name == "olmo2" and settings.get("attention.sliding_window", 0) != 0:
        name = "olmo2 with windows"
    return FAMILIES.get(name)


def setting_without_effect(family: GGUFFamily, settings: Metadata) -> tuple[str, Any] | None:
    """Return the first setting with its value that would change the output and is not honoured."""
    for name, value in settings.items():
        neutral = NEUTRAL.get(name, OFF)
        if name not in family.honoured and not any(_equal(value, known) for known in neutral):
            return name, value
    return None


def _equal(value: object, known: object) -> bool:
    return type(value) in (bool, int, float, str) and value == known


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Settings that follow from the tensors of a file.

    Attributes:
        vocab_size: rows of the embedding.
        has_head: there is an output layer beside the embedding.
        has_biases: queries have biases.
        rope_factors: for texts within and beyond the first context; empty without them.
    """

    vocab_size: int
    has_head: bool
    has_biases: bool
    rope_factors: tuple[list[float], ...] = ()


def transformers_settings(
    family: GGUFFamily, stored: Metadata, facts: TensorFacts
) -> dict[str, Any]:
    """Return the settings of a file as transformers' configuration class takes them.

    Raises:
        InvalidModel: a setting is missing, of a wrong type, or contradicts another.
    """
    settings: dict[str, Any] = {
        "architectures": [family.architecture],
        "vocab_size": facts.vocab_size,
        "tie_word_embeddings": not facts.has_head,
        **family.fixed,
    }
    if family.variant.qkv_bias == "attention_bias":
        settings["attention_bias"] = facts.has_biases
    for name, ours in {**COMMON, **family.settings}.items():
        if ours and name in stored:
            settings[ours] = undo_rounding(stored[name])
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        settings[name] = checked_size(settings.get(name), name)
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    width, rotated = _head_widths(family, stored, settings)
    settings["head_dim"] = width
    if settings.get("sliding_window") == 0:
        settings["sliding_window"] = None
    if family.window_period:
        settings["layer_types"] = _layer_types(family, stored, settings)
    if family.variant.query_scalar:
        by_hidden = settings["num_hidden_layers"] == family.layers_scaled_by_hidden
        settings["query_pre_attn_scalar"] = (
            settings["hidden_size"] // settings["num_attention_heads"] if by_hidden else width
        )
    settings["rope_parameters"] = _rotations(family, stored, facts, rotated / width)
    return settings


def undo_rounding(value: Any) -> Any:
    """Return the shortest number that rounds to an fp32 of a file: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _head_widths(
    family: GGUFFamily, stored: Metadata, settings: Mapping[str, Any]
) -> tuple[int, int]:
    """Return the width of a head and how much of it is rotated; heads of two widths are refused."""
    usual = settings["hidden_size"] // settings["num_attention_heads"]
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    key, value, rotated = (stored.get(name) for name in names)
    width = checked_size(next((w for w in (key, value) if w is not None), None) or usual, names[0])
    if key is None and value is None and rotated is not None and not family.rotates_part:
        width = checked_size(rotated, names[2])
    rotated = checked_size(width if rotated is None else rotated, names[2])
    is_partial = rotated < width and family.rotates_part
    if value not in (None, width) or (rotated != width and not is_partial):
        widths = dict(zip(names, (key, value, rotated), strict=True))
        raise InvalidModel(f"its heads have several widths, not supported: {widths}")
    return width, rotated


def _layer_types(
    family: GGUFFamily, stored: Metadata, settings: Mapping[str, Any]
) -> list[str] | None:
    """Return which layers have a window, by the file's pattern or the usual one of the family."""
    num_layers, period = settings["num_hidden_layers"], family.window_period
    if settings.get("sliding_window") is None:
        return ["full_attention"] * num_layers
    pattern = stored.get("attention.sliding_window_pattern", period)
    if type(pattern) is int and pattern > 0:
        slides = [index % pattern < pattern - 1 for index in range(num_layers)]
    elif isinstance(pattern, tuple) and len(pattern) == num_layers:
        slides = [bool(slides) for slides in pattern]
    else:
        raise InvalidModel(f"its pattern of windows {pattern!r:.60} is none of {num_layers} layers")
    return ["sliding_attention" if slides_here else "full_attention" for slides_here in slides]


def _rotations(
    family: GGUFFamily, stored: Metadata, facts: TensorFacts, share: float
) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": undo_rounding(stored.get("rope.freq_base", 10000.0)),
    }
    if family.rotates_part:
        rope["partial_rotary_factor"] = share
    kind = stored.get("rope.scaling.type", "none")
    factor = undo_rounding(stored.get("rope.scaling.factor", 1.0))
    original = stored.get("rope.scaling.original_context_length")
    if kind in ("linear", "yarn") and factor not in (0, 1.0):
        scaled = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = checked_size(original, "original context")
    elif facts.rope_factors:
        short, long = facts.rope_factors
        scaled = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": checked_size(original, "original context"),
        }
    elif kind in ("none", "linear", "yarn", "longrope") and factor in (0, 1.0):
        scaled = {}
    else:
        raise InvalidModel(f"it scales rotations by {kind!r:.40}, factor {factor!r:.40}: not read")
    if not family.rope_by_kind:
        return rope | scaled
    local = 10000.0 if family.model_type == "gemma3_text" else rope["rope_theta"]
    sliding = rope | {"rope_theta": undo_rounding(stored.get("rope.freq_base_swa", local))}
    return {"full_attention": rope | scaled, "sliding_attention": sliding}


SHORT_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
)
"""Names in files of the modules of a layer."""
END_NAMES: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
EXPERT_NAMES = ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps")
"""All experts of a layer in one tensor: gate, up and down projection."""
SINGLE_EXPERT_NAMES = ("ffn_gate", "ffn_up", "ffn_down")
"""An expert in a tensor of its own, as older files have them."""


def module_names(variant: DecoderVariant) -> dict[str, str]:
    """Return the modules of a layer by their names in files."""
    names = {SHORT_NAMES[part]: part for parts in variant.parts for part in parts}
    after_attention = variant.attention_norm or variant.post_norm
    norms = {
        "attn_norm": variant.input_norm,
        "post_attention_norm": after_attention,
        "ffn_norm": variant.post_norm,
        "post_ffw_norm": variant.feed_forward_norm,
    }
    names |= {short: module for short, module in norms.items() if module is not None}
    if variant.qk_norm != "none":
        names |= {f"attn_{n}_norm": f"self_attn.{n}_norm" for n in "qk"}
    if variant.experts is not None:
        names["ffn_gate_inp"] = variant.experts.router
    return names


def expert_parts(variant: DecoderVariant) -> dict[str, str]:
    """Return the modules of an expert, whose number goes in, by their names in files."""
    if variant.experts is None:
        return {}
    return dict(zip(EXPERT_NAMES, variant.experts.parts, strict=True))
