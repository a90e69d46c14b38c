"""The drafts that `draft="auto"` stands for: found for a target, with nothing loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from forerun.drafters.config import AUTO
from forerun.drafters.registry import find_checkpoint
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.config import EngineConfig
from forerun.engine.loading import Source
from forerun.errors import ForerunError
from forerun.models.architecture import Runner, WeightFormat
from forerun.models.catalog import PREFIX, ZOO_DRAFTS
from forerun.models.checkpoint import ModelFiles
from forerun.models.decoder import unsupported
from forerun.models.load import ModelRun, choose_device, describe_run
from forerun.models.memory import available_bytes, readable, weights_bytes
from forerun.models.mtp_layout import find_module
from forerun.models.tokenizers import compare_vocabularies

logger = logging.getLogger("forerun.loading")

MTP = "mtp"
COPIER = "suffix"
"""The drafter that copies from the text, at almost no cost."""
IN_FEWER_BITS = "self:int4"
"""The draft with the target's own weights in 4 bits."""
LEAST_READ_BYTES = 1 << 26
"""Least bytes of weights for `self:int4`; smaller ones stay in a cache, where bits cost little."""
LEAST_SHARE = 0.9
"""Share of the bytes of unquantised weights; a target that reads less is quantised already."""
MOST_SHARE = 0.25
"""Largest share of the target's parameters that a draft from the cache may have."""
USUAL_SHARE = 0.06
"""Share of the target's parameters that fast drafts have; the nearest to it are tried first."""
MOST_READ = 12
"""Most models of the cache whose tokenizers are read."""


DEFAULT = EngineConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedModel:
    """A draft model found in the local Hugging Face cache.

    Attributes:
        is_foreign: whether its tokenizer is another than the target's.
    """

    name: str
    folder: Path
    num_parameters: int
    needed_bytes: int
    is_foreign: bool


def auto_drafts(
    target: str | Path | ModelFiles,
    device: str = AUTO,
    runner: Runner = "auto",
    dtype: str = AUTO,
    weights: WeightFormat = "auto",
) -> tuple[str, ...]:
    """Return the names of the drafts that "auto" stands for with this target.

    These are, in this order: the shipped draft of a shipped target, the multi-token-prediction
    module in a target's checkpoint, or the best draft model in the local Hugging Face cache that
    fits into memory beside the target, with the KV of the default batch and context; the target's
    own weights in 4 bits, if the target is large enough for that to pay and there is memory for
    them; and the drafter that copies from the text. No model is fetched or loaded.

    Args:
        device, runner, dtype, weights: how the target is to run, as for `load_model`.

    Raises:
        InvalidModel: there is no such target.
    """
    files = ModelFiles.open(target)
    run = _describe_run(files, device, dtype, weights)
    room = available_bytes(run.device) - run.memory.total_bytes
    found: tuple[str, ...] = ()
    if files.name.startswith(PREFIX):
        found = (ZOO_DRAFTS[files.name],) if files.name in ZOO_DRAFTS else ()
    elif find_module(files) is not None:
        logger.info("the draft is the MTP module of %s", files.name)
        found = (f"{MTP}:{files.name}",)
    elif (best := next(fitting_models(files, device), None)) is not None:
        logger.info("the draft is %s of the local Hugging Face cache", best.name)
        found = (str(best.folder),)
        room -= best.needed_bytes
    else:
        logger.info("the local Hugging Face cache has no draft model for %s", files.name)
    if _copy_bytes(run, runner, room):
        found += (IN_FEWER_BITS,)
    return (*found, COPIER)


