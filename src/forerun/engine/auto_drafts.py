"""The drafts that `draft="auto"` stands for: found for a target, with nothing loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from forerun.drafters.config import AUTO
from forerun.drafters.registry import find_checkpoint
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.config import EngineConfig
from forerun.engine.loading import Source
from forerun.errors import ForerunError, InvalidRequest
from forerun.models.architecture import SUPPORTED, Runner, WeightFormat
from forerun.models.catalog import PREFIX, ZOO_DRAFTS
from forerun.models.checkpoint import Checkpoint, read_checkpoint, read_named, read_object
from forerun.models.decoder import unsupported
from forerun.models.load import (
    ModelFiles,
    choose_device,
    load_tokenizer,
    model_files,
    model_folder,
)
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


@cache
def auto_drafts(
    target: str,
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
    files = _files(read_checkpoint(model_folder(target)), device, dtype, weights)
    room = available_bytes(files.device) - files.memory.total_bytes
    found: tuple[str, ...] = ()
    if target.startswith(PREFIX):
        found = (ZOO_DRAFTS[target],) if target in ZOO_DRAFTS else ()
    elif find_module(files.checkpoint) is not None:
        logger.info("the draft is the MTP module of %s", target)
        found = (f"{MTP}:{target}",)
    elif (best := next(fitting_models(target, device), None)) is not None:
        logger.info("the draft is %s of the local Hugging Face cache", best.name)
        found = (str(best.folder),)
        room -= best.needed_bytes
    else:
        logger.info("the local Hugging Face cache has no draft model for %s", target)
    if _copy_bytes(files, runner, room):
        found += (IN_FEWER_BITS,)
    return (*found, COPIER)


def _copy_bytes(files: ModelFiles, runner: Runner, room: int) -> int:
    """Return the bytes of a target's copy in 4 bits if it may pay and fits, else 0."""
    if files.device.type != "cpu" or runner not in ("auto", "native"):
        return 0
    num_parameters, dtype = files.checkpoint.num_parameters, files.geometry.dtype
    read_bytes, whole_bytes = files.memory.weights_bytes, num_parameters * dtype.itemsize
    if dtype == torch.float16 or read_bytes < max(LEAST_READ_BYTES, LEAST_SHARE * whole_bytes):
        return 0
    if unsupported(files.architecture, files.settings) is not None:
        return 0
    is_tied = bool(files.settings.get("tie_word_embeddings"))
    copied = weights_bytes(num_parameters, files.architecture, dtype, "int4", is_tied=is_tied)
    if copied > room:
        logger.info("a copy of the target in 4 bits needs %s: too much", readable(copied))
    return copied if copied <= room else 0


def with_auto(
    drafts: Sequence[Source], target: object, device: str, dtype: str, config: EngineConfig
) -> tuple[list[Source], list[Source]]:
    """Replace "auto" by the drafts that it stands for, and "mtp" by "mtp:TARGET".

    Returns the drafts, and those of them that "auto" stands for.
    """
    if isinstance(target, str | Path):
        drafts = [f"{MTP}:{target}" if draft == MTP else draft for draft in drafts]
    if AUTO not in drafts:
        return [*drafts], []
    if not isinstance(target, str | Path):
        raise InvalidRequest(
            'draft="auto" needs a target by its folder or name; name a draft for a loaded model'
        )
    names = auto_drafts(str(target), device, config.runner, dtype, config.weights)
    at = drafts.index(AUTO)
    others = [draft for draft in drafts if draft != AUTO]
    found: list[Source] = [name for name in names if name not in others]
    return [*others[:at], *found, *others[at:]], found


def fitting_models(target: str, device: str = AUTO) -> Iterator[CachedModel]:
    """Yield the models of the local Hugging Face cache that can draft for a target, the best first.

    Models with the target's tokenizer come before others, and those of a usual size before others.
    """
    own = read_checkpoint(model_folder(target))
    tokenizer = load_tokenizer(target)
    room = available_bytes(choose_device(device)) - _files(own, device).memory.total_bytes
    usual = math.log(USUAL_SHARE * own.num_parameters)
    models = [
        (name, checkpoint)
        for name, checkpoint in _cached_models()
        if checkpoint.num_parameters <= MOST_SHARE * own.num_parameters
    ]
    models.sort(key=lambda model: abs(math.log(model[1].num_parameters) - usual))
    found: list[CachedModel] = []
    for name, checkpoint in models[:MOST_READ]:
        try:
            needed = _files(checkpoint, device).memory.total_bytes
            draft = load_tokenizer(checkpoint.folder)
            is_foreign = not compare_vocabularies(tokenizer, draft).identical
            if is_foreign:
                map_vocabularies(tokenizer, draft)  # refuses tokenizers that cannot be matched
        except (ForerunError, OSError) as error:
            logger.info("%s of the local Hugging Face cache cannot draft: %s", name, error)
            continue
        if needed > room:
            logger.info("%s needs %s beside the target: too much", name, readable(needed))
            continue
        found.append(
            CachedModel(
                name=name,
                folder=checkpoint.folder,
                num_parameters=checkpoint.num_parameters,
                needed_bytes=needed,
                is_foreign=is_foreign,
            )
        )
    yield from sorted(found, key=lambda model: model.is_foreign)


def _files(
    checkpoint: Checkpoint,
    device: str,
    dtype: str = AUTO,
    weights: WeightFormat = "auto",
    config: EngineConfig = DEFAULT,
) -> ModelFiles:
    """Describe a model with the KV of a batch and a context."""
    return model_files(
        checkpoint,
        dtype=dtype,
        device=device,
        max_batch=config.num_slots,
        max_context=config.max_context,
        max_staged_rows=config.max_nodes + 1,
        weights=weights,
    )


def _cached_models() -> Iterator[tuple[str, Checkpoint]]:
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
            config = read_object(folder / "config.json")
            if find_checkpoint(config) is None and read_named(folder)[1] in SUPPORTED:
                yield repository.repo_id, read_checkpoint(folder)
        except (ForerunError, OSError) as error:
            logger.debug("%s of the local Hugging Face cache is left out: %s", folder, error)
