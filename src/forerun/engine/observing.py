"""Interface of observers, which receive every step of an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.engine.scheduler import ScheduledSequence
from forerun.theory.record import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObservedStep:
    """A finished step with committed tokens, which observers must not modify.

    Attributes:
        records: one per sequence that emitted tokens.
        emitting: the same sequences in the same order, with their plans, proposals and verdicts;
            with the logits of their rows where an observer wants them.
        prefilling: the other sequences of the pass, which fed a part of their prompt.
    """

    records: Sequence[StepRecord]
    emitting: Sequence[ScheduledSequence]
    prefilling: Sequence[ScheduledSequence]


@runtime_checkable
class StepObserver(Protocol):
    """Receives every step of an engine, on the thread that steps it; see `Engine.observers`.

    After an exception of an observer the tokens of the step are kept. If the observer is required,
    `Engine.step` raises it; any other observer is removed from the list, with one warning in the
    log, and the engine goes on without it.
    """

    @property
    def is_required(self) -> bool:
        """Whether results are wrong if the observer fails, as in a trace that lacks steps."""

    @property
    def wants_logits(self) -> bool:
        """Whether the logits of every emitting row must be kept until the observer has run.

        They take rows x vocabulary numbers of memory during the step.
        """

    def observe(self, step: ObservedStep) -> None:
        """Receive a step after its tokens were committed."""


class EmittedRecords:
    """Observer that passes single step records to a function.

    Example:
        records: list[StepRecord] = []
        engine.observers.append(EmittedRecords(records.append))
    """

    is_required = True
    wants_logits = False

    def __init__(self, receive: Callable[[StepRecord], object]) -> None:
        self.receive = receive

    def observe(self, step: ObservedStep) -> None:
        """Pass the step's records to the function."""
        for record in step.records:
            self.receive(record)
