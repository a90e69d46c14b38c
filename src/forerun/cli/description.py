"""A model as its files describe it, and whether a draft fits it; no weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from forerun.engine.config import EngineConfig
from forerun.models.architecture import Architecture
from forerun.models.checkpoint import read_checkpoint
from forerun.models.content_hash import tokenizer_hash, weights_hash
from forerun.models.draft_card import DraftCard, read_card, staleness
from forerun.models.load import choose_dtype, load_tokenizer, model_folder, read_config
from forerun.models.memory import MemoryEstimate, estimate, geometry_of
from forerun.models.tokenizers import Tokenizer, VocabularyComparison

__all__ = ["DraftFit", "ModelDescription", "compare", "describe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What a model is and needs.

    Attributes:
        name: as the user gave it.
        folder: where its files are.
        architecture: class and sizes.
        num_parameters: stored elements.
        dtype: of weights and KV, as memory was worked out.
        num_slots: sequences the KV store has room for.
        context: tokens per sequence.
        memory: bytes by purpose.
        kv_bytes_per_token: keys and values of one token over all layers.
        weights_hash: short content hash of the weight files.
        tokenizer_hash: short content hash of the tokenizer.
        num_tokens: entries of the tokenizer; the logits may be wider.
        card: what it was aligned to; None for a model that is no aligned draft.
    """

    name: str
    folder: str
    architecture: Architecture
    num_parameters: int
    dtype: str
    num_slots: int
    context: int
    memory: MemoryEstimate
    kv_bytes_per_token: int
    weights_hash: str
    tokenizer_hash: str
    num_tokens: int
    card: DraftCard | None = None

    @property
    def kv_bytes_per_slot(self) -> int:
        """KV of one sequence at full length, staged rows included."""
        return self.memory.kv_bytes // self.num_slots

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        derived = {
            "kv_bytes_per_slot": self.kv_bytes_per_slot,
            "total_bytes": self.memory.total_bytes,
        }
        return asdict(self) | derived


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFit:
    """Whether a draft can draft for a target, and whether it is likely to pay.

    Attributes:
        vocabularies: the two tokenizers compared by id.
        problems: what makes it impossible.
        warnings: what makes it slow or short.
        relative_size: draft parameters over target parameters.
    """

    vocabularies: VocabularyComparison
    problems: tuple[str, ...]
    warnings: tuple[str, ...]
    relative_size: float

    @property
    def fits(self) -> bool:
        """Whether an engine would take the pair."""
        return not self.problems

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        return {"fits": self.fits, **asdict(self)}


def describe(name: str, *, dtype: str, config: EngineConfig) -> tuple[ModelDescription, Tokenizer]:
    """Read a model's files.

    Args:
        name: folder, hub name or shipped model.
        dtype: to work memory out for.
        config: batch, context and K of the engine it would run in.

    Raises:
        InvalidModel: files are missing, damaged or of an unsupported kind.
        InvalidRequest: there is no such dtype.
    """
    folder = model_folder(name)
    checkpoint = read_checkpoint(folder)
    architecture = read_config(checkpoint)[1]
    tokenizer = load_tokenizer(folder)
    geometry = geometry_of(
        architecture,
        num_slots=config.num_slots,
        capacity=min(config.max_context, architecture.max_positions),
        max_staged_rows=config.num_speculative_tokens + 1,
        dtype=choose_dtype(dtype, checkpoint),
    )
    per_layer = 2 * geometry.num_kv_heads * geometry.head_dim  # keys and values
    description = ModelDescription(
        name=name,
        folder=str(folder),
        architecture=architecture,
        num_parameters=checkpoint.num_parameters,
        dtype=str(geometry.dtype).removeprefix("torch."),
        num_slots=config.num_slots,
        context=geometry.capacity,
        memory=estimate(checkpoint.num_parameters, architecture, geometry),
        kv_bytes_per_token=geometry.num_layers * per_layer * geometry.dtype.itemsize,
        weights_hash=weights_hash(checkpoint.weight_files),
        tokenizer_hash=tokenizer_hash(folder),
        num_tokens=len(tokenizer.vocabulary),
        card=read_card(folder),
    )
    return description, tokenizer


def compare(
    target: ModelDescription, draft: ModelDescription, vocabularies: VocabularyComparison
) -> DraftFit:
    """Judge a pair from the descriptions of both."""
    return DraftFit(
        vocabularies=vocabularies,
        problems=tuple(problems_of(vocabularies)),
        warnings=tuple(warnings_of(target, draft)),
        relative_size=draft.num_parameters / target.num_parameters,
    )


def problems_of(vocabularies: VocabularyComparison) -> Iterator[str]:
    """What rules a draft out."""
    if not vocabularies.identical:
        yield (
            f"the tokenizers differ at {vocabularies.num_different} of {vocabularies.num_target} "
            "ids: a drafted id would mean another text to the target; use a draft trained with "
            "the target's tokenizer"
        )


def warnings_of(target: ModelDescription, draft: ModelDescription) -> Iterator[str]:
    """What will cost speed."""
    if draft.num_parameters >= target.num_parameters:
        yield "the draft is not smaller than the target: drafting will cost more than it saves"
    if draft.context < target.context:
        yield (
            f"the draft's context ends at {draft.context} tokens: longer texts are decoded plainly"
        )
    if (changed := staleness(Path(draft.folder), Path(target.folder))) is not None:
        yield changed
