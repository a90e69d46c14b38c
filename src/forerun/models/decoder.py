"""Weights of a decoder under names common to all model families, for the fast runners.

Llama, Mistral, Qwen2 and Qwen3 are one decoder with small differences: RMS norms, rotary positions,
grouped query heads, a gated feed-forward. Read here once, under names that do not depend on the
family, and fused where the input is the same: query, key and value; gate and up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

from forerun.models.architecture import Architecture

ReadTensor = Callable[[str], Tensor]
"""A parameter by its name in the checkpoint, in the dtype and on the device wanted."""


class QuantisedMatrix(NamedTuple):
    """Weights as integers times a scale per output and group of inputs."""

    values: Int8[Tensor, "outputs inputs"]
    scales: Float16[Tensor, "outputs groups"]


@runtime_checkable
class StoredBlocks(Protocol):
    """Matrices that are stored in 8 or 4 bits, in groups of 32 inputs."""

    def bits(self, name: str) -> int | None:
        """Return the bits of a matrix, by its name in transformers; None for others."""

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a matrix that has `bits`, without rounding."""


MATRIX_PARTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Modules of a layer whose weights are fused into one matrix, in the order of `MatrixKind`."""

# transformers calls the same function by both names.
SILU = ("silu", "swish")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionVariant:
    """What the attention of a model family has.

    Attributes:
        windows: layers with the window of the configuration: none, all, or those that `layer_types`
            lists as sliding.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    windows: Literal["none", "all", "listed"] = "none"


