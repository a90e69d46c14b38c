"""The contract of objectives: one loss per row from draft logits and the target's law."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int64
from torch import Tensor

from forerun.align.law import TargetLaw

__all__ = ["Objective"]


@runtime_checkable
class Objective(Protocol):
    """A loss per learned row, differentiable in the draft's logits."""

    @property
    def name(self) -> str:
        """As in `ObjectiveName`."""

    @property
    def linear(self) -> bool:
        """Whether it is linear in the target's law: ids drawn from it do as well, unbiased."""

    @property
    def needs_law(self) -> bool:
        """Whether it reads the target's law at all (CE reads labels alone)."""

    def losses(
        self,
        draft_logits: Float[Tensor, "rows vocab"],
        law: TargetLaw | None,
        labels: Int64[Tensor, " rows"],
    ) -> Float[Tensor, " rows"]:
        """Loss of every row, in nats or in probability.

        Args:
            draft_logits: already divided by the temperature the draft is deployed at.
            law: None where `needs_law` is False.
            labels: the tokens of the text, which CE alone reads.
        """
