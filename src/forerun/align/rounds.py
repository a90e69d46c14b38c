"""A round of training: its texts and its teacher, and the judgement of the draft after it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from accelerate import Accelerator

from forerun.align.config import AlignConfig, TeacherConfig, TeacherKind
from forerun.align.samples import Packing, Sample
from forerun.align.teachers import (
    ALONE,
    CachedFeatures,
    CacheFiller,
    CacheIdentity,
    HiddenTeacher,
    ModelTeacher,
    OnlineFeatures,
    ProcessShare,
    RowCache,
    RowSizes,
    SampledTeacher,
    TargetModel,
    Teacher,
    TopKTeacher,
    allowed_bytes,
    load_sharded,
    load_target,
)
from forerun.align.texts import TrainingTexts
from forerun.align.trainer import from_main
from forerun.align.workspace import (
    HASHES,
    OnProgress,
    Phases,
    Workspace,
    check_hashes,
    read_lines,
    write_lines,
)
from forerun.atomic_write import atomic_folder
from forerun.measure.judge import DraftFigures, Judge
from forerun.models.checkpoint import read_checkpoint, template_hash, tokenizer_hash
from forerun.models.load import choose_device, choose_dtype, model_folder, read_config
from forerun.sampling.config import SamplingParams

preparation = logging.getLogger("forerun.preparation")

SHARDED = "sharded"
"""As a device: the target is spread over all GPUs there are, for it is larger than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """The target, its deployment settings, and the devices and folder available to a teacher.

    Attributes:
        share: this process's part of filling it. With several processes all must then prepare the
            teacher together; or one fills it first, alone, and the others find it filled.
    """

    target: str | Path
    target_hash: str
    sampling: SamplingParams
    cache_dir: Path
    device: str = "auto"
    dtype: str = "auto"
    on_progress: OnProgress = lambda num_done, num_all: None
    share: ProcessShare = ALONE


def make_teacher(config: TeacherConfig, source: TeacherSource, num_rows: int) -> Teacher:
    """Build the teacher; "auto" selects the cheapest exact teacher whose cache fits the disk."""
    kind = config.teacher
    if kind == "auto":
        kind = cheapest(config, source, num_rows)
    if kind == "model":
        return ModelTeacher(load(source), source.sampling)
    if kind == "hidden":
        settings = {"dtype": str(_state_dtype(source))}
        filler = _filler_of("hidden", settings, _state_sizes(source), config, source)
        return HiddenTeacher(filler=filler, sampling=source.sampling, device=_probs_device(source))
    if kind == "top-k":
        return TopKTeacher(sampling=source.sampling, device=_probs_device(source))
    return _sampled_teacher(config, source)


def cheapest(config: TeacherConfig, source: TeacherSource, num_rows: int) -> TeacherKind:
    """Choose for "auto": ids if greedy, else hidden states if they fit, else the target."""
    if source.sampling.greedy:
        return "sampled"
    sizes = _state_sizes(source)
    allowed = allowed_bytes(source.cache_dir, config.max_cache_bytes)
    if sizes.total_bytes(num_rows) <= allowed:
        return "hidden"
    preparation.warning(
        "hidden states would not fit %s: the target is rerun instead", source.cache_dir
    )
    return "model"


def _sampled_teacher(config: TeacherConfig, source: TeacherSource) -> SampledTeacher:
    sampling = source.sampling
    num_ids = 1 if sampling.greedy else config.num_sampled_ids
    settings = {
        "num_ids": num_ids,
        "temperature": sampling.temperature,
        "min_p": sampling.min_p,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }
    filler = _filler_of("sampled", settings, RowSizes.of_ids(num_ids), config, source)
    return SampledTeacher(
        filler=filler, sampling=sampling, num_ids=num_ids, device=_probs_device(source)
    )


