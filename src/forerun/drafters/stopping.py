"""Stop rules followed while chains are drafted level by level."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.drafters.branch import Branch
from forerun.sampling.choice import Choice

__all__ = ["Stopping"]


class Stopping:
    """What rules measure before each draw, and who has come to a node that is not to be drafted.

    Reading what was measured waits for the device once per level.

    Args:
        branches: all chains of a call.
        device: of the draft.

    Attributes:
        values: per branch, what its rule has measured so far; nothing without a rule.
    """

    def __init__(self, branches: Sequence[Branch], device: torch.device) -> None:
        self.rules = [branch.stop for branch in branches]
        self.values: list[list[float]] = [[] for _ in branches]
        self._stopped = [False] * len(branches)
        is_entropy = [rule is not None and rule.measure == "entropy" for rule in self.rules]
        is_greedy = [branch.choice is Choice.DETERMINISTIC for branch in branches]
        self._some_entropy, self._some_greedy = any(is_entropy), any(is_greedy)
        self._is_entropy = torch.tensor(is_entropy, device=device)
        self._is_greedy = torch.tensor(is_greedy, device=device)[:, None]

    def look(
        self, logits: Float[Tensor, "going vocab"], probs: Float[Tensor, "going vocab"]
    ) -> None:
        """Measure before the next draw of the first `going` branches."""
        for index, value in enumerate(self._measured(logits, probs)):
            rule = self.rules[index]
            if rule is None or self._stopped[index]:
                continue
            self.values[index].append(value)
            self._stopped[index] = len(self.values[index]) > 1 and rule.stops(value)

    def ended(self, num_going: int) -> bool:
        """Whether all of the first so many branches have stopped."""
        return all(self._stopped[:num_going])

    def _measured(self, logits: Tensor, probs: Tensor) -> list[float]:
        going = len(probs)
        if self._some_greedy:
            probs = torch.where(self._is_greedy[:going], logits.float().softmax(-1), probs)
        values = probs.amax(-1)
        if self._some_entropy:
            entropy = torch.special.entr(probs).sum(-1)
            values = torch.where(self._is_entropy[:going], entropy, values)
        measured: list[float] = values.tolist()
        return measured
