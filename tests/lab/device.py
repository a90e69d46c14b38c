"""A device whose speed is ours to choose, and its clock.

On a CPU the shipped pair gains little: its weights stay in the cache, and every row is paid for. A
laboratory wants the opposite, a device bound by memory, on which speculation pays unless something
is wrong; and it wants the same figures on a busy machine as on an idle one. So passes are computed
as ever, but the clock is told how long they take on that device. What the engine does around them
is measured, in CPU time of its thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from jaxtyping import Int64
from torch import Tensor

from forerun.models.base import (
    LanguageModel,
    LikelyTree,
    ModelOutput,
    RowBatch,
    SampledTokens,
    WrappedModel,
)

__all__ = ["DRAFT_PACE", "TARGET_PACE", "Device", "Pace", "Spent", "on_device"]

Role = Literal["target", "draft"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Seconds of a pass: weights are read or rows computed, whichever takes longer; then caches.

    Attributes:
        pass_s: reading the weights once.
        free_rows: rows that are computed in that time.
        context_s: reading one token of a cache for one query row.
    """

    pass_s: float
    free_rows: float = 48.0
    context_s: float = 0.0

    def seconds(self, num_rows: int, num_pairs: int) -> float:
        """Of one pass.

        Args:
            num_rows: its rows.
            num_pairs: cached tokens read, summed over its rows.
        """
        return self.pass_s * max(1.0, num_rows / self.free_rows) + self.context_s * num_pairs

    def times(self, factor: float) -> Pace:
        """Slower by a factor."""
        return replace(self, pass_s=self.pass_s * factor, context_s=self.context_s * factor)


TARGET_PACE = Pace(pass_s=10e-3)
DRAFT_PACE = Pace(pass_s=5e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds, since the beginning or between two moments.

    Attributes:
        draft_s: passes of drafts, as long as the device takes them.
        target_s: passes of targets, likewise.
        host_s: everything else.
    """

    draft_s: float
    target_s: float
    host_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.draft_s + self.target_s + self.host_s

    def since(self, before: Spent) -> Spent:
        """What was spent after another moment."""
        return Spent(
            draft_s=self.draft_s - before.draft_s,
            target_s=self.target_s - before.target_s,
            host_s=self.host_s - before.host_s,
        )


@dataclass(slots=True)
class Device:
    """What models run on, and its clock.

    Attributes:
        pass_s: time of passes so far, by whose they are.
        hidden_s: CPU time that computing them took, which the clock does not count.
        waited_s: time spent waiting without computing.
    """

    pass_s: dict[Role, float] = field(default_factory=lambda: {"target": 0.0, "draft": 0.0})
    hidden_s: float = 0.0
    waited_s: float = 0.0

    def spent(self) -> Spent:
        """Up to now."""
        host_s = time.thread_time() - self.hidden_s + self.waited_s
        return Spent(draft_s=self.pass_s["draft"], target_s=self.pass_s["target"], host_s=host_s)


class DeviceModel(WrappedModel):
    """A LanguageModel on a device.

    Args:
        model: does the work.
        pace: of its passes.
        device: whose clock is told.
        role: target or draft.
    """

    def __init__(self, model: LanguageModel, pace: Pace, device: Device, role: Role) -> None:
        super().__init__(model)
        self.pace = pace
        self.runs_on = device
        self.role: Role = role

    def forward(self, batch: RowBatch) -> ModelOutput:
        """Run one pass; it counts as one on the device."""
        begun_s = time.thread_time()
        scores = self.model.forward(batch)
        self.end(begun_s, batch, 1)
        return scores

    def greedy_chain(
        self, batch: RowBatch, num_tokens: int, vocab_size: int
    ) -> Int64[Tensor, "sequences num_tokens"]:
        """Run a greedy chain; it counts as one pass per token."""
        begun_s = time.thread_time()
        tokens = self.model.greedy_chain(batch, num_tokens, vocab_size)
        self.end(begun_s, batch, num_tokens)
        return tokens

    def end(self, begun_s: float, batch: RowBatch, num_passes: int) -> None:
        """Notify the clock what the passes take on the device, and hide what they took here.

        Args:
            begun_s: CPU time of this thread when they began.
            batch: of the first pass.
            num_passes: it and those after it: of one row per sequence in chains, of the nodes that
                are read in trees.
        """
        self.runs_on.pass_s[self.role] += self._seconds(batch, num_passes)
        self.runs_on.hidden_s += time.thread_time() - begun_s

    def _seconds(self, batch: RowBatch, num_passes: int) -> float:
        # Prompts are read by a kernel that reads the cache once, whatever decoding does.
        num_pairs = sum(
            (span.num_rows if span.num_chain == 1 else 1) * (span.start + span.num_rows)
            for span in batch.spans
        )
        seconds = self.pace.seconds(len(batch.tokens), num_pairs)
        if num_passes > 1:
            later_pairs = sum(span.start + span.num_rows for span in batch.spans)
            seconds += (num_passes - 1) * self.pace.seconds(len(batch.spans), later_pairs)
        return seconds


class SampledDeviceModel(DeviceModel):
    """A DeviceModel over one that draws whole chains."""

    drafts_in_one_call = True

    def sampled_chain(self, batch: RowBatch, *asked: Any, **named: Any) -> SampledTokens:
        """Run a sampled chain; it counts as one pass per drawn token."""
        begun_s = time.thread_time()
        drawn = self.model.sampled_chain(batch, *asked, **named)
        self.end(begun_s, batch, len(drawn.tokens))
        return drawn

    def likely_trees(
        self, batch: RowBatch, shapes: Sequence[tuple[int, int, int]], *asked: Any
    ) -> list[LikelyTree]:
        """Grow trees; it counts as one pass per level."""
        begun_s = time.thread_time()
        trees = self.model.likely_trees(batch, shapes, *asked)
        self.end(begun_s, batch, max(depth for _, depth, _ in shapes))
        return trees


def on_device(model: LanguageModel, pace: Pace, device: Device, role: Role) -> LanguageModel:
    """The model on a device, with all that it can do."""
    kind = SampledDeviceModel if model.drafts_in_one_call else DeviceModel
    return kind(model, pace, device, role)
