"""What the settings and the names of tensors in a GGUF file are in transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from forerun.errors import InvalidModel
from forerun.models.architecture import checked_size
from forerun.models.family import DecoderVariant, Family, GGUFForm

Metadata = Mapping[str, Any]
"""Settings in a file by their names without the architecture's prefix."""


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
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"attention.causal": (True,), "rope.scaling.finetuned": (True, False)}
)
"""Values with which a setting changes nothing, where these are others than `OFF`."""
OFF = (0, False, "none")


def find_ignored(form: GGUFForm, settings: Metadata) -> tuple[str, Any] | None:
    """Return the first setting with its value that would change the output and is not honoured."""
    honoured = {*COMMON, *CHECKED, *form.settings}
    for name, value in settings.items():
        neutral = NEUTRAL.get(name, OFF)
        if name not in honoured and not any(_is_equal(value, known) for known in neutral):
            return name, value
    return None


def _is_equal(value: object, known: object) -> bool:
    return type(value) in (bool, int, float, str) and value == known


def get_gguf_parts(family: Family) -> tuple[GGUFForm, DecoderVariant]:
    """Return how the files of a family differ, and its layers."""
    assert family.gguf is not None and family.variant is not None
    return family.gguf, family.variant


def translate_settings(
    family: Family,
    stored: Metadata,
    *,
    vocab_size: int,
    has_head: bool,
    has_biases: bool,
    rope_factors: Sequence[list[float]] = (),
) -> dict[str, Any]:
    """Return the settings of a file as transformers' configuration class takes them.

    Args:
        family: that of the file.
        stored: its settings.
        vocab_size: rows of the embedding.
        has_head: there is an output layer beside the embedding.
        has_biases: queries have biases.
        rope_factors: for texts within and beyond the first context; empty without them.

    Raises:
        InvalidModel: a setting is missing, of a wrong type, or contradicts another.
    """
    form, variant = get_gguf_parts(family)
    settings: dict[str, Any] = {
        "architectures": [family.name],
        "vocab_size": vocab_size,
        "tie_word_embeddings": not has_head,
        **form.fixed,
    }
    if variant.qkv_bias == "attention_bias":
        settings["attention_bias"] = has_biases
    for name, ours in {**COMMON, **form.settings}.items():
        if ours and name in stored:
            settings[ours] = undo_rounding(stored[name])
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        settings[name] = checked_size(settings.get(name), name)
    settings.setdefault("num_key_value_heads", settings["num_attention_heads"])
    width, rotated = _read_widths(form, stored, settings)
    settings["head_dim"] = width
    if settings.get("sliding_window") == 0:
        settings["sliding_window"] = None
    if form.window_period:
        settings["layer_types"] = _list_layer_types(form, stored, settings)
    if variant.query_scalar:
        by_hidden = settings["num_hidden_layers"] == form.layers_scaled_by_hidden
        settings["query_pre_attn_scalar"] = (
            settings["hidden_size"] // settings["num_attention_heads"] if by_hidden else width
        )
    settings["rope_parameters"] = _read_rotations(form, stored, rope_factors, rotated / width)
    return settings


def undo_rounding(value: Any) -> Any:
    """Return the shortest number that rounds to an fp32 of a file: 1e-05, not 9.9999997e-06."""
    return float(str(np.float32(value))) if type(value) is float else value


def _read_widths(form: GGUFForm, stored: Metadata, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the width of a head and how much of it is rotated; heads of two widths are refused."""
    usual = settings["hidden_size"] // settings["num_attention_heads"]
    names = ("attention.key_length", "attention.value_length", "rope.dimension_count")
    key, value, rotated = (stored.get(name) for name in names)
    width = checked_size(next((w for w in (key, value) if w is not None), None) or usual, names[0])
    if key is None and value is None and rotated is not None and not form.rotates_part:
        width = checked_size(rotated, names[2])
    rotated = checked_size(width if rotated is None else rotated, names[2])
    is_partial = rotated < width and form.rotates_part
    if value not in (None, width) or (rotated != width and not is_partial):
        widths = dict(zip(names, (key, value, rotated), strict=True))
        raise InvalidModel(f"its heads have several widths, not supported: {widths}")
    return width, rotated


def _list_layer_types(
    form: GGUFForm, stored: Metadata, settings: Mapping[str, Any]
) -> list[str] | None:
    """Return which layers have a window, by the file's pattern or the usual one of the family."""
    num_layers, period = settings["num_hidden_layers"], form.window_period
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


def _read_rotations(
    form: GGUFForm, stored: Metadata, rope_factors: Sequence[list[float]], share: float
) -> dict[str, Any]:
    rope: dict[str, Any] = {
        "rope_type": "default",
        "rope_theta": undo_rounding(stored.get("rope.freq_base", 10000.0)),
    }
    if form.rotates_part:
        rope["partial_rotary_factor"] = share
    kind = stored.get("rope.scaling.type", "none")
    factor = undo_rounding(stored.get("rope.scaling.factor", 1.0))
    original = stored.get("rope.scaling.original_context_length")
    if kind in ("linear", "yarn") and factor not in (0, 1.0):
        scaled = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaled["original_max_position_embeddings"] = checked_size(original, "original context")
    elif rope_factors:
        short, long = rope_factors
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
    if not form.rope_by_kind:
        return rope | scaled
    local = form.window_theta or rope["rope_theta"]
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


def list_modules(variant: DecoderVariant) -> dict[str, str]:
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


def list_expert_parts(variant: DecoderVariant) -> dict[str, str]:
    """Return the modules of an expert, whose number goes in, by their names in files."""
    if variant.experts is None:
        return {}
    return dict(zip(EXPERT_NAMES, variant.experts.parts, strict=True))
