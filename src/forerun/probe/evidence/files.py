"""What the files of a pair say: whether they belong together, and whether a draft was trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from forerun.diagnose.evidence import Evidence, Reading
from forerun.engine.loading import check_vocabularies
from forerun.errors import IncompatibleDraft
from forerun.models.checkpoint import read_checkpoint
from forerun.models.content_hash import template_hash
from forerun.models.draft_card import CardFigures, DraftCard, identify, read_card
from forerun.models.load import load_tokenizer, read_config

__all__ = ["add_card_ratio", "add_files", "evidence_of_misfit"]


def add_files(evidence: Evidence, target: Path, draft: Path) -> None:
    """Facts of two model folders.

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


def add_card_ratio(evidence: Evidence, draft: Path, temperature: float, alpha: float) -> None:
    """Acceptance probability found here over the one on the draft's card.

    Args:
        evidence: takes the fact.
        draft: folder of the draft.
        temperature: of the text it was found on.
        alpha: what was found, on other prompts than the card's.
    """
    card = read_card(draft)
    stated = None if card is None else figures_at(card, temperature)
    if stated is None or stated.acceptance_probability is None:
        return
    expected = stated.acceptance_probability.estimate
    if expected > 0.0:
        words = f"{alpha:.3f} found by replay, {expected:.3f} on the card"
        evidence.add("card_ratio", alpha / expected, words)


def figures_at(card: DraftCard, temperature: float) -> CardFigures | None:
    """The card's figures at one temperature."""
    return next((f for f in card.after if math.isclose(f.temperature, temperature)), None)


def evidence_of_misfit(error: IncompatibleDraft) -> Evidence:
    """All there is to say of a pair whose tokenizers differ: it must not be run."""
    evidence = Evidence(readings=[Reading(source="forerun probe", kinds={"probe"})])
    evidence.add("vocabularies_differ", True, str(error))
    return evidence


def add_weights(evidence: Evidence, draft: Path) -> None:
    """Whether matrices of the draft hold what no training leaves: NaN, or one number throughout.

    Numbers that were drawn and never trained cannot be told from trained ones by their looks.
    """
    wrong = [
        name
        for name, matrix in matrices(draft)
        if not bool(matrix.isfinite().all()) or bool((matrix == matrix[0, 0]).all())
    ]
    if wrong:
        words = f"{len(wrong)} matrices are not finite or constant: {', '.join(wrong[:3])}"
        evidence.add("weights_incomplete", True, words)


def matrices(folder: Path) -> Iterator[tuple[str, Float[Tensor, "rows columns"]]]:
    """Weight matrices, one at a time."""
    for path in read_checkpoint(folder).weight_files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and tensor.is_floating_point():
                    yield name, tensor.float()
