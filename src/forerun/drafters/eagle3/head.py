"""The EAGLE-3 head: one decoder layer over the target's hidden states and the next token.

Row t joins the target's hidden states at position t with the embedding of token t + 1 and predicts
token t + 2. To draft further, the row's own output takes the place of the target's states. Source:
EAGLE-3 (arXiv 2503.01840), with the flags of EAGLE 3.1 (arXiv 2605.09992).

The forms are that of speculators, and the raw form of EAGLE, SpecForge and SGLang. Both name layers
whose input is read. SGLang's own field, inside `eagle_config`, names layers whose output is read;
such ids are one lower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor, nn

from forerun.errors import InvalidModel
from forerun.models.architecture import ROPE_KEYS, Architecture, checked_size, optional_size
from forerun.models.decoder import rotation


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
"""Version of speculators' file format that is written."""
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
    known = ("default", "linear", "llama3")
    if rope["rope_type"] not in known:
        raise InvalidModel(
            f"rotary embeddings of type {rope['rope_type']!r:.40} are not supported; supported "
            f"are {', '.join(known)}"
        )
    for name in ROPE_KEYS[rope["rope_type"]].split():
        number(rope, name, 0.0)  # 0 is refused: it must be given
    return rope


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


Attend = Callable[
    [
        Float[Tensor, "*rows heads dim"],
        Float[Tensor, "*rows kv_heads dim"],
        Float[Tensor, "*rows kv_heads dim"],
    ],
    Float[Tensor, "*rows heads dim"],
]
"""Attention over rotated queries and keys, and values, of the rows of a pass.

It decides what a row sees and keeps what later rows are to see.
"""


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


class Eagle3FeedForward(nn.Module):
    """The gated feed-forward of Llama."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))
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
        self.mlp = Eagle3FeedForward(config)

    def forward(
        self, embedded: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        joined = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        hidden = residual + self.self_attn(joined, cos, sin, attend)
        output: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Eagle3Head(nn.Module):
    """An EAGLE-3 head; its state dict has the names of the speculators format.

    Args:
        target_ids: target token of every draft token, ascending; None: the first
            `config.draft_vocab_size` ones.

    Attributes:
        d2t: target id minus draft id, per draft token.
        t2d: whether a target token can be drafted.
        embed_tokens: None where the target's embedding is used.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self, config: Eagle3Config, target_ids: Int64[Tensor, " draft_vocab"] | None = None
    ) -> None:
        super().__init__()
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
        own_ids = torch.arange(config.draft_vocab_size)
        if target_ids is None:
            target_ids = own_ids
        self.register_buffer("d2t", target_ids - own_ids.to(target_ids.device))
        t2d = torch.zeros(config.target_vocab_size, dtype=torch.bool, device=target_ids.device)
        self.register_buffer("t2d", t2d.index_fill_(0, target_ids, value=True))
        # No buffer: those are rounded when the head is converted to bf16.
        self.inv_freq, self.rope_scale = rotation(*rotary_sizes(config))

    @property
    def target_ids(self) -> Int64[Tensor, " draft_vocab"]:
        """The target's token id of every draft token."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

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

    def rotations(
        self, positions: Int64[Tensor, "*rows"], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the rotary embedding, [*rows, 1, head_dim] each."""
        angles = positions[..., None].float() * self.inv_freq.to(positions.device)
        angles = torch.cat([angles, angles], dim=-1)[..., None, :]
        return (
            (angles.cos() * self.rope_scale).to(dtype),
            (angles.sin() * self.rope_scale).to(dtype),
        )

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


def over_target_vocabulary(
    logits: Float[Tensor, "rows draft_vocab"],
    target_ids: Int64[Tensor, " draft_vocab"],
    target_vocab_size: int,
) -> Float[Tensor, "rows target_vocab"]:
    """Return logits over the target's tokens, with -inf at tokens outside the draft vocabulary."""
    if logits.shape[1] == target_vocab_size:
        return logits
    full = logits.new_full((len(logits), target_vocab_size), float("-inf"))
    return full.index_copy_(1, target_ids, logits)


def rotate(
    heads: Float[Tensor, "*rows heads dim"], cos: Tensor, sin: Tensor
) -> Float[Tensor, "*rows heads dim"]:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def rotary_sizes(config: Eagle3Config) -> tuple[Architecture, dict[str, Any]]:
    """Return the sizes that determine the rotary embedding, in the form of a decoder."""
    architecture = Architecture(
        name="LlamaForCausalLM",
        num_layers=1,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        vocab_size=config.draft_vocab_size,
        max_positions=config.max_positions,
    )
    return architecture, _layer_settings(config)
