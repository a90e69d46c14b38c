"""The DFlash network: a block of mask rows, which attends to states of the target, in one pass.

The block's first row is the embedding of the last committed token, the anchor; all others are that
of a mask token. Row k predicts the token k positions after the anchor. Queries come from the
block alone, keys and values from the context, one row per committed position before the anchor,
and from the block. A context row is the normed projection of the target's hidden states there: no
layer changes it, so its keys and values are computed once. Source: DFlash (arXiv 2602.06036).

There are two forms of files: that of speculators lists the target's layers whose input is read,
that of z-lab, the authors, those whose output is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64
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
from forerun.models.architecture import checked_size

LAYER_IDS, NESTED_LAYER_IDS = "aux_hidden_state_layer_ids", "target_layer_ids"
MAX_BLOCK_SIZE = 256
"""More than any published network has; no tensor's shape bounds it."""
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator")
REQUIRED_VALUES: Mapping[str, Any] = {"projector_type": "dflash", "sample_from_anchor": False}
"""Settings of speculators that must have these values where they are given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """Sizes of a DFlash network.

    Attributes:
        block_size: rows of the block: the anchor and one per token that is drafted.
        mask_token_id: the target's token whose embedding the rows after the anchor have.
        qk_norm: queries and keys have a norm per head.
        own_output: the network has an output matrix, over the draft vocabulary; otherwise the
            target's is used.
        windows: per layer, how many positions are seen, the anchor's included; None: all.
        causal: per layer, whether a row sees only earlier rows of its block.
    """

    block_size: int
    mask_token_id: int
    qk_norm: bool = True
    own_output: bool = True
    windows: tuple[int | None, ...] = (None,)
    causal: tuple[bool, ...] = (False,)

    def __post_init__(self) -> None:
        HeadConfig.__post_init__(self)  # slots: super() would name another class
        if not 2 <= self.block_size <= MAX_BLOCK_SIZE:
            raise InvalidModel(
                f"block_size is {self.block_size}; a block has 2 to {MAX_BLOCK_SIZE} rows"
            )
        if not 0 <= self.mask_token_id < self.target_vocab_size:
            raise InvalidModel(
                f"mask_token_id is {self.mask_token_id}, but the target's tokens are 0 to "
                f"{self.target_vocab_size - 1}: take the one that the network was trained with"
            )
        if not self.own_output and self.draft_vocab_size != self.target_vocab_size:
            raise InvalidModel(
                f"the network drafts {self.draft_vocab_size} of {self.target_vocab_size} tokens, "
                "but has no output matrix (lm_head.weight) for them"
            )

    @property
    def max_tokens(self) -> int:
        """Most tokens that are drafted at once."""
        return self.block_size - 1


def is_dflash(config: Mapping[str, Any]) -> bool:
    """Whether the contents of a config.json describe a DFlash network."""
    if config.get("speculators_model_type") is not None:
        return bool(config["speculators_model_type"] == "dflash")
    named = config.get("architectures")
    return isinstance(named, list) and any(name in ARCHITECTURES for name in named)


def read_dflash_config(settings: Mapping[str, Any], names: Sequence[str]) -> DFlashConfig:
    """Read the sizes of a network from its config.json and the names of its tensors."""
    nested = settings.get("dflash_config")
    inner = nested if isinstance(nested, Mapping) else {}
    for name, wanted in REQUIRED_VALUES.items():
        if (found := settings.get(name, wanted)) not in (wanted, None):
            raise InvalidModel(f"a DFlash network with {name}={found!r:.40} is not supported")
    sizes = read_head_sizes(settings, "a DFlash network", ("qwen3", "llama"))
    own_output = "lm_head.weight" in names
    mask = inner.get("mask_token_id", settings.get("mask_token_id"))
    if not isinstance(mask, int) or isinstance(mask, bool):
        raise InvalidModel(
            f"config.json has mask_token_id={mask!r:.40}; it must be the token whose embedding the "
            "mask rows have"
        )
    listed = settings.get(LAYER_IDS)
    if listed is None and (outputs := inner.get(NESTED_LAYER_IDS)) is not None:
        layers = read_layers(outputs, NESTED_LAYER_IDS, offset=1)
    else:
        layers = read_layers(listed, LAYER_IDS)
    windows, causal = _read_masks(settings, sizes["num_layers"])
    return DFlashConfig(
        **sizes,
        feature_layers=layers,
        own_embedding="embed_tokens.weight" in names,
        block_size=checked_size(settings.get("block_size", inner.get("block_size")), "block_size"),
        mask_token_id=mask,
        qk_norm="layers.0.self_attn.q_norm.weight" in names,
        own_output=own_output,
        windows=windows,
        causal=causal,
    )


def _read_masks(
    settings: Mapping[str, Any], num_layers: int
) -> tuple[tuple[int | None, ...], tuple[bool, ...]]:
    """Read for every layer its window, and whether its rows see only earlier rows of the block.

    Unless the file says otherwise, this is so in layers with a sliding window, and in no others.
    """
    nested = settings.get("transformer_layer_config")
    layer = nested if isinstance(nested, Mapping) else settings
    kinds = layer.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise InvalidModel(f"config.json has layer_types={kinds!r:.60}; it has {num_layers} layers")
    slides = [kind == "sliding_attention" for kind in kinds]
    window = checked_size(layer.get("sliding_window"), "sliding_window") if any(slides) else None
    declared = settings.get("is_causal", layer.get("is_causal"))
    causal = slides
    if declared is not None:
        causal = [read_flag({"is_causal": declared}, "is_causal")] * num_layers
    elif read_flag(settings, "sliding_window_non_causal"):
        causal = [False] * num_layers
    return tuple(window if slide else None for slide in slides), tuple(causal)


def make_settings(config: DFlashConfig, *, target: str, target_architecture: str) -> dict[str, Any]:
    """Return the contents of config.json in the form of speculators."""
    window = next((window for window in config.windows if window is not None), None)
    layer = make_layer_settings(config, "qwen3" if config.qk_norm else "llama")
    layer["layer_types"] = [
        "full_attention" if window is None else "sliding_attention" for window in config.windows
    ]
    layer |= {"sliding_window": window, "use_sliding_window": window is not None}
    form = make_speculators_form(
        config,
        algorithm="dflash",
        architecture=ARCHITECTURES[0],
        layer=layer,
        verifier=(target, target_architecture),
        num_speculative_tokens=config.max_tokens,
    )
    slides = [window is not None for window in config.windows]
    found = {"is_causal": config.causal[0]} if [*config.causal] != slides else {}
    settings = {
        **form,
        **found,
        LAYER_IDS: list(config.feature_layers),
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "sliding_window_non_causal": any(slides) and not any(config.causal),
        "sample_from_anchor": False,
    }
    if _read_masks(settings, len(slides)) != (config.windows, config.causal):
        raise InvalidModel(
            f"layers with windows {config.windows} and causal {config.causal} cannot be written: "
            "config.json has one sliding_window and one is_causal for all layers"
        )
    return settings


class DFlashAttention(nn.Module):
    """Attention of block rows to the context and the block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        width, dim = config.hidden_size, config.head_dim
        self.dim = dim
        self.q_proj = nn.Linear(width, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, width, bias=False)
        norm = nn.RMSNorm if config.qk_norm else lambda *_, **__: nn.Identity()
        self.q_norm = norm(dim, eps=config.norm_eps)
        self.k_norm = norm(dim, eps=config.norm_eps)

    def project(self, rows: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, of context rows or of normed rows of a block."""
        values = self.v_proj(rows).view(*rows.shape[:-1], -1, self.dim)
        # In autocast products are of lower precision than rows; norms and rotations are not.
        keys = self.k_proj(rows).view_as(values).to(rows.dtype)
        return rotate(self.k_norm(keys), cos, sin).to(values.dtype), values

    def forward(self, rows: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        keys, values = self.project(rows, cos, sin)
        queries = self.q_proj(rows).view(*rows.shape[:-1], -1, self.dim).to(rows.dtype)
        queries = rotate(self.q_norm(queries), cos, sin).to(values.dtype)
        attended = attend(queries, keys, values)
        output: Tensor = self.o_proj(attended.flatten(-2))
        return output


class DFlashLayer(nn.Module):
    """A decoder layer over the rows of a block."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, rows: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        rows = rows + self.self_attn(self.input_layernorm(rows), cos, sin, attend)
        output: Tensor = rows + self.mlp(self.post_attention_layernorm(rows))
        return output


class DFlashNetwork(HeadModule):
    """A DFlash network; its state dict has the names of the speculators format.

    Attributes:
        lm_head: None where the target's output matrix is used.
        embed_tokens: None where the target's embedding is used.
    """

    config: DFlashConfig

    def __init__(
        self, config: DFlashConfig, target_ids: Int64[Tensor, " draft_vocab"] | None = None
    ) -> None:
        super().__init__(config, target_ids)
        self.config = config
        width = config.hidden_size
        num_states = len(config.feature_layers)
        self.fc = nn.Linear(num_states * config.target_hidden_size, width, bias=False)
        self.hidden_norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(width, eps=config.norm_eps)
        self.lm_head = (
            nn.Linear(width, config.draft_vocab_size, bias=False) if config.own_output else None
        )
        self.embed_tokens = (
            nn.Embedding(config.target_vocab_size, width) if config.own_embedding else None
        )

    def read_context(
        self,
        features: Float[Tensor, "*rows layers target_width"],
        positions: Int64[Tensor, "*rows"],
    ) -> list[tuple[Float[Tensor, "*rows kv_heads dim"], Float[Tensor, "*rows kv_heads dim"]]]:
        """Return keys and values of context rows, for every layer."""
        fused = self.hidden_norm(self.fc(features.flatten(-2)).to(features.dtype))
        cos, sin = self.rotations(positions, fused.dtype)
        return [layer.self_attn.project(fused, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    def forward(
        self,
        embedded: Float[Tensor, "*blocks block width"],
        positions: Int64[Tensor, "*blocks block"],
        attends: Sequence[Attend],
    ) -> Float[Tensor, "*blocks tokens width"]:
        """Return the states, for the output matrix, of the rows after the anchor.

        Args:
            embedded: embedding of the anchor, then of the mask token.
            attends: per layer, the attention to the context and to the block.
        """
        cos, sin = self.rotations(positions, embedded.dtype)
        rows = embedded
        for layer, attend in zip(self.layers, attends, strict=True):
            rows = layer(rows, cos, sin, attend)
        output: Tensor = self.norm(rows[..., 1:, :])
        return output


def mask_context(config: DFlashConfig, layer: int, start: int) -> Bool[Tensor, " start"] | None:
    """Return which context rows a block at position `start` sees in a layer; None: all of them."""
    window = config.windows[layer]
    return None if window is None else torch.arange(start) > start - window


def mask_block(config: DFlashConfig, layer: int) -> Bool[Tensor, "block block"] | None:
    """Return which rows of its block each row sees in a layer; None: all of them."""
    size = config.block_size
    return torch.ones(size, size, dtype=torch.bool).tril() if config.causal[layer] else None
