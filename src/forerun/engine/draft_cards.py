"""Compares the target with the one named in a draft's card, before the draft is loaded."""

from __future__ import annotations

import logging
from pathlib import Path

from forerun.drafters.config import parse_drafter
from forerun.drafters.eagle3.golden import GOLDEN_FILE
from forerun.drafters.registry import is_head
from forerun.engine.loading import Source
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.draft_card import changes_of_target, identify, read_card, staleness
from forerun.models.load import model_folder

__all__ = ["check_card", "check_head_card"]

logger = logging.getLogger("forerun.loading")


def check_card(draft: Source, target: Source) -> None:
    """Compare the target with the one named in the draft's card.

    The text is exact whatever the draft, so a draft model of a target that has changed is only
    warned of. A head on hidden states is refused for other weights unless it has golden rows,
    which are computed again when it is loaded. A head without card and golden rows is warned of.

    Args:
        draft: folder or name; drafters without a model have no card.
        target: folder or name; one that is already loaded has no files to compare.

    Raises:
        InvalidModel: there is no such model.
        IncompatibleDraft: a head was trained for other weights.
    """
    if not isinstance(draft, str | Path) or not isinstance(target, str | Path):
        return
    if isinstance(draft, str) and parse_drafter(draft) is not None:
        return
    folder, target_folder = model_folder(draft), model_folder(target)
    try:
        if is_unproven_head(folder) and read_card(folder) is None:
            logger.warning(
                "the head in %s has neither golden rows nor a card: whether it was trained for "
                "this target, and on the layers that it reads, cannot be checked",
                folder,
            )
        check_head_card(folder, target_folder)
        changed = staleness(folder, target_folder)
    except InvalidModel as error:
        changed = f"the draft's card is of no use: {error}"
    if changed is not None:
        logger.warning("%s", changed)


def check_head_card(folder: Path, target: Path) -> None:
    """Refuse a head without golden rows if its card names other weights than the target's.

    Args:
        folder: of the draft; only heads with a card and without golden rows are compared.
        target: folder of the target.

    Raises:
        InvalidModel: the card or the target cannot be read.
        IncompatibleDraft: the weights are others.
    """
    card = read_card(folder) if is_unproven_head(folder) else None
    if card is not None and "weights" in changes_of_target(card, target):
        raise IncompatibleDraft(
            f"the head in {folder} was trained for {card.target}, and the weights in {target} are "
            f"not those (hash {identify(target).weights}, its card has {card.made_for.weights}): "
            "use a head that was trained for this target, or train this one further: forerun "
            f"align --refresh {folder} --target {target}"
        )


def is_unproven_head(folder: Path) -> bool:
    """Whether a draft is a head without golden rows to check it against the target."""
    return not (folder / GOLDEN_FILE).is_file() and is_head(folder)