def _copy_bytes(run: ModelRun, runner: Runner, room: int) -> int:
    """Return the bytes of a target's copy in 4 bits if it may pay and fits, else 0."""
    if run.device.type != "cpu" or runner not in ("auto", "native"):
        return 0
    num_parameters, dtype = run.files.num_parameters, run.geometry.dtype
    read_bytes, whole_bytes = run.memory.weights_bytes, num_parameters * dtype.itemsize
    if dtype == torch.float16 or read_bytes < max(LEAST_READ_BYTES, LEAST_SHARE * whole_bytes):
        return 0
    if unsupported(run.architecture, run.files.settings) is not None:
        return 0
    copied = weights_bytes(num_parameters, run.architecture, dtype, "int4", is_tied=run.is_tied)
    if copied > room:
        logger.info("a copy of the target in 4 bits needs %s: too much", readable(copied))
    return copied if copied <= room else 0


def with_auto(
    drafts: Sequence[Source], target: Source, device: str, dtype: str, config: EngineConfig
) -> tuple[list[Source], list[Source]]:
    """Replace "auto" by the drafts that it stands for, and "mtp" by "mtp:TARGET".

    Returns the drafts, and those of them that "auto" stands for.
    """
    name = target.name if isinstance(target, ModelFiles) else target
    drafts = [f"{MTP}:{name}" if draft == MTP else draft for draft in drafts]
    if AUTO not in drafts:
        return [*drafts], []
    names = auto_drafts(target, device, config.runner, dtype, config.weights)
    at = drafts.index(AUTO)
    others = [draft for draft in drafts if draft != AUTO]
    found: list[Source] = [name for name in names if name not in others]
    return [*others[:at], *found, *others[at:]], found


def fitting_models(target: str | Path | ModelFiles, device: str = AUTO) -> Iterator[CachedModel]:
    """Yield the models of the local Hugging Face cache that can draft for a target, the best first.

    Models with the target's tokenizer come before others, and those of a usual size before others.
    """
    own = ModelFiles.open(target)
    room = available_bytes(choose_device(device)) - _describe_run(own, device).memory.total_bytes
    usual = math.log(USUAL_SHARE * own.num_parameters)
    models = [
        (name, files)
        for name, files in _cached_models()
        if files.num_parameters <= MOST_SHARE * own.num_parameters
    ]
    models.sort(key=lambda model: abs(math.log(model[1].num_parameters) - usual))
    found: list[CachedModel] = []
    for name, files in models[:MOST_READ]:
        try:
            needed = _describe_run(files, device).memory.total_bytes
            is_foreign = not compare_vocabularies(own.tokenizer, files.tokenizer).identical
            if is_foreign:
                map_vocabularies(
                    own.tokenizer, files.tokenizer
                )  # refuses tokenizers that cannot be matched
        except (ForerunError, OSError) as error:
            logger.info("%s of the local Hugging Face cache cannot draft: %s", name, error)
            continue
        if needed > room:
            logger.info("%s needs %s beside the target: too much", name, readable(needed))
            continue
        found.append(
            CachedModel(
                name=name,
                folder=files.folder,
                num_parameters=files.num_parameters,
                needed_bytes=needed,
                is_foreign=is_foreign,
            )
        )
    yield from sorted(found, key=lambda model: model.is_foreign)


def _describe_run(
    files: ModelFiles,
    device: str,
    dtype: str = AUTO,
    weights: WeightFormat = "auto",
    config: EngineConfig = DEFAULT,
) -> ModelRun:
    """Describe a model with the KV of a batch and a context."""
    return describe_run(
        files,
        dtype=dtype,
        device=device,
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
        weights=weights,
    )


def _cached_models() -> Iterator[tuple[str, ModelFiles]]:
    """Yield the supported language models of the local Hugging Face cache that are complete."""
    # Imported when needed: it costs a third of a second of every start.
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda repository: repository.repo_id):
        if repository.repo_type != "model" or not repository.revisions:
            continue
        newest = max(repository.revisions, key=lambda revision: revision.last_modified)
        folder = Path(newest.snapshot_path)
        try:
            files = ModelFiles.find(folder)
            if find_checkpoint(files.config) is None and not files.has_vision:
                yield repository.repo_id, ModelFiles.open(files)
        except (ForerunError, OSError) as error:
            logger.debug("%s of the local Hugging Face cache is left out: %s", folder, error)
