"""A round of training: its texts and its teacher, and the judgement of the draft after it."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass, field
from functools import cached_property

from accelerate import Accelerator

from forerun.align.config import AlignConfig
from forerun.align.samples import Packing, Sample
from forerun.align.target import ProcessShare
from forerun.align.target_cache import TeacherSource
from forerun.align.teachers import Teacher, make_teacher
from forerun.align.texts import TrainingTexts
from forerun.align.trainer import from_main
from forerun.align.workspace import (
    HASHES,
    Phases,
    Workspace,
    check_hashes,
    read_lines,
    write_lines,
)
from forerun.atomic_write import atomic_folder
from forerun.measure.judge import DraftFigures, Judge
from forerun.models.base import LanguageModel


@dataclass(eq=False)
class RoundData:
    """Provides the texts and the teacher of each training round."""

    config: AlignConfig
    accelerator: Accelerator
    workspace: Workspace
    phases: Phases
    texts: TrainingTexts
    feature_layers: tuple[int, ...] = field(init=False, default=())

    @cached_property
    def steady(self) -> list[Sample]:
        def make() -> list[Sample]:
            with self.phases.bar("responses", "responses") as on_progress:
                return self.texts.steady(on_progress)

        return from_main(self.accelerator, make)

    def packing(self) -> Packing:
        samples = from_main(self.accelerator, lambda: self.texts.mixed(self.steady))
        training = self.config.training
        return Packing(samples, window=training.window, seed=training.training_seed)

    def teacher(self, packing: Packing) -> Teacher | None:
        """Return the teacher of a round, whose cache is filled by all processes together."""
        config = self.config
        if not config.needs_teacher:
            return None
        num_rows, layers = packing.num_learned, None
        if config.is_attached:
            num_rows = sum(len(sample.token_ids) for sample in packing.samples)
            layers = self.feature_layers
        with self.phases.bar("teacher", "the target's distributions") as on_progress:
            source = TeacherSource(
                target=config.target,
                target_hash=self.texts.target_hash,
                sampling=config.sampling,
                cache_dir=self.workspace.cache,
                device=config.teacher.teacher_device or config.device,
                dtype=config.dtype,
                runs=self._engine_model(),
                on_progress=on_progress,
                share=ProcessShare(
                    index=self.accelerator.process_index,
                    number=self.accelerator.num_processes,
                    wait=self.accelerator.wait_for_everyone,
                ),
            )
            teacher = make_teacher(config.teacher, source, num_rows, layers)
            teacher.prepare(packing.samples)
        return teacher

    def _engine_model(self) -> LanguageModel | None:
        """Return the target in the engine, unless the settings name another device for scoring."""
        engine = self.texts.target
        return None if engine is None or self.config.teacher.teacher_device else engine.target


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
            check_hashes(snapshot)
            started_s = time.monotonic()
            figures = self.judge.judge(snapshot, name=f"step {step}", max_prompts=self.max_prompts)
            self.judgements[step] = build_judgement(step, figures, time.monotonic() - started_s)
            write_lines(self.workspace.judgements, self.judgements.values())
        if self.best.step == step:
            check_hashes(snapshot)
            with atomic_folder(self.workspace.draft) as scratch:
                ignored = shutil.ignore_patterns(HASHES)
                shutil.copytree(snapshot, scratch, ignore=ignored, dirs_exist_ok=True)
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
