"""An engine for experiments: its verdicts can be replaced, its clock is the device's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tests.lab.device import Device
from torch import Tensor

from forerun.engine.engine import Engine
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.step import StepClock, StepEvent
from forerun.engine.verification import verify
from forerun.sampling.proposal import Verdict

__all__ = ["VerdictChange", "lab_engine"]

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


def lab_engine(*, change_verdict: VerdictChange | None, device: Device, **parts: Any) -> Engine:
    """An engine whose verdicts may be changed before they are committed, with another clock.

    Args:
        change_verdict: returns the verdict that counts; None leaves verdicts as they are.
        device: that the models run on.
        parts: of the engine.
    """
    engine = Engine(**parts)
    engine.stepper.new_clock = lambda _: DeviceClock(device)
    if change_verdict is not None:
        change = change_verdict

        def changed(
            entries: Sequence[ScheduledSequence], logits: Tensor, tokens: Tensor
        ) -> list[Verdict]:
            row = 0
            for entry, verdict in zip(entries, verify(entries, logits, tokens), strict=True):
                entry.verdict = verdict
                entry.verdict = change(entry, logits[row : row + entry.num_logit_rows])
                row += entry.num_logit_rows
            return [entry.verdict for entry in entries if entry.verdict is not None]

        engine.stepper.verify = changed
    return engine
