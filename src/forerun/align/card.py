"""The card of a draft just aligned: made from what the run asked for, learned and found."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import forerun
from forerun.align.config import AlignConfig
from forerun.align.evaluation.figures import DraftFigures
from forerun.align.settings import settings_of
from forerun.models.draft_card import CardFigures, DraftCard, identify
from forerun.models.load import model_folder
from forerun.provenance import version_of

__all__ = ["card_of"]

PACKAGES = ("torch", "transformers", "accelerate")


def card_of(
    config: AlignConfig,
    *,
    target_hash: str,
    objective: str,
    data: str,
    before: Sequence[DraftFigures],
    after: Sequence[DraftFigures],
) -> DraftCard:
    """A card to write beside the draft.

    Args:
        config: of the alignment.
        target_hash: of the target's weights.
        objective: the one that was minimised, by name.
        data: hash of the texts it learned from, see `sample.data_hash`.
        before: the draft it began as, judged at one or more temperatures.
        after: the draft itself.

    Raises:
        InvalidModel: the target cannot be read any more.
    """
    return DraftCard(
        target=config.target,
        target_hash=target_hash,
        made_for=identify(model_folder(config.target)),
        data_hash=data,
        objective=objective,
        temperature=config.sampling.temperature,
        before=tuple(map(card_figures, before)),
        after=tuple(map(card_figures, after)),
        versions={
            "forerun": forerun.__version__,
            **{name: version_of(name) for name in PACKAGES},
        },
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=settings_of(config),
    )


def card_figures(judged: DraftFigures) -> CardFigures:
    """Of all that was found, what a reader of the card wants."""
    overall = judged.overall
    return CardFigures(
        temperature=judged.temperature,
        num_speculative_tokens=judged.num_speculative_tokens,
        acceptance_length=overall.acceptance_length,
        acceptance_probability=overall.acceptance_probability,
        speedup=None if overall.speedup is None else overall.speedup.best,
    )
