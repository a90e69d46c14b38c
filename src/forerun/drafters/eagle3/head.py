"""The EAGLE-3 head: one decoder layer over the target's hidden states and the next token.

Row t joins the target's hidden states at position t with the embedding of token t + 1 and predicts
token t + 2. To draft further, the row's own output takes the place of the target's states. Source:
EAGLE-3 (arXiv 2503.01840), with the flags of EAGLE 3.1 (arXiv 2605.09992).

The forms are that of speculators, and the raw form of EAGLE, SpecForge and SGLang. Both name layers
whose input is read. SGLang's own field, inside `eagle_config`, names layers whose output is read;
such ids are one lower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from forerun.drafters.heads import (
    Attend,
    FeedForward,
    HeadConfig,
    HeadModule,
    make_layer_settings,
    make_speculators_form,
    read_flag,
    read_head_sizes,
    read_layers,
    rotate,
)
from forerun.errors import InvalidModel


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the feature layers of checkpoints that name none: layers 2, L/2 and L - 3.

    Source: EAGLE-3 (arXiv 2503.01840), as vLLM and speculators read it.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] <= layers[1] <= layers[2]:
        raise InvalidModel(
            f"a target with {num_layers} layers has no layers 2, L/2 and L - 3; name the layers "
            "(--feature-layers of forerun align)"
        )
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """Sizes and flags of an EAGLE-3 head.

    Attributes:
        norm_before_residual: the residual carries the normed instead of the un-normed state.
        norm_output: what is fed back is the state after the final norm instead of before it
            (vLLM, speculators and TensorRT-LLM use the flag in this sense, SpecForge in another).
        norm_before_fc: one RMS norm over the concatenated states, ahead of `fc`.
        fc_norm: one RMS norm per state, ahead of `fc`.
    """

    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)  # slots: super() would name another class
        if self.norm_before_fc and self.fc_norm:
            raise InvalidModel(
                "an EAGLE-3 head has norm_before_fc (one norm over all states) or fc_norm (one per "
                "state), not both"
            )
        if self.num_layers != 1:
            raise InvalidModel(
                f"an EAGLE-3 head with {self.num_layers} layers is not supported, only 1"
            )


LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
RAW_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
SPECULATORS_ARCHITECTURES = ("Eagle3Speculator", "Eagle3DraftModel")
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
    flags: dict[str, Any] = {name: read_flag(settings, name) for name in FLAGS}
    is_nested = isinstance(settings.get("transformer_layer_config"), Mapping)
    if is_nested and settings.get("norm_before_residual") is None:
        flags["norm_before_residual"] = True  # vLLM's default for this form
    return Eagle3Config(
        **read_head_sizes(settings, "an EAGLE-3 head", ("llama", "eagle3")),
        feature_layers=feature_layers_of(settings, num_target_layers),
        own_embedding=own_embedding,
        **flags,
    )


def _listed_layers(settings: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the layers that config.json lists, and what is added to each."""
    nested = settings.get("eagle_config")
    inner = nested.get(LAYER_IDS) if isinstance(nested, Mapping) else None
    listed = settings.get(LAYER_IDS)
    return (inner, 1) if listed is None and inner is not None else (listed, 0)


def names_layers(settings: Mapping[str, Any]) -> bool:
    """Whether config.json lists layers; ModelOpt writes an empty list for the default ones."""
    return _listed_layers(settings)[0] not in (None, [])


def origin_of_layers(settings: Mapping[str, Any], layers: Sequence[int]) -> str:
    """Return where the layers that a head reads come from, for messages."""
    if names_layers(settings):
        return f"its layers {list(layers)} are those that config.json names"
    return (
        f"its layers {list(layers)} are assumed, because config.json names none: files of this "
        "format without layers mean 2, L/2 and L - 3"
    )


def feature_layers_of(
    settings: Mapping[str, Any], num_target_layers: int | None
) -> tuple[int, ...]:
    """Return the layers of the target whose input the head reads."""
    nested = settings.get("eagle_config")
    listed, offset = _listed_layers(settings)
    if isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False:
        raise InvalidModel(
            "an EAGLE-3 head that reads the target's last state alone (use_aux_hidden_state is "
            "false) is not supported, only one that reads several layers"
        )
    if not names_layers(settings):
        if num_target_layers is None:
            raise InvalidModel(f"config.json names no layers of the target ({LAYER_IDS})")
        return default_feature_layers(num_target_layers)
    return read_layers(listed, LAYER_IDS, offset)


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
    form = make_speculators_form(
        config,
        algorithm="eagle3",
        architecture="Eagle3Speculator",
        layer=make_layer_settings(config),
        verifier=(target, target_architecture),
        num_speculative_tokens=num_speculative_tokens,
    )
    return {**form, **_common_settings(config)}


