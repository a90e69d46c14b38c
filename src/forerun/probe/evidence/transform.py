"""The randomised probability integral transform: a token's law right, its number is uniform."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.noise import position_key, request_key, uniform

__all__ = ["Transform"]


class Transform:
    """Numbers for tokens: the mass of all that come before, and a random share of their own.

    Tokens may come in any order that was fixed before the token was drawn; the order decides which
    errors of a law show.

    Args:
        seed: of the random shares, which are independent of any noise an engine draws with.
    """

    def __init__(self, seed: int) -> None:
        self._key = request_key(~seed, 0)
        self._num_drawn = 0

    def values(
        self,
        laws: Float[Tensor, "rows vocab"],
        tokens: Int64[Tensor, " rows"],
        order: Float[Tensor, "rows vocab"],
    ) -> list[float]:
        """One number in [0, 1] per row whose law is one.

        Args:
            laws: the tokens should have been drawn from.
            tokens: that were drawn.
            order: tokens of lower values come first, equal ones together.
        """
        keys = [position_key(self._key, self._num_drawn + row) for row in range(len(tokens))]
        self._num_drawn += len(tokens)
        shares = uniform(torch.tensor(keys, dtype=torch.int64, device=laws.device))
        probs = laws.double()
        own = order.gather(-1, tokens[:, None])
        before = (probs * (order < own)).sum(-1)
        level = (probs * (order == own)).sum(-1)
        numbers = (before + shares * level) / probs.sum(-1)
        return [min(1.0, max(0.0, value)) for value in numbers.tolist() if value == value]
