"""Medusa heads: each predicts one later token from the target's last hidden state.

Source: Medusa (arXiv 2401.10774), heads of Medusa-1. The state is what leaves the target's final
norm; head k, from 0, at position t predicts token t + k + 2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from forerun.drafters.medusa.config import MedusaConfig

__all__ = ["MedusaHeads", "ResidualBlock", "SharedHead"]

SharedHead = Callable[[Float[Tensor, "rows width"]], Float[Tensor, "rows vocab"]]
"""The target's own output head, such as `LanguageModel.head`."""


class ResidualBlock(nn.Module):
    """h + SiLU(W h + b), where W starts at zero.

    Args:
        width: of the residual stream.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the state with the block's output added."""
        return hidden + F.silu(self.linear(hidden))


class MedusaHeads(nn.Module):
    """All Medusa heads; the state dict has the names of the reference code without their prefix.

    `{head}.{block}.linear.weight`, `{head}.{block}.linear.bias` and, where heads have output
    matrices of their own, `{head}.{num_blocks}.weight`.

    Args:
        config: sizes.
    """

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        self.config = config
        self.heads: list[nn.Sequential] = []
        for index in range(config.num_heads):
            parts: list[nn.Module] = [
                ResidualBlock(config.hidden_size) for _ in range(config.num_blocks)
            ]
            if config.own_heads:
                parts.append(nn.Linear(config.hidden_size, config.vocab_size, bias=False))
            self.heads.append(nn.Sequential(*parts))
            self.add_module(str(index), self.heads[-1])

    def states(
        self, hidden: Float[Tensor, "rows width"], num_heads: int | None = None
    ) -> list[Float[Tensor, "rows width"]]:
        """Return the input of every head's output matrix.

        Args:
            hidden: the target's states after its final norm.
            num_heads: the first so many; None: all.
        """
        return [head[: self.config.num_blocks](hidden) for head in self.heads[:num_heads]]

    def forward(
        self,
        hidden: Float[Tensor, "rows width"],
        shared: SharedHead | None = None,
        num_heads: int | None = None,
    ) -> Float[Tensor, "heads rows vocab"]:
        """Return the logits of every head.

        Args:
            hidden: the target's states after its final norm.
            shared: the target's output head; needed unless heads have their own.
            num_heads: the first so many; None: all.
        """
        states = self.states(hidden, num_heads)
        if not self.config.own_heads:
            assert shared is not None
            return shared(torch.cat(states)).view(len(states), len(hidden), -1)
        return torch.stack(
            [head[-1](state) for head, state in zip(self.heads, states, strict=False)]
        )