def feature_teacher(
    config: TeacherConfig, layers: tuple[int, ...], source: TeacherSource, samples: Sequence[Sample]
) -> OnlineFeatures | CachedFeatures:
    """Build the teacher of a head that reads the target's features."""
    if source.sampling.greedy:
        source = replace(source, sampling=replace(source.sampling, temperature=1.0))
    sizes = _state_sizes(source, len(layers))
    fits = sizes.total_bytes(sum(len(sample.token_ids) for sample in samples)) <= allowed_bytes(
        source.cache_dir, config.max_cache_bytes
    )
    if config.teacher == "model" or (config.teacher == "auto" and not fits):
        return OnlineFeatures(load(source), layers, source.sampling)
    settings = {"dtype": str(_state_dtype(source)), "layers": ",".join(map(str, layers))}
    return CachedFeatures(
        filler=_filler_of("features", settings, sizes, config, source),
        layers=layers,
        sampling=source.sampling,
        device=_probs_device(source),
    )


def _filler_of(
    kind: str,
    settings: Mapping[str, str | int | float],
    sizes: RowSizes,
    config: TeacherConfig,
    source: TeacherSource,
) -> CacheFiller:
    """Build the object that fills the target's cache under these settings."""
    checkpoint = read_checkpoint(model_folder(source.target))
    identity = CacheIdentity(
        kind=kind,
        target_hash=source.target_hash,
        tokenizer_hash=tokenizer_hash(checkpoint.folder),
        template_hash=template_hash(checkpoint.folder),
        settings=settings,
    )
    return CacheFiller(
        cache=RowCache(source.cache_dir, identity),
        load=lambda: load(source),
        sizes=sizes,
        max_bytes=config.max_cache_bytes,
        on_progress=source.on_progress,
        share=source.share,
    )


def load(source: TeacherSource) -> TargetModel:
    if source.device != SHARDED:
        return load_target(source.target, dtype=source.dtype, device=source.device)
    return load_sharded(source.target, dtype=source.dtype, device="auto", share=source.share)


def _state_sizes(source: TeacherSource, num_layers: int = 0) -> RowSizes:
    """Return the disk space of hidden states, and of features of some layers of this target."""
    settings, architecture = read_config(read_checkpoint(model_folder(source.target)))
    projected = None if num_layers else settings.get("word_embed_proj_dim")
    return RowSizes.of_states(
        width=projected or architecture.hidden_size,
        vocab_size=architecture.vocab_size,
        itemsize=_state_dtype(source).itemsize,
        num_layers=num_layers,
    )


def _state_dtype(source: TeacherSource) -> torch.dtype:
    return choose_dtype(source.dtype, read_checkpoint(model_folder(source.target)))


def _probs_device(source: TeacherSource) -> torch.device:
    return choose_device("auto" if source.device == SHARDED else source.device)


logger = logging.getLogger("forerun.align")


@dataclass(eq=False)
class RoundData:
    """Provides the texts and the teacher of each training round."""

    config: AlignConfig
    accelerator: Accelerator
    workspace: Workspace
    phases: Phases
    texts: TrainingTexts
    feature_layers: tuple[int, ...] = field(init=False, default=())

    @property
    def changes(self) -> bool:
        """Whether the texts differ by round, because the draft writes some of them."""
        return "draft" in self.texts.shares

    @cached_property
    def steady(self) -> list[Sample]:
        def make() -> list[Sample]:
            with self.phases.bar("responses", "responses") as on_progress:
                return self.texts.steady(on_progress)

        return from_main(self.accelerator, make)

    def packing(self, start: int, number: int, num_rounds: int) -> Packing:
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
        config = self.config
        if not config.needs_teacher:
            return None
        with self.phases.bar("teacher", "the target's distributions") as on_progress:
            source = self._source(on_progress)
            teacher = (
                feature_teacher(config.teacher, self.feature_layers, source, packing.samples)
                if config.is_attached
                else make_teacher(config.teacher, source, packing.num_learned)
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
            self._keep(judgement_of(step, figures, time.monotonic() - started_s))
        if self.best.step == step:
            check_hashes(snapshot)
            with atomic_folder(self.workspace.draft) as scratch:
                ignored = shutil.ignore_patterns(HASHES)
                shutil.copytree(snapshot, scratch, ignore=ignored, dirs_exist_ok=True)
        return self.judgements[step]

    def _keep(self, judgement: Judgement) -> None:
        self.judgements[judgement.step] = judgement
        write_lines(self.workspace.judgements, self.judgements.values())


def judgement_of(step: int, figures: DraftFigures, duration_s: float) -> Judgement:
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
