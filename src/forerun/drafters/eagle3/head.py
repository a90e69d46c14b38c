"""The EAGLE-3 head: one decoder layer over the target's hidden states and the next token.

Row t joins the target's hidden states at position t with the embedding of token t + 1 and predicts
token t + 2. To draft further, the row's own output takes the place of the target's states. Source:
EAGLE-3 (arXiv 2503.01840), with the flags of EAGLE 3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from forerun.drafters.eagle3.formats import Eagle3Config
from forerun.models.architecture import Architecture
from forerun.models.decoder import rotation

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
        if target_ids is None:
            target_ids = _identity_vocabulary(config)
        d2t, t2d = _vocabulary_maps(target_ids, config.target_vocab_size)
        self.register_buffer("d2t", d2t)
        self.register_buffer("t2d", t2d)
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


def _identity_vocabulary(config: Eagle3Config) -> Int64[Tensor, " draft_vocab"]:
    return torch.arange(config.draft_vocab_size)


def _vocabulary_maps(
    target_ids: Int64[Tensor, " draft_vocab"], target_vocab_size: int
) -> tuple[Int64[Tensor, " draft_vocab"], Bool[Tensor, " target_vocab"]]:
    """Return d2t (target id minus draft id) and t2d (whether a target token can be drafted)."""
    d2t = target_ids - torch.arange(len(target_ids), device=target_ids.device)
    t2d = torch.zeros(target_vocab_size, dtype=torch.bool, device=target_ids.device)
    t2d[target_ids] = True
    return d2t, t2d


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
    settings = {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rope_parameters": dict(config.rope),
    }
    return architecture, settings
