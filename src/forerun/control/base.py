"""The controller's contract: from what is known before drafting to one plan per request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.theory.record import StepRecord
from forerun.theory.stop_rule import StopRule

__all__ = ["Capacity", "Controller", "Plan", "RequestState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one request does in one step.

    Attributes:
        method: name of the drafter, or "plain".
        num_speculative_tokens: K, most nodes to propose (0: plain decoding).
        stop: ends a draft before K where the drafter is unsure; None drafts all of K.
        probe: made to learn something, not because it is believed to be fastest.
        num_steps: steps a plain plan may be followed for without asking again, while all plans
            allow it and the requests stay the same; what came of the last of them is told.
    """

    method: str = "plain"
    num_speculative_tokens: int = 0
    stop: StopRule | None = None
    probe: bool = False
    num_steps: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestState:
    """What a controller may know of a request before its next step.

    Attributes:
        request_id: which request.
        num_committed: prompt and output tokens so far.
        max_new: tokens that may still be emitted (context and max_tokens considered).
        temperature: of the request.
        tags: free-form labels of the request.
        tpot_target_s: seconds per output token it wants to stay below; None: no such wish.
        time_left_s: seconds until its deadline, as the step begins; None without one.
    """

    request_id: str
    num_committed: int
    max_new: int
    temperature: float
    tags: tuple[str, ...] = ()
    tpot_target_s: float | None = None
    time_left_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine says beside the requests.

    Attributes:
        max_rows: rows the target pass may take in this step, over all requests.
        num_steps: this one and those before it that followed a plan that held for several.
    """

    max_rows: int
    num_steps: int = 1


@runtime_checkable
class Controller(Protocol):
    """Chooses plans. Pure with respect to clock and randomness: it sees only its arguments."""

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        """One plan per state, in order, for those requests that may draft in this step.

        The engine cuts plans to `max_new - 1` tokens and to its own K. Requests that prefill, or
        whose drafter has asked for a pause, are in the step without being asked about.
        """

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Outcomes of the step the last plans were for, and of the requests beside them.

        Of plans that are followed for several steps, those of the last.
        """
