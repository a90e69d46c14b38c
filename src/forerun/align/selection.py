"""Judgements of a draft during training, and the choice of the draft that is kept."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass

from forerun.align.workspace import Workspace, read_lines, write_lines
from forerun.atomic_write import atomic_folder
from forerun.measure.judge import DraftFigures, Judge


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Figures of the draft after some optimiser steps.

    Attributes:
        acceptance_probability: alpha; None for drafters without a model.
        predicted_speedup: at the best K that drafts, below 1 where none pays; None without costs.
    """

    step: int
    acceptance_length: float
    acceptance_probability: float | None
    predicted_speedup: float | None
    duration_s: float

    @property
    def worth(self) -> tuple[float, float]:
        """The sort key that ranks drafts: predicted speedup, then tau."""
        return self.predicted_speedup or 0.0, self.acceptance_length


class DraftSelector:
    """Stores every judgement, and the best draft in `Workspace.draft`."""

    def __init__(self, workspace: Workspace, judge: Judge, max_prompts: int) -> None:
        self.workspace = workspace
        self.judge = judge
        self.max_prompts = max_prompts
        self.judgements = {
            judgement.step: judgement for judgement in read_lines(workspace.judgements, Judgement)
        }

    @property
    def best(self) -> Judgement:
        """The figures of the best draft so far, the earliest of equally good ones."""
        return max(self.judgements.values(), key=lambda judgement: judgement.worth)

    @property
    def latest(self) -> Judgement:
        return self.judgements[max(self.judgements)]

    def consider(self, step: int) -> Judgement:
        """Judge the snapshot of a step, and keep its draft if it is the best so far."""
        snapshot = self.workspace.snapshot(step)
        if step not in self.judgements:
            started_s = time.monotonic()
            figures = self.judge.judge(snapshot, name=f"step {step}", max_prompts=self.max_prompts)
            self.judgements[step] = build_judgement(step, figures, time.monotonic() - started_s)
            write_lines(self.workspace.judgements, self.judgements.values())
        if self.best.step == step:
            with atomic_folder(self.workspace.draft) as scratch:
                shutil.copytree(snapshot, scratch, dirs_exist_ok=True)
        return self.judgements[step]


def build_judgement(step: int, figures: DraftFigures, duration_s: float) -> Judgement:
    overall = figures.overall
    tau, alpha = overall.acceptance_length, overall.acceptance_probability
    speedup = overall.speedup
    return Judgement(
        step=step,
        acceptance_length=1.0 if tau is None else tau.estimate,
        acceptance_probability=None if alpha is None else alpha.estimate,
        predicted_speedup=None if speedup is None else speedup.best_drafting,
        duration_s=duration_s,
    )
