"""The drafts that `draft="auto"` stands for: found for a target, with nothing loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from forerun.drafters.registry import find_checkpoint
from forerun.drafters.vocabulary_map import map_vocabularies
from forerun.engine.config import EngineConfig
from forerun.engine.loading import Source
from forerun.errors import ForerunError, InvalidRequest
from forerun.models.architecture import SUPPORTED
from forerun.models.catalog import PREFIX, ZOO_DRAFTS
from forerun.models.checkpoint import Checkpoint, read_checkpoint, read_object
from forerun.models.load import (
    choose_device,
    choose_dtype,
    load_tokenizer,
    model_folder,
    read_config,
)
from forerun.models.memory import available_bytes, estimate, geometry_of, readable
from forerun.models.mtp_layout import find_module
from forerun.models.tokenizers import compare_vocabularies

logger = logging.getLogger("forerun.loading")

AUTO = "auto"
MTP = "mtp"
COPIER = "suffix"
"""Drafts by copying, which takes next to no time beside a pass of a model."""
MOST_SHARE = 0.25
"""Largest share of the target's parameters that a draft from the cache may have."""
USUAL_SHARE = 0.06
"""Share of the target's parameters that fast drafts have; the nearest to it are tried first."""
MOST_READ = 12
"""Models of the cache whose tokenizers are read at most."""


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
def auto_drafts(target: str, device: str = AUTO) -> tuple[str, ...]:
    """Return the drafts that are tried for a target where none is named.

    These are the shipped draft of a shipped target, or the best draft model in the local Hugging
    Face cache that fits into the memory of the target's device beside it, with the KV of the
    default batch and context, unless the target brings a multi-token-prediction module, which comes
    first; and the drafter that copies from the text. No model is fetched or
    loaded.

    Raises:
        InvalidModel: there is no such target.
    """
    if target.startswith(PREFIX):
        return (ZOO_DRAFTS[target], COPIER) if target in ZOO_DRAFTS else (COPIER,)
    if find_module(read_checkpoint(model_folder(target))) is not None:
        logger.info("the draft is the MTP module of %s", target)
        return (f"{MTP}:{target}", COPIER)
    found = next(fitting_models(target, device), None)
    if found is None:
        logger.info("the local Hugging Face cache has no draft model for %s", target)
        return (COPIER,)
    logger.info("the draft is %s of the local Hugging Face cache", found.name)
    return (str(found.folder), COPIER)


def with_auto(drafts: Sequence[Source], target: object, device: str) -> list[Source]:
    """Return the drafts with what "auto" stands for, and the target's folder for "mtp"."""
    if isinstance(target, str | Path):
        drafts = [f"{MTP}:{target}" if draft == MTP else draft for draft in drafts]
    if AUTO not in drafts:
        return [*drafts]
    if not isinstance(target, str | Path):
        raise InvalidRequest(
            'draft="auto" needs a target by its folder or name; name a draft for a loaded model'
        )
    found: list[Source] = []
    for draft in drafts:
        each = auto_drafts(str(target), device) if draft == AUTO else (draft,)
        found += [name for name in each if name not in found]
    return found


def fitting_models(target: str, device: str = AUTO) -> Iterator[CachedModel]:
    """Yield the models of the local Hugging Face cache that can draft for a target, the best first.

    Models with the target's tokenizer come before others, and those of a usual size before others.
    """
    own = read_checkpoint(model_folder(target))
    tokenizer = load_tokenizer(target)
    room = available_bytes(choose_device(device)) - _needed_bytes(own)
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
            needed = _needed_bytes(checkpoint)
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


def _needed_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes that a model takes with the KV of the default batch and context."""
    config = EngineConfig()
    _, architecture = read_config(checkpoint)
    geometry = geometry_of(
        architecture,
        num_slots=config.num_slots,
        capacity=min(config.max_context, architecture.max_positions),
        max_staged_rows=config.max_nodes + 1,
        dtype=choose_dtype(AUTO, checkpoint),
    )
    return estimate(checkpoint.num_parameters, architecture, geometry).total_bytes


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
            names = config.get("architectures") or []
            if find_checkpoint(config) is None and any(name in SUPPORTED for name in names):
                yield repository.repo_id, read_checkpoint(folder)
        except (ForerunError, OSError) as error:
            logger.debug("%s of the local Hugging Face cache is left out: %s", folder, error)
