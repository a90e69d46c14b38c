"""Which models are supported, read from their configuration before any weight is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from forerun.errors import InvalidModel

__all__ = ["ROPE_TYPES", "SUPPORTED", "Architecture", "read_architecture"]

SUPPORTED = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

# Rotations that depend on the position alone. Others rescale with the longest position of the call,
# which differs between a pass of many rows and the same rows one by one.
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The sizes of a supported model.

    Attributes:
        name: class of the model in transformers.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        hidden_size: width of the residual stream.
        vocab_size: width of the logits.
        max_positions: longest context the model was made for.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int


def read_architecture(name: str, settings: Mapping[str, Any]) -> Architecture:
    """Sizes of a model, after making sure it is one whose output we reproduce.

    Args:
        name: class of the model in transformers, such as "LlamaForCausalLM".
        settings: its configuration as transformers normalises it (`config.to_dict()`).

    Raises:
        InvalidModel: the model, or something its configuration asks for, is not supported.
    """
    if name not in SUPPORTED:
        raise InvalidModel(f"{name} is not supported; supported are {', '.join(SUPPORTED)}")
    refuse_quantised(settings)
    refuse_sliding_window(name, settings)
    refuse_rope(name, settings)
    num_heads, hidden_size = settings["num_attention_heads"], settings["hidden_size"]
    return Architecture(
        name=name,
        num_layers=settings["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=settings.get("num_key_value_heads") or num_heads,
        head_dim=settings.get("head_dim") or hidden_size // num_heads,
        hidden_size=hidden_size,
        vocab_size=settings["vocab_size"],
        max_positions=settings["max_position_embeddings"],
    )


def refuse_quantised(settings: Mapping[str, Any]) -> None:
    """Quantised weights need kernels of their own."""
    quantisation = settings.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unnamed")
        raise InvalidModel(
            f"quantised checkpoints ({method}) are not supported; use the bf16 or fp32 weights"
        )


def refuse_sliding_window(name: str, settings: Mapping[str, Any]) -> None:
    """Attention to a window needs a mask, and a store, that forget."""
    window = settings.get("sliding_window")
    if window is not None or "sliding_attention" in (settings.get("layer_types") or ()):
        raise InvalidModel(
            f"{name} with sliding-window attention (sliding_window={window}) is not supported; "
            "use a model whose layers attend to the whole context"
        )


def refuse_rope(name: str, settings: Mapping[str, Any]) -> None:
    """The rotation of a token must not depend on what else is in the pass."""
    rope = (settings.get("rope_parameters") or {}).get("rope_type", "default")
    if rope not in ROPE_TYPES:
        raise InvalidModel(
            f"{name} with rope_type {rope!r} is not supported; "
            f"supported are {', '.join(ROPE_TYPES)}"
        )