def raw_settings(config: Eagle3Config) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **make_layer_settings(config),
        **_common_settings(config),
        "eagle_config": {
            LAYER_IDS: [layer - 1 for layer in config.feature_layers],
            "use_aux_hidden_state": True,
        },
    }


class Eagle3Attention(nn.Module):
    """Projections of the attention, whose input is twice as wide as the head."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, dim = 2 * config.hidden_size, config.head_dim
        self.dim = dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, config.hidden_size, bias=False)

    def forward(self, joined: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Return the attention's output for rows of [normed embedding; normed state]."""
        shape = (*joined.shape[:-1], -1, self.dim)
        queries = rotate(self.q_proj(joined).view(shape), cos, sin)
        keys = rotate(self.k_proj(joined).view(shape), cos, sin)
        attended = attend(queries, keys, self.v_proj(joined).view(shape))
        output: Tensor = self.o_proj(attended.flatten(-2))
        return output


class Eagle3Layer(nn.Module):
    """The decoder layer of the head; its tensors are named as in the speculators library."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(joined, cos, sin, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(HeadModule):
    """An EAGLE-3 head; its state dict has the names of the speculators format.

    Attributes:
        embed_tokens: None where the target's embedding is used.
    """

    config: Eagle3Config

    def __init__(
        self, config: Eagle3Config, target_ids: Int64[Tensor, " draft_vocab"] | None = None
    ) -> None:
        super().__init__(config, target_ids)
        self.config = config
        width = config.target_hidden_size
        num_states = len(config.feature_layers)
        self.input_norm = (
            nn.RMSNorm(num_states * width, eps=config.norm_eps) if config.norm_before_fc else None
        )
        self.fc_norm = (
            nn.ModuleList(nn.RMSNorm(width, eps=config.norm_eps) for _ in range(num_states))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(num_states * width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.embed_tokens = (
            nn.Embedding(config.target_vocab_size, config.hidden_size)
            if config.own_embedding
            else None
        )

    def fuse(
        self, features: Float[Tensor, "*rows layers target_width"]
    ) -> Float[Tensor, "*rows width"]:
        """Project the target's hidden states to the input state of a row."""
        fused: Tensor = self.fc(self.joined(features))
        return fused

    def joined(
        self, features: Float[Tensor, "*rows layers target_width"]
    ) -> Float[Tensor, "*rows joined_width"]:
        """Concatenate the target's hidden states, each with its norm if the head has such norms."""
        if self.fc_norm is not None:
            states = [norm(features[..., i, :]) for i, norm in enumerate(self.fc_norm)]
            features = torch.stack(states, dim=-2)
        joined = features.flatten(-2)
        if self.input_norm is not None:
            joined = self.input_norm(joined)
        return joined

    def forward(
        self,
        embedded: Float[Tensor, "*rows width"],
        hidden: Float[Tensor, "*rows width"],
        positions: Int64[Tensor, "*rows"],
        attend: Attend,
    ) -> Float[Tensor, "*rows width"]:
        """Run the head's decoder layer and return what leaves it, for `logits` and `fed_back`.

        Args:
            embedded: embedding of token t + 1 in row t.
            hidden: state of row t: `fuse` of the target's hidden states, or `fed_back`.
            positions: t, for the rotary embedding.
        """
        cos, sin = self.rotations(positions, embedded.dtype)
        output: Tensor = self.layers[0](embedded, hidden, cos, sin, attend)
        return output

    def logits(self, output: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows draft_vocab"]:
        """Return logits over the draft vocabulary from outputs of the layer."""
        scores: Tensor = self.lm_head(self.norm(output))
        return scores

    def fed_back(self, output: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        """Return the input state of the row after a draft token, from the output of the layer."""
        if not self.config.norm_output:
            return output
        normed: Tensor = self.norm(output)
        return normed