# The families that `Decoder` covers. Others may differ from it even where their settings do not.
ATTENTION_VARIANTS: Mapping[str, AttentionVariant] = MappingProxyType(
    {
        "LlamaForCausalLM": AttentionVariant(),
        "MistralForCausalLM": AttentionVariant(windows="all"),
        "Qwen2ForCausalLM": AttentionVariant(qkv_bias=True, windows="listed"),
        "Qwen3ForCausalLM": AttentionVariant(qk_norm=True, windows="listed"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """Sizes and constants of a decoder.

    Attributes:
        inv_freq: rotation per position of each pair (i, i + head_dim / 2), in radians, fp32.
        rope_scale: factor on sine and cosine (1 for every rotation supported so far).
        windows: per layer, how many positions a row sees, its own included; None: all. Empty: every
            layer sees all.
    """

    architecture: Architecture
    intermediate_size: int
    norm_eps: float
    inv_freq: Float[Tensor, " half_head_dim"]
    rope_scale: float
    qkv_bias: bool
    qk_norm: bool
    tied: bool
    windows: tuple[int | None, ...] = ()

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of every layer."""
        return self.windows or (None,) * self.architecture.num_layers

    def within(self, num_positions: int) -> Decoder:
        """Return the decoder without the windows that hide nothing of so many positions."""
        kept = (w if w is None or w < num_positions else None for w in self.windows)
        return replace(self, windows=tuple(kept))

    @property
    def beyond_graphs(self) -> str | None:
        """The first feature that the graphs runner does not have, or None."""
        sliding = [window for window in self.windows if window is not None]
        return f"sliding-window attention (sliding_window={sliding[0]})" if sliding else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of one layer; matrices are (outputs, inputs), as in torch.nn.functional.linear.

    Attributes:
        qkv: rows of the query heads, then of the key heads, then of the value heads; as wide as the
            residual stream, or in an attached head as the token embedding and its state joined.
        gate_up: rows of the gate, then of the up projection.
    """

    input_norm: Float[Tensor, " hidden"]
    qkv: Float[Tensor, "qkv_rows joined"]
    qkv_bias: Float[Tensor, " qkv_rows"] | None
    query_norm: Float[Tensor, " head_dim"] | None
    key_norm: Float[Tensor, " head_dim"] | None
    output: Float[Tensor, "hidden query_rows"]
    post_norm: Float[Tensor, " hidden"]
    gate_up: Float[Tensor, "gate_up_rows hidden"]
    down: Float[Tensor, "hidden intermediate"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndWeights:
    """Weights of embedding, final norm and head; a tied head shares the embedding's tensor."""

    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]


def unsupported(architecture: Architecture, settings: Mapping[str, Any]) -> str | None:
    """Return the first feature of a model that only the eager runner has, or None."""
    rope = settings.get("rope_parameters") or {}
    objections = {
        architecture.name: architecture.name not in ATTENTION_VARIANTS,
        f"hidden_act {settings.get('hidden_act')!r}": settings.get("hidden_act") not in SILU,
        "biases in the feed-forward (mlp_bias)": settings.get("mlp_bias"),
        "a bias on the attention output (attention_bias)": settings.get("attention_bias"),
        "rotation of a part of each head (partial_rotary_factor)": (
            float(rope.get("partial_rotary_factor", 1.0)) != 1.0
        ),
    }
    return next((objection for objection, holds in objections.items() if holds), None)


def read_decoder(architecture: Architecture, settings: Mapping[str, Any]) -> Decoder:
    """Read the sizes and constants of a decoder for which `unsupported` returns None."""
    variant = ATTENTION_VARIANTS[architecture.name]
    inv_freq, rope_scale = rotation(architecture, settings)
    return Decoder(
        architecture=architecture,
        intermediate_size=settings["intermediate_size"],
        norm_eps=settings["rms_norm_eps"],
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        qkv_bias=variant.qkv_bias,
        qk_norm=variant.qk_norm,
        tied=settings["tie_word_embeddings"],
        windows=_windows(variant, settings, architecture.num_layers),
    )


def _windows(
    variant: AttentionVariant, settings: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    """Return the window of every layer."""
    window = None if variant.windows == "none" else settings.get("sliding_window")
    if variant.windows != "listed":
        return (window,) * num_layers
    kinds = settings["layer_types"]
    if len(kinds) != num_layers:
        raise ValueError(f"layer_types names {len(kinds)} of {num_layers} layers")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def rotation(architecture: Architecture, settings: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Compute the rotation per position of every pair of a head, and its scale."""
    rope = settings["rope_parameters"]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.float32)
        return rope["rope_theta"] ** -(exponents / architecture.head_dim), 1.0
    # Imported for the few models that need it: it costs a second of their start.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**settings)
    inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return inv_freq.float(), float(scale)


def parameter_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter a checkpoint must hold."""
    a = decoder.architecture
    hidden, intermediate = a.hidden_size, decoder.intermediate_size
    rows = {"q": a.num_heads * a.head_dim, "k": a.num_kv_heads * a.head_dim}
    rows["v"] = rows["k"]
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.o_proj.weight": (hidden, rows["q"]),
        "mlp.gate_proj.weight": (intermediate, hidden),
        "mlp.up_proj.weight": (intermediate, hidden),
        "mlp.down_proj.weight": (hidden, intermediate),
    }
    for kind, num_rows in rows.items():
        layer[f"self_attn.{kind}_proj.weight"] = (num_rows, hidden)
        if decoder.qkv_bias:
            layer[f"self_attn.{kind}_proj.bias"] = (num_rows,)
    if decoder.qk_norm:
        layer |= {f"self_attn.{kind}_norm.weight": (a.head_dim,) for kind in ("q", "k")}
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(a.num_layers)
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (a.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return shapes if decoder.tied else shapes | {"lm_head.weight": (a.vocab_size, hidden)}


def read_layer(decoder: Decoder, index: int, read: ReadTensor) -> LayerWeights:
    """Read layer `index` with its matrices fused."""
    prefix = f"model.layers.{index}"
    attention = f"{prefix}.self_attn"
    kinds = ("q", "k", "v")
    return LayerWeights(
        input_norm=read(f"{prefix}.input_layernorm.weight"),
        qkv=torch.cat([read(f"{attention}.{kind}_proj.weight") for kind in kinds]),
        qkv_bias=torch.cat([read(f"{attention}.{kind}_proj.bias") for kind in kinds])
        if decoder.qkv_bias
        else None,
        query_norm=read(f"{attention}.q_norm.weight") if decoder.qk_norm else None,
        key_norm=read(f"{attention}.k_norm.weight") if decoder.qk_norm else None,
        output=read(f"{attention}.o_proj.weight"),
        post_norm=read(f"{prefix}.post_attention_layernorm.weight"),
        gate_up=torch.cat([read(f"{prefix}.mlp.{kind}_proj.weight") for kind in ("gate", "up")]),
        down=read(f"{prefix}.mlp.down_proj.weight"),
    )


def read_ends(decoder: Decoder, read: ReadTensor) -> EndWeights:
    """Read embedding, final norm and head."""
    embedding = read("model.embed_tokens.weight")
    return EndWeights(
        embedding=embedding,
        norm=read("model.norm.weight"),
        head=embedding if decoder.tied else read("lm_head.weight"),
    )
