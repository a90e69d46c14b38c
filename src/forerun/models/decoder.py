"""Weights of a decoder under names common to all model families, for the fast runners.

Many families are one decoder with small differences: RMS norms, rotary positions, grouped query
heads, a gated feed-forward. A `DecoderVariant` says how each differs. Read here once, under names
that do not depend on the family, and fused where the input is the same: query, key and value; gate
and up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float16, Int8
from torch import Tensor

from forerun.models.architecture import Architecture
from forerun.models.families import find_family
from forerun.models.family import MATRIX_PARTS, DecoderVariant, ExpertNames

ReadTensor = Callable[[str], Tensor]
"""A parameter by its name in the checkpoint, in the dtype and on the device wanted."""


class BlockFormat(NamedTuple):
    """How a matrix is kept in integers: bits, inputs of a group, and whether groups have minima."""

    bits: int
    group: int = 32
    has_minima: bool = False

    @property
    def bits_per_weight(self) -> float:
        """Bits with the fp16 scales, and minima, of the groups."""
        return self.bits + 16 * (1 + self.has_minima) / self.group

    def join(self, other: BlockFormat) -> BlockFormat:
        """Return the format that holds what each of two holds."""
        return BlockFormat(
            max(self.bits, other.bits),
            min(self.group, other.group),
            self.has_minima or other.has_minima,
        )


class QuantisedMatrix(NamedTuple):
    """Weights as integers times a scale per output and group of inputs, plus a minimum if any.

    Integers of 4 bits go from -8 to 7 without minima and from 0 to 15 with them.
    """

    values: Int8[Tensor, "outputs inputs"]
    scales: Float16[Tensor, "outputs groups"]
    minima: Float16[Tensor, "outputs groups"] | None = None

    def widened(self, given: BlockFormat, wanted: BlockFormat) -> QuantisedMatrix:
        """Return the same weights in a format that holds theirs, see `BlockFormat.join`."""
        values, (scales, minima) = self.values, (self.scales, self.minima)
        if wanted.has_minima and minima is None:
            minima = torch.zeros_like(scales)
            if wanted.bits == given.bits == 4:
                values, minima = values + 8, scales * -8
        times = given.group // wanted.group
        scales = scales.repeat_interleave(times, dim=1)
        return QuantisedMatrix(
            values, scales, None if minima is None else minima.repeat_interleave(times, dim=1)
        )


class StoredWeights(ABC):
    """The tensors of a model by their names in transformers: safetensors, GGUF or packed integers.

    Attributes:
        is_packed: whether matrices may be stored in groups of a few bits.
        notice: message for the user on tensors that are dequantised; None without.
        zero_biases: stored biases of zeros, which the model need not have.
        rope_factors: divisors of the rotation of every pair of a head, fp32; None without scaling.
        type_counts: number of parameters by the type in which they are stored.
        names: of all tensors, also of parts beside the language model.
        shapes: of the parameters of the language model.
    """

    is_packed = False
    zero_biases: frozenset[str] = frozenset()

    @property
    def notice(self) -> str | None:
        return None

    @property
    def rope_factors(self) -> Tensor | None:
        return None

    @property
    @abstractmethod
    def type_counts(self) -> Counter[str]: ...
    @property
    @abstractmethod
    def names(self) -> Collection[str]: ...
    @property
    @abstractmethod
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Return a parameter in floating point, dequantised."""

    def reader(self, dtype: torch.dtype | None, device: torch.device) -> ReadTensor:
        """Return a function that reads a parameter, converted and moved to a device.

        Without a dtype it is the stored one.
        """
        return lambda name: self.read(name).to(device=device, dtype=dtype)

    def groups(self, name: str) -> BlockFormat | None:
        """Return the format of a matrix in few bits, by its name in transformers; else None."""
        return None

    def quantised(self, name: str) -> QuantisedMatrix:
        """Return a matrix that has `groups`."""
        raise KeyError(name)


