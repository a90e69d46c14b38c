"""The end of a model: hidden states after the final norm to logits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

__all__ = ["Head", "head_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Head:
    """A projection to the vocabulary, and what a family does to its logits afterwards.

    Attributes:
        weight: one row per token.
        bias: of each token, if there is one.
        divisor: logits are divided by it (Granite).
        cap: logits are bent to stay within plus and minus this (Gemma); None: they are not.
    """

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None = None
    divisor: float = 1.0
    cap: float | None = None

    @property
    def width(self) -> int:
        """Of a hidden state."""
        return self.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.weight.shape[0]

    def to(self, device: torch.device | str) -> Head:
        """The same head on another device."""
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    def logits(self, hidden: Float[Tensor, "rows hidden"]) -> Float[Tensor, "rows vocab"]:
        """Logits in the dtype of the weights, on their device."""
        states = hidden.to(device=self.weight.device, dtype=self.weight.dtype)
        logits = nn.functional.linear(states, self.weight, self.bias)
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)


def head_of(model: Any) -> Head:
    """The head of a transformers model; weights are shared, not copied.

    Args:
        model: a causal language model of a supported family.
    """
    settings: Mapping[str, Any] = model.config.to_dict()
    projection = model.get_output_embeddings()
    bias = dict(projection.named_parameters()).get("bias")
    return Head(
        weight=projection.weight.detach(),
        bias=None if bias is None else bias.detach(),
        divisor=float(settings.get("logits_scaling") or 1.0),
        cap=settings.get("final_logit_softcapping"),
    )
