"""What the files of a pair say: whether they belong together, and whether a draft was trained."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from forerun.diagnose.evidence import Evidence, Reading
from forerun.engine.loading import check_vocabularies
from forerun.errors import IncompatibleDraft
from forerun.models.checkpoint import read_checkpoint
from forerun.models.content_hash import template_hash
from forerun.models.draft_card import CardFigures, DraftCard, identify, read_card
from forerun.models.load import load_tokenizer, read_config
from forerun.probe.evidence.weights import add_weights

__all__ = ["add_card_ratio", "add_files", "evidence_of_misfit"]


def add_files(evidence: Evidence, target: Path, draft: Path) -> None:
    """Facts about two model folders.

    Raises:
        InvalidModel: files are missing or damaged.
    """
    positions = read_config(read_checkpoint(draft))[1].max_positions
    evidence.add("draft_max_context", positions, f"{draft.name}: positions of the configuration")
    add_vocabularies(evidence, target, draft)
    card = read_card(draft)
    if card is not None:
        add_card(evidence, card, target)
    elif template_hash(draft) == template_hash(target):
        evidence.add("template_differs", False, "both folders have one chat template")
    add_weights(evidence, draft)


def add_vocabularies(evidence: Evidence, target: Path, draft: Path) -> None:
    """Whether both tokenizers give every id the same text."""
    try:
        check_vocabularies(load_tokenizer(target), load_tokenizer(draft))
    except IncompatibleDraft as error:
        evidence.add("vocabularies_differ", True, str(error))
    else:
        evidence.add("vocabularies_differ", False, "both folders' tokenizers compared id by id")


def add_card(evidence: Evidence, card: DraftCard, target: Path) -> None:
    """Whether the draft was made for this target and its prompt format."""
    changed = card.made_for.differences(identify(target))
    words = f"the card names {card.target}; not the same: {', '.join(changed) or 'nothing'}"
    evidence.add("draft_of_other_target", "weights" in changed, words)
    evidence.add("template_differs", "chat template" in changed, words)
    if "tokenizer" in changed:
        evidence.add("vocabularies_differ", True, words)


def add_card_ratio(evidence: Evidence, draft: Path, found: Sequence[tuple[float, float]]) -> None:
    """Acceptance probability found here over the one on the draft's card.

    Args:
        evidence: takes the fact.
        draft: folder of the draft.
        found: temperatures of texts and what was found on them, on other prompts than the card's;
            the first that the card has figures of counts.
    """
    card = read_card(draft)
    if card is None:
        return
    for temperature, alpha in found:
        stated = figures_at(card, temperature)
        expected = None if stated is None else stated.acceptance_probability
        if expected is not None and expected.estimate > 0.0:
            words = f"{alpha:.3f} found by replay, {expected.estimate:.3f} on the card"
            source = f"{words}, at temperature {temperature:g}"
            evidence.add("card_ratio", alpha / expected.estimate, source)
            return


def figures_at(card: DraftCard, temperature: float) -> CardFigures | None:
    """The card's figures at one temperature."""
    return next((f for f in card.after if math.isclose(f.temperature, temperature)), None)


def evidence_of_misfit(error: IncompatibleDraft) -> Evidence:
    """All there is to say of a pair whose tokenizers differ: it must not be run."""
    evidence = Evidence(readings=[Reading(source="forerun probe", kinds={"probe"})])
    evidence.add("vocabularies_differ", True, str(error))
    return evidence
