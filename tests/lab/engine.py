"""An engine for experiments: its verdicts can be replaced, its clock is the device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.lab.device import Device
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.step import StepClock, StepEvent, Stepper
from forerun.sampling.proposal import Verdict

__all__ = ["LabStepper", "VerdictChange", "lab_engine"]

VerdictChange = Callable[[ScheduledSequence, Tensor], Verdict]
"""From a scheduled sequence with its verdict, and its logits, to the verdict that counts."""


class DeviceClock(StepClock):
    """The clock of a simulated device in place of the host's.

    Args:
        device: whose time is read.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(torch.device("cpu"))
        self.device = device
        self.began = device.spent()
        self.started_s = self.began.total_s

    def mark(self, moment: StepEvent) -> None:
        """Do nothing: the device itself tells passes of target and draft apart."""

    def durations(self) -> tuple[float, float, float]:
        """Seconds of drafting, of the target pass, and of the rest of the step up to now."""
        spent = self.device.spent().since(self.began)
        return spent.draft_s, spent.target_s, spent.host_s


class LabStepper(Stepper):
    """Steps of an engine whose verdicts may be changed before they are committed.

    Args:
        engine: whose steps these are from now on.
        change_verdict: returns the verdict that counts; None leaves verdicts as they are.
        device: whose clock is read; None reads the host's.
    """

    def __init__(
        self, engine: Engine, change_verdict: VerdictChange | None, device: Device | None = None
    ) -> None:
        super().__init__(
            target=engine.target,
            drafter=engine.stepper.drafter,
            controller=engine.controller,
            scheduler=engine.scheduler,
            config=engine.config,
            observers=engine.observers,
        )
        self.max_cycles = 1
        self.change_verdict = change_verdict
        self.device = device
        self._device_clock: StepClock | None = None

    def run(self) -> None:
        """Note the device's time and run the step."""
        self._device_clock = None if self.device is None else DeviceClock(self.device)
        super().run()

    def _keeps_logits(self) -> bool:
        return self.change_verdict is not None or super()._keeps_logits()

    def _commit(
        self,
        fed: Sequence[ScheduledSequence],
        emitting: Sequence[ScheduledSequence],
        clock: StepClock,
    ) -> None:
        if self.change_verdict is not None:
            for entry in emitting:
                assert entry.logits is not None
                entry.verdict = self.change_verdict(entry, entry.logits)
        super()._commit(fed, emitting, self._device_clock or clock)


def lab_engine(*, change_verdict: VerdictChange | None, device: Device, **parts: Any) -> Engine:
    """An engine whose verdicts may be changed before they are committed, with another clock.

    Args:
        change_verdict: returns the verdict that counts; None leaves verdicts as they are.
        device: that the models run on.
        parts: of the engine.
    """
    engine = Engine(**parts)
    engine.stepper = LabStepper(engine, change_verdict, device)
    return engine
