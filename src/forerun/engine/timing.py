"""Durations of the parts of a step, measured without waiting for the device."""

from __future__ import annotations

import time

import torch

__all__ = ["StepClock"]


class StepClock:
    """Seconds of drafting, of the target pass, and of everything else in one step.

    On the CPU these are clock readings. A CUDA device runs behind the host, so there the two passes
    are timed by events in its own stream; they are read once the step's tokens have been waited for
    anyway. Passes on other devices are timed until the host goes on, and what is still to be waited
    for then counts as "other".

    Args:
        device: of the target.
    """

    def __init__(self, device: torch.device) -> None:
        self.started_s = time.monotonic()
        self._is_cuda = device.type == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def mark(self) -> None:
        """Record the start or end of drafting or of the target pass; called four times a step."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no annotations here
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.monotonic())

    def durations(self) -> tuple[float, float, float]:
        """Seconds of drafting, of the target pass, and of the rest of the step up to now."""
        total_s = max(0.0, time.monotonic() - self.started_s)
        draft_s, verify_s = self._between(0), self._between(2)
        return draft_s, verify_s, max(0.0, total_s - draft_s - verify_s)

    def _between(self, first: int) -> float:
        start, end = self._marks[first : first + 2]
        if isinstance(start, float) and isinstance(end, float):
            return max(0.0, end - start)
        assert isinstance(start, torch.cuda.Event)
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1000
