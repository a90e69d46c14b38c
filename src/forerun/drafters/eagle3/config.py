"""Sizes and flags of an EAGLE-3 head; torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forerun.errors import InvalidModel

__all__ = ["NUM_FEATURE_LAYERS", "Eagle3Config", "default_feature_layers"]

NUM_FEATURE_LAYERS = 3
"""Hidden states of the target that are concatenated."""


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the feature layers of checkpoints that name none: layers 2, L/2 and L - 3.

    Source: EAGLE-3 (arXiv 2503.01840), as vLLM and speculators read it.

    Args:
        num_layers: of the target, L; at least 5.

    Raises:
        InvalidModel: the target has too few layers for three of them.
    """
    layers = (2, num_layers // 2, num_layers - 3)
    if not 0 < layers[0] <= layers[1] <= layers[2]:
        raise InvalidModel(
            f"a target with {num_layers} layers has no layers 2, L/2 and L - 3; name the layers"
        )
    return layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """Sizes and flags of an EAGLE-3 head.

    Attributes:
        target_hidden_size: width of the target's residual stream.
        target_vocab_size: width of the target's logits.
        feature_layers: layers of the target whose input is concatenated, in this order; layer 0
            stands for the embeddings, the number of layers for what leaves the last one.
        draft_vocab_size: tokens that can be drafted.
        hidden_size: width of the head; with the target's embedding it is that of the target.
        intermediate_size: width of the gated feed-forward.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        norm_eps: added to the mean square in every norm.
        rope: rotary positions as transformers writes them (`rope_parameters`).
        max_positions: longest context the head was made for.
        norm_before_residual: the residual carries the normed instead of the un-normed state.
        norm_output: what is fed back is the state after the final norm instead of before it
            (vLLM, speculators and TensorRT-LLM use the flag in this sense, SpecForge in another).
        norm_before_fc: one RMS norm over the concatenated states, ahead of `fc`.
        fc_norm: one RMS norm per state, ahead of `fc`.
        own_embedding: the checkpoint has token embeddings of its own.
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
        """Refuse sizes and flags that contradict each other.

        Raises:
            InvalidModel: naming both.
        """
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
