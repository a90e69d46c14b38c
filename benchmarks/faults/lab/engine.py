"""An engine for experiments: its verdicts can be replaced, its clock is the device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.scheduled import ScheduledSequence
from forerun.engine.step import Stepper
from forerun.engine.timing import StepClock
from forerun.models.base import LanguageModel, ModelOutput, RowBatch
from forerun.models.wrapped import WrappedModel
from forerun.sampling.proposal import Verdict
from forerun.theory.record import StepRecord
from lab.device import Device

__all__ = ["LabEngine", "VerdictChange"]

VerdictChange = Callable[[ScheduledSequence, Tensor], Verdict]
"""From a scheduled sequence with its verdict, and its logits, to the verdict that counts."""


class LastScores(WrappedModel):
    """A model that remembers the logits of its last pass."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__(model)
        self.logits: Tensor | None = None

    def forward(self, batch: RowBatch) -> ModelOutput:
        """One pass of the model."""
        scores = self.model.forward(batch)
        self.logits = scores.logits
        return scores


class LabStepper(Stepper):
    """A step whose verdicts a change_verdict looks over before they are committed.

    Args:
        change_verdict: says what counts; None leaves verdicts as they are.
        device: whose clock fills the records.
        target: of the engine.
        parts: of the step.
    """

    def __init__(
        self,
        *,
        change_verdict: VerdictChange | None,
        device: Device,
        target: LanguageModel,
        **parts: Any,
    ) -> None:
        self.last = LastScores(target)
        super().__init__(target=self.last, **parts)
        self.change_verdict = change_verdict
        self.device = device
        self._began = device.spent()

    def run(self) -> list[StepRecord]:
        """Advance every running sequence once."""
        self._began = self.device.spent()
        return super().run()

    def _decide(
        self,
        fed: Sequence[ScheduledSequence],
        emitting: Sequence[ScheduledSequence],
        clock: StepClock,
    ) -> None:
        super()._decide(fed, emitting, clock)
        if self.change_verdict is None:
            return
        row = 0
        for entry in emitting:
            assert self.last.logits is not None
            entry.verdict = self.change_verdict(
                entry, self.last.logits[row : row + entry.num_logit_rows]
            )
            row += entry.num_logit_rows

    def _records(
        self,
        emitting: Sequence[ScheduledSequence],
        fed: Sequence[ScheduledSequence],
        clock: StepClock,
    ) -> list[StepRecord]:
        spent = self.device.spent().since(self._began)
        return [
            replace(
                record,
                t_s=self._began.total_s,
                draft_s=spent.draft_s,
                verify_s=spent.target_s,
                other_s=spent.host_s,
            )
            for record in super()._records(emitting, fed, clock)
        ]


class LabEngine(Engine):
    """An engine with a change_verdict behind its verifiers and another clock.

    Args:
        change_verdict: None leaves the verdicts as they are.
        device: that the models run on.
        parts: of the engine.
    """

    def __init__(
        self, *, change_verdict: VerdictChange | None, device: Device, **parts: Any
    ) -> None:
        super().__init__(**parts)
        self._stepper = LabStepper(
            change_verdict=change_verdict,
            device=device,
            target=self._stepper.target,
            drafter=self._stepper.drafter,
            controller=self._stepper.controller,
            scheduler=self.scheduler,
            config=self.config,
        )