def list_fused(name: str) -> tuple[str, ...]:
    """Return the names of the parameters that are packed into one matrix with one of a layer."""
    prefix, found, part = name.removesuffix(".weight").rpartition(".self_attn.")
    if not found:
        prefix, found, part = name.removesuffix(".weight").rpartition(".mlp.")
    module = f"{found[1:]}{part}"
    fused = next((parts for parts in MATRIX_PARTS if module in parts), None)
    return (name,) if fused is None else tuple(f"{prefix}.{part}.weight" for part in fused)


def join_formats(stored: StoredWeights, names: Sequence[str]) -> BlockFormat | None:
    """Return the format that holds all parts of a matrix; None where one is in floating point."""
    found = [stored.groups(name) for name in names]
    formats = [groups for groups in found if groups is not None]
    return reduce(BlockFormat.join, formats) if formats and len(formats) == len(found) else None


# By transformers' names, of which two call the same function: whether it is the GELU by tanh.
GATES: Mapping[str, bool] = MappingProxyType(
    {"silu": False, "swish": False, "gelu_pytorch_tanh": True}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Sizes of the experts of a decoder.

    Attributes:
        num_used: how many a row uses.
        normalised: the weights of these sum to 1.
        layers: per layer whether it has experts.
    """

    num_experts: int = 0
    num_used: int = 0
    intermediate_size: int = 0
    normalised: bool = False
    layers: tuple[bool, ...] = ()


Rotation = tuple[Float[Tensor, " pairs"], float]
"""Rotation per position of each pair of a head, in radians, fp32; factor on sine and cosine."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decoder:
    """Sizes and constants of a decoder.

    Attributes:
        inv_freq: rotation per position of each pair, in radians, fp32.
        rope_scale: factor on sine and cosine.
        windows: per layer, how many positions a row sees, its own included; None: all. Empty: every
            layer sees all.
        causal_blocks: of a block drafter, per layer whether rows see no later rows of their block;
            windows count from the block's first row. Empty: there are no blocks.
        sliding_rotation: of layers whose rotation is 1 in `rotations`.
        rotations: per layer; 0: `inv_freq`, -1: none. Empty: 0 everywhere.
        gelu: the gate is a GELU by tanh instead of a SiLU.
        residual_scale: factor on what a branch adds to the residual stream.
        score_scale: factor on products of queries and keys.
        score_cap: scores are capped smoothly at plus and minus this; 0: not at all.
    """

    architecture: Architecture
    variant: DecoderVariant = field(default_factory=DecoderVariant)
    intermediate_size: int
    norm_eps: float
    inv_freq: Float[Tensor, " pairs"]
    rope_scale: float
    tied: bool
    windows: tuple[int | None, ...] = ()
    causal_blocks: tuple[bool, ...] = ()
    sliding_rotation: Rotation | None = None
    rotations: tuple[int, ...] = ()
    gelu: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    score_scale: float | None = None
    logit_divisor: float = 1.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.experts.layers[layer]

    def within(self, num_positions: int) -> Decoder:
        """Return the decoder without the windows that hide nothing of so many positions."""
        kept = (w if w is None or w < num_positions else None for w in self.windows)
        return replace(self, windows=tuple(kept))

    @property
    def beyond_graphs(self) -> str | None:
        """The first feature that the graphs runner does not have, or None."""
        sliding = [window for window in self.windows if window is not None]
        objections = {
            self.architecture.name: not self.variant.is_plain,
            "a gate by gelu_pytorch_tanh": self.gelu,
            f"sliding-window attention (sliding_window={sliding[0] if sliding else None})": sliding,
        }
        return next((objection for objection, holds in objections.items() if holds), None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertWeights:
    """Weights of the experts of a layer; matrices of one are gate and up fused, and down."""

    router: Float[Tensor, "experts hidden"]
    matrices: Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """Weights of one layer; matrices are (outputs, inputs), as in torch.nn.functional.linear.

    Attributes:
        qkv: rows of the query heads, then of the key heads, then of the value heads; as wide as the
            residual stream, or in an attached head as the token embedding and its state joined.
        gate_up: rows of the gate, then of the up projection; of no elements with experts.
        input_norm, post_norm: before attention and before the feed-forward; of no elements where
            there is none.
        attention_norm, feed_forward_norm: on what these add to the residual stream.
    """

    input_norm: Float[Tensor, " hidden_or_0"]
    qkv: Float[Tensor, "qkv_rows joined"]
    qkv_bias: Float[Tensor, " qkv_rows"] | None
    query_norm: Float[Tensor, " query_width"] | None
    key_norm: Float[Tensor, " key_width"] | None
    output: Float[Tensor, "hidden query_rows"]
    post_norm: Float[Tensor, " post_or_0"]
    gate_up: Float[Tensor, "gate_up_rows gate_inputs"]
    down: Float[Tensor, "down_rows intermediate"]
    experts: ExpertWeights | None = None
    attention_norm: Float[Tensor, " hidden"] | None = None
    feed_forward_norm: Float[Tensor, " hidden"] | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndWeights:
    """Weights of embedding, final norm and head; a tied head shares the embedding's tensor."""

    embedding: Float[Tensor, "vocab hidden"]
    norm: Float[Tensor, " hidden"]
    head: Float[Tensor, "vocab hidden"]


def unsupported(architecture: Architecture, settings: Mapping[str, Any]) -> str | None:
    """Return the first feature of a model that only the eager runner has, or None."""
    if (variant := find_family(architecture.name).variant) is None:
        return architecture.name
    gate = settings.get(variant.gate)
    rope = settings.get("rope_parameters") or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    is_partial = any(float(part.get("partial_rotary_factor", 1.0)) != 1.0 for part in parts)
    has_biases = settings.get("attention_bias") and variant.qkv_bias != "attention_bias"
    objections = {
        f"{variant.gate} {gate!r}": gate not in GATES,
        "biases in the feed-forward (mlp_bias)": settings.get("mlp_bias"),
        "biases in every matrix (use_bias)": settings.get("use_bias"),
        "clipped queries and keys (clip_qkv)": settings.get("clip_qkv"),
        "a bias on the attention output (attention_bias)": has_biases,
        "a bias on the attention output (attention_out_bias)": settings.get("attention_out_bias"),
        "rotation of a part of each head (partial_rotary_factor)": (
            not variant.partial_rotation and is_partial
        ),
    }
    return next((objection for objection, holds in objections.items() if holds), None)


def read_decoder(architecture: Architecture, settings: Mapping[str, Any]) -> Decoder:
    """Read the sizes and constants of a decoder for which `unsupported` returns None."""
    variant = find_family(architecture.name).variant
    assert variant is not None
    kinds = settings.get("layer_types")
    if kinds is not None and len(kinds) != architecture.num_layers:
        raise ValueError(f"layer_types names {len(kinds)} of {architecture.num_layers} layers")
    is_rotated_by_kind = isinstance(settings["rope_parameters"].get("full_attention"), Mapping)
    inv_freq, rope_scale = rotation(
        architecture, settings, "full_attention" if is_rotated_by_kind else None
    )
    sliding = rotation(architecture, settings, "sliding_attention") if is_rotated_by_kind else None
    if variant.qkv_bias == "attention_bias":
        variant = replace(variant, qkv_bias=bool(settings["attention_bias"]))
    return Decoder(
        architecture=architecture,
        variant=variant,
        intermediate_size=settings["intermediate_size"],
        norm_eps=settings["rms_norm_eps"],
        inv_freq=inv_freq,
        rope_scale=rope_scale,
        tied=settings["tie_word_embeddings"],
        windows=_list_windows(variant, settings, architecture.num_layers),
        causal_blocks=(),
        sliding_rotation=sliding,
        rotations=_list_rotations(variant, settings, by_kind=is_rotated_by_kind),
        gelu=GATES[settings[variant.gate]],
        experts=_read_expert_sizes(variant.experts, settings, architecture.num_layers),
        **_read_scales(variant, architecture, settings),
    )


def _read_expert_sizes(
    names: ExpertNames | None, settings: Mapping[str, Any], num_layers: int
) -> Experts | None:
    if names is None:
        return None
    num_experts, num_used = settings[names.num_experts], settings["num_experts_per_tok"]
    if not 0 < num_used <= num_experts:
        raise ValueError(f"num_experts_per_tok is {num_used}, of {num_experts} experts")
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step") or 1
    return Experts(
        num_experts=num_experts,
        num_used=num_used,
        intermediate_size=settings[names.size],
        normalised=names.normalised == "always" or settings["norm_topk_prob"],
        layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def _list_rotations(
    variant: DecoderVariant, settings: Mapping[str, Any], *, by_kind: bool
) -> tuple[int, ...]:
    if by_kind:
        return tuple(int(kind == "sliding_attention") for kind in settings["layer_types"])
    if variant.unrotated == "no_rope_layers":
        listed, num_layers = settings["no_rope_layers"], settings["num_hidden_layers"]
        if len(listed) != num_layers:
            raise ValueError(f"no_rope_layers names {len(listed)} of {num_layers} layers")
        return tuple(0 if rotates else -1 for rotates in listed)
    if variant.unrotated == "full_attention" and settings["sliding_window"] is not None:
        return tuple(0 if kind == "sliding_attention" else -1 for kind in settings["layer_types"])
    return ()


def _list_windows(
    variant: DecoderVariant, settings: Mapping[str, Any], num_layers: int
) -> tuple[int | None, ...]:
    is_off = variant.windows == "switched" and not settings["use_sliding_window"]
    window = None if variant.windows == "none" or is_off else settings.get("sliding_window")
    if variant.windows in ("none", "all"):
        return (window,) * num_layers
    return tuple(
        window if kind == "sliding_attention" else None for kind in settings["layer_types"]
    )


def _read_scales(
    variant: DecoderVariant, architecture: Architecture, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the factors and caps that differ from 1 and from none."""
    scales: dict[str, float] = {}
    if variant.root_embedding:
        scales["embedding_scale"] = architecture.hidden_size**0.5
    if variant.query_scalar:
        scales["score_scale"] = settings["query_pre_attn_scalar"] ** -0.5
    if variant.score_cap:
        scales["score_cap"] = settings["attn_logit_softcapping"] or 0.0
    if variant.logit_cap:
        scales["logit_cap"] = settings["final_logit_softcapping"] or 0.0
    if variant.multipliers:
        scales |= {
            "embedding_scale": settings["embedding_multiplier"],
            "residual_scale": settings["residual_multiplier"],
            "score_scale": settings["attention_multiplier"],
            "logit_divisor": settings["logits_scaling"],
        }
    return {name: float(scale) for name, scale in scales.items()}


def rotation(
    architecture: Architecture, settings: Mapping[str, Any], layer_type: str | None = None
) -> Rotation:
    """Compute the rotation per position of every pair of a head, and its scale.

    `layer_type` is one of `layer_types` where each has a rotation of its own.
    """
    rope = settings["rope_parameters"]
    if layer_type is not None:
        rope = rope[layer_type]
    kind = rope.get("rope_type", "default")
    if kind == "default":
        width = int(architecture.head_dim * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** -(torch.arange(0, width, 2, dtype=torch.float32) / width), 1.0
    # Imported for the few models that need it: it costs a second of their start.
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.for_model(**settings)
    options = {} if layer_type is None else {"layer_type": layer_type}
    with torch.device("cpu"):  # also where a module is built without memory, to know its sizes
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **options)
    return inv_freq.float(), float(scale)


def parameter_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every parameter a checkpoint must hold."""
    a, variant = decoder.architecture, decoder.variant
    hidden, intermediate = a.hidden_size, decoder.intermediate_size
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    sizes = {
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "qkv_proj": (queries + 2 * keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "gate_up_proj": (2 * intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }

    def weights(parts: tuple[tuple[str, ...], ...]) -> dict[str, tuple[int, ...]]:
        named = (part for group in parts for part in group)
        return {f"{part}.weight": sizes[part.split(".")[-1]] for part in named}

    layer = weights(variant.parts[:2])
    if variant.qkv_bias:
        layer |= {f"{part}.bias": layer[f"{part}.weight"][:1] for part in variant.parts[0]}
    if variant.qk_norm != "none":
        widths = (queries, keys) if variant.qk_norm == "whole" else (a.head_dim, a.head_dim)
        layer |= {f"self_attn.{n}_norm.weight": (w,) for n, w in zip("qk", widths, strict=True)}
    norms = (
        variant.input_norm,
        variant.attention_norm,
        variant.post_norm,
        variant.feed_forward_norm,
    )
    layer |= {f"{name}.weight": (hidden,) for name in norms if name is not None}
    dense, mixed = weights(variant.parts[2:]), _list_expert_shapes(decoder)
    shapes = {
        f"model.layers.{index}.{name}": shape
        for index in range(a.num_layers)
        for name, shape in (layer | (mixed if decoder.has_experts(index) else dense)).items()
    }
    shapes |= {"model.embed_tokens.weight": (a.vocab_size, hidden), "model.norm.weight": (hidden,)}
    return shapes if decoder.tied else shapes | {"lm_head.weight": (a.vocab_size, hidden)}


def _list_expert_shapes(decoder: Decoder) -> dict[str, tuple[int, ...]]:
    """Return the name in a layer and the shape of every parameter of its experts."""
    experts, names = decoder.experts, decoder.variant.experts
    if experts is None or names is None:
        return {}
    hidden, width = decoder.architecture.hidden_size, experts.intermediate_size
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    named: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (experts.num_experts, hidden)}
    for expert in range(experts.num_experts):
        parts = zip(names.parts, shapes, strict=True)
        named |= {f"{part.format(expert)}.weight": shape for part, shape in parts}
    return named


def _read_experts(decoder: Decoder, prefix: str, read: ReadTensor) -> ExpertWeights | None:
    """Read the router of a layer; its experts are read one by one when they are asked for."""
    experts, names = decoder.experts, decoder.variant.experts
    assert experts is not None and names is not None

    def matrices(expert: int) -> tuple[Tensor, Tensor]:
        gate, up, down = (read(f"{prefix}.{part.format(expert)}.weight") for part in names.parts)
        return torch.cat([gate, up]), down

    return ExpertWeights(
        router=read(f"{prefix}.{names.router}.weight"),
        matrices=map(matrices, range(experts.num_experts)),
    )


def read_layer(decoder: Decoder, index: int, read: ReadTensor) -> LayerWeights:
    """Read layer `index` with its matrices fused."""
    prefix, variant = f"model.layers.{index}", decoder.variant

    def fused(place: int, kind: str = "weight") -> Tensor:
        return torch.cat([read(f"{prefix}.{part}.{kind}") for part in variant.parts[place]])

    def norm(name: str | None) -> Tensor | None:
        return None if name is None else _norm(decoder, f"{prefix}.{name}.weight", read)

    nothing, no_matrix = torch.empty(0), torch.empty(0, 0)
    has_experts = decoder.has_experts(index)
    has_qk_norm = variant.qk_norm != "none"
    input_norm, post_norm = norm(variant.input_norm), norm(variant.post_norm)
    return LayerWeights(
        input_norm=nothing if input_norm is None else input_norm,
        qkv=fused(0),
        qkv_bias=fused(0, "bias") if variant.qkv_bias else None,
        query_norm=norm("self_attn.q_norm") if has_qk_norm else None,
        key_norm=norm("self_attn.k_norm") if has_qk_norm else None,
        output=fused(1),
        attention_norm=norm(variant.attention_norm),
        post_norm=nothing if post_norm is None else post_norm,
        gate_up=no_matrix if has_experts else fused(2),
        down=no_matrix if has_experts else fused(3),
        experts=_read_experts(decoder, prefix, read) if has_experts else None,
        feed_forward_norm=norm(variant.feed_forward_norm),
    )


def _norm(decoder: Decoder, name: str, read: ReadTensor) -> Tensor:
    return 1.0 + read(name).float() if decoder.variant.one_plus_norms else read(name)


def read_ends(decoder: Decoder, read: ReadTensor) -> EndWeights:
    """Read embedding, final norm and head."""
    embedding = read("model.embed_tokens.weight")
    return EndWeights(
        embedding=embedding,
        norm=_norm(decoder, "model.norm.weight", read),
        head=embedding if decoder.tied else read("lm_head.weight"),
    )
