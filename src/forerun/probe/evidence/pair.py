"""A pair loaded for a probe: the engine as it would be served, the target once more as a draft."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from forerun.drafters.config import parse_drafter
from forerun.drafters.draft_model import DraftModel
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import load_pair_member
from forerun.errors import NotEnoughMemory
from forerun.models.load import model_folder
from forerun.probe.evidence.run import ProbedEngine

__all__ = ["PairNames", "load_probed"]

logger = logging.getLogger("forerun.probe")


@dataclass(frozen=True, slots=True, kw_only=True)
class PairNames:
    """What is to be loaded, as `Engine.load` takes it.

    Attributes:
        target: folder, hub name or "zoo:" name.
        draft: the same, or a drafter by its name.
        dtype: of weights.
        device: of both.
    """

    target: str
    draft: str
    dtype: str = "auto"
    device: str = "auto"

    @property
    def folders(self) -> tuple[Path | None, Path | None]:
        """Of target and draft; None for a drafter without a model of its own."""
        draft = None if parse_drafter(self.draft) else model_folder(self.draft)
        return model_folder(self.target), draft


def load_probed(names: PairNames, config: EngineConfig, *, twice: bool) -> ProbedEngine:
    """Load target and draft, and the target again to draft for itself.

    Args:
        names: of the models.
        config: of the engine.
        twice: whether to; where the memory does not suffice, it is left out with a warning.

    Raises:
        InvalidModel: a model is missing, damaged or of an unsupported kind.
        IncompatibleDraft: the tokenizers differ.
        NotEnoughMemory: the pair does not fit.
    """
    engine = Engine.load(
        names.target, names.draft, dtype=names.dtype, device=names.device, config=config
    )
    itself: Engine | None = None
    if twice:
        try:
            copy, _ = load_pair_member(
                names.target, dtype=names.dtype, device=names.device, config=config
            )
            itself = engine.with_draft(DraftModel(copy, engine.target.vocab_size))
        except NotEnoughMemory as error:
            logger.warning("the target drafts for itself with its own KV only: %s", error)
    target, draft = names.folders
    return ProbedEngine(
        engine=engine, self_drafting=itself, target_folder=target, draft_folder=draft
    )
