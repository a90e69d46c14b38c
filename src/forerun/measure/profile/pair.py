"""Target and draft as loaded for measurements, and facts about both models."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from forerun.drafters.draft_model import DraftModel
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.registry import is_head
from forerun.engine.config import EngineConfig
from forerun.engine.loading import check_card, load_drafter, load_pair_member
from forerun.errors import InvalidRequest, NotEnoughMemory
from forerun.measure.profile.config import ProfileConfig
from forerun.measure.profile.profile import ProfileSetup
from forerun.measure.profile.rigs import MOST_STEPS
from forerun.models.base import LanguageModel, StoredModel
from forerun.models.checkpoint import read_checkpoint, read_object
from forerun.models.load import choose_dtype, model_folder, read_config
from forerun.models.tokenizers import Tokenizer
from forerun.provenance import content_hash, cpu_model, num_cores

logger = logging.getLogger("forerun.probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Name, hash, sizes and runner of one model.

    Attributes:
        dtype: of weights and logits.
        pass_bytes: weights read by a pass; of an embedding that is not also the head only rows are.
        kv_token_bytes: keys and values of one token.
    """

    name: str
    content_hash: str
    dtype: str
    pass_bytes: int
    kv_token_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedPair:
    """A loaded target with its draft.

    Attributes:
        drafter: the draft, a model or an EAGLE-3 head.
        engine: settings with room for every measurement.
    """

    target: LanguageModel
    drafter: DraftModel
    tokenizer: Tokenizer
    engine: EngineConfig

    @property
    def draft(self) -> LanguageModel:
        """The draft model."""
        return self.drafter.model


def load_pair(
    target: str, draft: str, *, dtype: str, device: str, engine: EngineConfig, config: ProfileConfig
) -> tuple[LoadedPair, ProfileConfig]:
    """Load target and draft, with KV stores large enough for all measurements.

    Returns:
        The pair, and the settings less the contexts it cannot hold and the batches whose KV does
        not fit into memory.

    Raises:
        InvalidModel: a model is missing, damaged or of an unsupported kind.
        InvalidRequest: no context fits, or the draft has no passes to measure.
        IncompatibleDraft: the tokenizers differ, or a head was trained for another target.
    """
    check_card(draft, target)
    config = held((target,) if is_head(model_folder(draft)) else (target, draft), config)
    batches = config.batches
    while True:
        room = with_room(engine, config)
        try:
            model, tokenizer = load_pair_member(
                target, dtype=dtype, device=device, config=room, weights=room.weights
            )
            drafter = load_drafter(draft, model, tokenizer, dtype=dtype, config=room)
            break
        except NotEnoughMemory:
            if len(config.batches) == 1:
                raise
            config = replace(config, batches=config.batches[:-1])
    if config.batches != batches:
        logger.warning("only batches up to %d fit into memory", config.batches[-1])
    if not isinstance(drafter, DraftModel):
        raise InvalidRequest(
            f"{draft} drafts without passes of a model of its own, so there is no profile of it; "
            f"measure it whole: forerun bench --arms {draft}@{engine.num_speculative_tokens}"
        )
    return LoadedPair(target=model, drafter=drafter, tokenizer=tokenizer, engine=room), config


def held(names: Sequence[str], config: ProfileConfig) -> ProfileConfig:
    """Return the settings without contexts and prompt sizes that exceed either model's context."""
    checkpoints = [read_checkpoint(model_folder(name)) for name in names]
    most = min(read_config(checkpoint)[1].max_positions for checkpoint in checkpoints)
    contexts = tuple(context for context in config.contexts if context + config.rows[-1] <= most)
    if not contexts:
        raise InvalidRequest(
            f"no context of {list(config.contexts)} tokens fits with {config.rows[-1]} rows behind "
            f"it: the pair holds {most} tokens; give shorter contexts or fewer rows"
        )
    read = tuple(size for size in config.read if contexts[0] + size <= most)
    return replace(config, contexts=contexts, read=read)


def with_room(engine: EngineConfig, config: ProfileConfig) -> EngineConfig:
    most_rows = max(engine.max_step_rows, config.batches[-1] * config.rows[-1])
    chunk = min(engine.prefill_chunk, most_rows // config.batches[-1])
    # Every step may accept everything, and the first prompt decodes while others are read.
    num_steps = MOST_STEPS + -(-config.contexts[0] // chunk)
    steps = config.contexts[0] + num_steps * (config.drafted[-1] + 1)
    text = config.contexts[0] + max(config.read, default=0)
    return replace(
        engine,
        num_speculative_tokens=config.rows[-1] - 1,
        max_batch=config.batches[-1],
        max_context=max(config.contexts[-1] + config.rows[-1], steps, text),
        max_step_rows=most_rows,
    )


def facts_of(
    name: str, model: LanguageModel, dtype: str, *, known_hash: str | None = None
) -> ModelFacts:
    """Read facts from a model's files; the weights are hashed unless their hash is known."""
    if is_eagle3(read_object(model_folder(name) / "config.json")):
        return _facts_of_head(name, model, known_hash or content_hash(name))
    checkpoint = read_checkpoint(model_folder(name))
    settings, architecture = read_config(checkpoint)
    chosen = choose_dtype(dtype, checkpoint)
    num_read = model.num_parameters
    if not settings["tie_word_embeddings"]:
        num_read -= model.vocab_size * architecture.hidden_size
    num_kv = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    return ModelFacts(
        name=name,
        content_hash=known_hash or content_hash(name),
        dtype=str(chosen).removeprefix("torch."),
        pass_bytes=num_read * chosen.itemsize,
        kv_token_bytes=num_kv * chosen.itemsize,
    )


def _facts_of_head(name: str, model: LanguageModel, hashed: str) -> ModelFacts:
    """Return the facts of an EAGLE-3 head, which reads the target's embedding."""
    assert isinstance(model, StoredModel)
    sizes, num_bytes = model.architecture, model.dtype.itemsize
    return ModelFacts(
        name=name,
        content_hash=hashed,
        dtype=str(model.dtype).removeprefix("torch."),
        pass_bytes=model.num_parameters * num_bytes,
        kv_token_bytes=2 * sizes.num_layers * sizes.num_kv_heads * sizes.head_dim * num_bytes,
    )


def setup_of(pair: LoadedPair, target: ModelFacts, draft: ModelFacts) -> ProfileSetup:
    """Return machine, models and settings of a measurement in this process."""
    device = pair.target.device
    gpu = f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else None
    return ProfileSetup(
        cpu=cpu_model(),
        num_cores=num_cores(),
        num_threads=num_threads_of(pair.engine),
        device=gpu or device.type,
        dtype=target.dtype,
        target_runner=type(pair.target).__name__,
        draft_runner=type(pair.draft).__name__,
        target_hash=target.content_hash,
        draft_hash=draft.content_hash,
    )


def num_threads_of(engine: EngineConfig) -> int:
    return engine.num_threads or torch.get_num_threads()
