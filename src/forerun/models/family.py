"""The pieces that a family of models is composed of; `families.py` has a row for each family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

MATRIX_PARTS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Modules of a layer whose weights are fused into one matrix, in the order of `MatrixKind`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Names of modules in a layer with experts, and of the settings that describe them.

    Attributes:
        parts: gate, up and down projection of an expert, whose number goes in.
        num_experts: the setting that counts them.
        size: the setting of their width.
        normalised: the weights of a row's experts sum to 1: always, or if `norm_topk_prob` is set.
    """

    router: str
    parts: tuple[str, str, str]
    num_experts: str
    size: str
    normalised: Literal["always", "norm_topk_prob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderVariant:
    """Differences of a model family's layers from Llama's, which are the defaults.

    Attributes:
        parts: modules of a layer whose weights are fused into one matrix, see `MATRIX_PARTS`.
        input_norm: name of the norm before attention; None: there is none.
        attention_norm: on what attention adds to the residual stream.
        post_norm: before the feed-forward.
        feed_forward_norm: on what the feed-forward adds to the residual stream.
        one_plus_norms: norms multiply by 1 + weight.
        qkv_bias: queries, keys and values have biases: always, never, or as `attention_bias` says.
        qk_norm: queries and keys are normed before rotation, head by head or as one vector each.
        windows: layers with the window of the configuration: none, all, those that `layer_types`
            lists as sliding, or these if `use_sliding_window` is set.
        partial_rotation: `partial_rotary_factor` says which part of a head is rotated.
        interleaved: rotated pairs are neighbours.
        unrotated: layers that do not rotate: none, those that `no_rope_layers` names by a 0, or
            beside sliding layers all others.
        gate: the setting that names the activation.
        root_embedding: embeddings are multiplied by the square root of their width.
        query_scalar: scores are divided by the square root of `query_pre_attn_scalar`.
        score_cap: scores are capped at `attn_logit_softcapping`.
        logit_cap: logits are capped at `final_logit_softcapping`.
        experts: layers may have experts in place of a feed-forward.
        multipliers: embeddings, branches, scores and logits are scaled by Granite's settings.
    """

    parts: tuple[tuple[str, ...], ...] = MATRIX_PARTS
    input_norm: str | None = "input_layernorm"
    attention_norm: str | None = None
    post_norm: str | None = "post_attention_layernorm"
    feed_forward_norm: str | None = None
    one_plus_norms: bool = False
    qkv_bias: bool | Literal["attention_bias"] = False
    qk_norm: Literal["none", "heads", "whole"] = "none"
    windows: Literal["none", "all", "listed", "switched"] = "none"
    partial_rotation: bool = False
    interleaved: bool = False
    unrotated: Literal["none", "no_rope_layers", "full_attention"] = "none"
    gate: str = "hidden_act"
    root_embedding: bool = False
    query_scalar: bool = False
    score_cap: bool = False
    logit_cap: bool = False
    multipliers: bool = False
    experts: ExpertNames | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the graphs runner has all of it but windows."""
        known = replace(self, qkv_bias=False, windows="none")
        return known in (DecoderVariant(), DecoderVariant(qk_norm="heads"))


@dataclass(frozen=True, slots=True, kw_only=True)
class States:
    """Recurrent layers of a family.

    Attributes:
        module: their class in transformers.
        kind: how the sizes of a state follow from `sizes`, see `architecture.count_states`.
        sizes: names of the settings, that of the width of the convolution last.
        is_scanned_from_zero: over several rows the module starts from zero, whatever the state is.
        attends: there are layers with keys and values too.
    """

    module: str
    kind: Literal["convolution", "delta", "kimi", "mamba", "mamba2"] = "delta"
    sizes: tuple[str, ...] = (
        *("linear_num_key_heads", "linear_num_value_heads"),
        *("linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim"),
    )
    is_scanned_from_zero: bool = False
    attends: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFForm:
    """How GGUF files of a family name it, and what they say in a way of their own or leave out.

    Attributes:
        architecture: the name in files.
        setting: of two families with one name, the setting that is not 0 in files of this one.
        settings: further settings by their names in the file, with their names in transformers; an
            empty name is looked up by a function.
        fixed: settings that the files leave out.
        paired_rows: rows of queries and keys lie in pairs that are rotated together, which
            transformers has in the two halves of a head.
        rotates_part: `rope.dimension_count` may be a part of a head.
        window_period: every layer but the last of so many has a window; 0: all layers have it.
        rope_by_kind: layers with and without a window have rotations of their own.
        window_theta: base of the former where the file names none; None: that of the others.
        layers_scaled_by_hidden: number of layers of the model in which `query_pre_attn_scalar` is
            the hidden size over the number of heads, and not the width of a head.
        strips_after_special: spaces behind special tokens are left out of a text.
    """

    architecture: str
    setting: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    paired_rows: bool = False
    rotates_part: bool = False
    window_period: int = 0
    rope_by_kind: bool = False
    window_theta: float | None = None
    layers_scaled_by_hidden: int = 0
    strips_after_special: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a class of transformers needs of us; the defaults are those of attention alone.

    Attributes:
        name: of the class.
        model_type: of its configuration; needed for `vision` and `gguf`.
        variant: of the layers, for the native and the graphs runner; None: only eager runs it.
        states: of recurrent layers; None: there are none.
        heads: of keys and values: as many as the configuration says; one per query head, whatever
            it says; latent, which are computed per head from a compressed row with keys wider than
            values; by Falcon's settings; or twice as many in layers with a window.
        positions: rotated; rows of a table, at whose end the context ends; or seen in chunks.
        windows: attention functions are given them; they are in the mask alone, where ours do not
            see them; or the configuration must state whether they are used.
        vision: the class of models of which this one is the text part.
        multiplies_logits: logits are multiplied by `logits_scaling`, not divided.
        norms_embedding: the final norm is applied to embeddings too.
    """

    name: str = ""
    model_type: str = ""
    variant: DecoderVariant | None = None
    states: States | None = None
    heads: Literal["grouped", "each", "latent", "falcon", "doubled"] = "grouped"
    positions: Literal["rotated", "table", "chunked"] = "rotated"
    windows: Literal["given", "masked", "stated"] = "given"
    vision: str | None = None
    multiplies_logits: bool = False
    norms_embedding: bool = False
    gguf: GGUFForm | None = None
