"""Texts and teachers of each training round, the same in every process."""

from __future__ import annotations

import logging
from functools import cached_property

from accelerate import Accelerator

from forerun.align.config import AlignConfig
from forerun.align.data.packing import Packing
from forerun.align.data.sample import Sample
from forerun.align.objectives.named import objective_of
from forerun.align.progress import OnProgress, Phases
from forerun.align.teachers.base import ProcessShare, Teacher
from forerun.align.teachers.choose import TeacherSource, feature_teacher, make_teacher
from forerun.align.texts import TrainingTexts
from forerun.align.training.processes import from_main
from forerun.align.workspace import Workspace, check_hashes

__all__ = ["RoundData"]

logger = logging.getLogger("forerun.align")


class RoundData:
    """Provides the texts and the teacher of each training round.

    Args:
        config: of the alignment.
        accelerator: the processes; the main one generates, and all fill caches together.
        workspace: of the alignment.
        phases: for progress.
        texts: that may be learned.

    Attributes:
        feature_layers: layers of the target that an attached head reads.
    """

    def __init__(
        self,
        config: AlignConfig,
        accelerator: Accelerator,
        workspace: Workspace,
        phases: Phases,
        texts: TrainingTexts,
    ) -> None:
        self.config = config
        self.accelerator = accelerator
        self.workspace = workspace
        self.phases = phases
        self.texts = texts
        self.feature_layers: tuple[int, ...] = ()

    @property
    def changes(self) -> bool:
        """Whether the texts differ by round, because the draft writes some of them."""
        return "draft" in self.texts.shares

    @cached_property
    def steady(self) -> list[Sample]:
        """Samples that do not depend on the draft and are the same in every round."""

        def make() -> list[Sample]:
            with self.phases.bar("responses", "responses") as on_progress:
                return self.texts.steady(on_progress)

        return from_main(self.accelerator, make)

    def packing(self, start: int, number: int, num_rounds: int) -> Packing:
        """Return the packed data of a round.

        Args:
            start: step at its beginning, whose draft writes texts if drafts do.
            number: of the round, from 0.
            num_rounds: of the training.
        """
        steady = self.steady

        def mixed() -> list[Sample]:
            own: list[Sample] = []
            if self.changes:
                with self.phases.bar("responses", "the draft's own") as on_progress:
                    snapshot = self.workspace.snapshot(start)
                    check_hashes(snapshot)
                    own = self.texts.of_draft(snapshot, number, num_rounds, on_progress)
            return self.texts.mixed([*steady, *own], seed=number)

        training = self.config.training
        samples = from_main(self.accelerator, mixed)
        return Packing(samples, window=training.window, seed=training.training_seed + number)

    def teacher(self, packing: Packing) -> Teacher | None:
        """Return the teacher of a round, whose cache is filled by all processes together."""
        config, objective = self.config, objective_of(self.config)
        if not objective.needs_teacher and not config.is_attached:
            return None
        with self.phases.bar("teacher", "the target's distributions") as on_progress:
            source = self._source(on_progress)
            teacher = (
                feature_teacher(config.teacher, self.feature_layers, source, packing.samples)
                if config.is_attached
                else make_teacher(config.teacher, objective, source, packing.num_learned)
            )
            teacher.prepare(packing.samples)
        if teacher.truncated and self.accelerator.is_main_process:
            logger.warning("the distributions are truncated to the tokens that the server named")
        return teacher

    def _source(self, on_progress: OnProgress) -> TeacherSource:
        config = self.config
        return TeacherSource(
            target=config.target,
            target_hash=self.texts.target_hash,
            sampling=config.sampling,
            cache_dir=self.workspace.cache,
            device=config.teacher.teacher_device or config.device,
            dtype=config.dtype,
            on_progress=on_progress,
            share=ProcessShare(
                index=self.accelerator.process_index,
                number=self.accelerator.num_processes,
                wait=self.accelerator.wait_for_everyone,
            ),
        )
