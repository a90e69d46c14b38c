"""What a step is worth: who may draft in it, what it takes, what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from forerun.control.beliefs import AcceptanceCurve
from forerun.control.step_times import StepTimes

__all__ = ["Allocation", "Pricing", "RequestCandidate"]


class RequestCandidate(NamedTuple):
    """One request that may draft.

    Attributes:
        method: its drafter.
        curve: what drafting deeper brings.
        limit_s: seconds per token it should stay below, None without a wish.
        was: K of its last step.
    """

    method: str
    curve: AcceptanceCurve
    limit_s: float | None = None
    was: int = 0


class Allocation(NamedTuple):
    """K per request, and what is expected of it.

    Attributes:
        depths: K, in the order of the candidates.
        tokens: expected to be emitted in the step, over all requests.
        step_s: what it is expected to take.
        lateness: largest expected time per token over what a request wishes; 0 without wishes.
    """

    depths: tuple[int, ...]
    tokens: float
    step_s: float
    lateness: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """What is maximised."""
        return self.tokens / self.step_s


class Pricing(NamedTuple):
    """What steps of this batch take.

    Attributes:
        times: by method.
        plain_factor: by which expected times of plain steps are multiplied.
        factor: the same of target passes over drafted nodes.
        draft_factors: the same of all else in a speculative step, by method; 1 where there is none.
        catch_up: drafted levels that a request costs on top which did not draft in its last step.
    """

    times: dict[str, StepTimes]
    plain_factor: float = 1.0
    factor: float = 1.0
    draft_factors: Mapping[str, float] = MappingProxyType({})
    catch_up: float = 0.0
