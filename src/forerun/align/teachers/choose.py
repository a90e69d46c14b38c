"""Builds the teacher that the settings select."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.align.config import TeacherConfig, TeacherKind
from forerun.align.data.sample import Sample
from forerun.align.progress import OnProgress
from forerun.align.teachers.base import ALONE, ProcessShare, RowSizes, Teacher, allowed_bytes
from forerun.align.teachers.cache import CacheFiller, CacheIdentity, RowCache
from forerun.align.teachers.hidden import (
    CachedFeatures,
    HiddenTeacher,
    ModelTeacher,
    OnlineFeatures,
)
from forerun.align.teachers.sampled import SampledTeacher, TopKTeacher
from forerun.align.teachers.target import TargetModel, load_sharded, load_target
from forerun.models.checkpoint import read_checkpoint, template_hash, tokenizer_hash
from forerun.models.load import choose_device, choose_dtype, model_folder, read_config
from forerun.sampling.config import SamplingParams

logger = logging.getLogger("forerun.preparation")

SHARDED = "sharded"
"""As a device: the target is spread over all GPUs there are, for it is larger than one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSource:
    """The target, its deployment settings, and the devices and folder available to a teacher.

    Attributes:
        target: folder, name or shipped model.
        device: as for the engine, or "sharded" to spread the target over all GPUs.
        on_progress: called while a cache is filled.
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
    """Build the teacher; "auto" selects the cheapest exact teacher whose cache fits the disk.

    A greedy distribution is one id, which is cached; else last hidden states are cached if they fit
    the disk, and where they do not the target is rerun.
    """
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
    logger.warning("hidden states would not fit %s: the target is rerun instead", source.cache_dir)
    return "model"


def _sampled_teacher(config: TeacherConfig, source: TeacherSource) -> SampledTeacher:
    """Build the teacher over cached token ids."""
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
    config: TeacherConfig,
    layers: tuple[int, ...],
    source: TeacherSource,
    samples: Sequence[Sample],
) -> OnlineFeatures | CachedFeatures:
    """Build the teacher of a head that reads the target's features.

    A head learns the distribution at the deployed temperature, and at 1 where that is 0: it tells
    more than the one most likely token.
    """
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
