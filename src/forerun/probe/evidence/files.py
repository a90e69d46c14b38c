"""Finds facts from model files: compatibility of target and draft, and untrained weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from forerun.diagnose.evidence import Evidence, Reading
from forerun.errors import IncompatibleDraft
from forerun.models.checkpoint import read_checkpoint, template_hash
from forerun.models.draft_card import CardFigures, DraftCard, identify, read_card
from forerun.models.load import load_tokenizer, read_config
from forerun.models.tokenizers import check_vocabularies

__all__ = [
    "add_card_ratio",
    "add_files",
    "add_head_files",
    "add_weights",
    "evidence_of_misfit",
    "looks_drawn",
]


def add_files(evidence: Evidence, target: Path, draft: Path) -> None:
    """Add facts about two model folders.

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
    add_weights(evidence, read_checkpoint(draft).weight_files)


def add_head_files(evidence: Evidence, target: Path, head: Path) -> None:
    """Add facts about the folders of a target and of a head on its hidden states.

    Raises:
        InvalidModel: files are missing or damaged.
    """
    card = read_card(head)
    if card is not None:
        add_card(evidence, card, target)
    add_weights(evidence, sorted(head.glob("*.safetensors")))


def add_vocabularies(evidence: Evidence, target: Path, draft: Path) -> None:
    """Add whether both tokenizers map every id to the same text."""
    try:
        check_vocabularies(load_tokenizer(target), load_tokenizer(draft))
    except IncompatibleDraft as error:
        evidence.add("vocabularies_differ", True, str(error))
    else:
        evidence.add("vocabularies_differ", False, "both folders' tokenizers compared id by id")


def add_card(evidence: Evidence, card: DraftCard, target: Path) -> None:
    """Add whether the draft was made for this target and its prompt format."""
    changed = card.made_for.differences(identify(target))
    words = f"the card names {card.target}; not the same: {', '.join(changed) or 'nothing'}"
    evidence.add("draft_of_other_target", "weights" in changed, words)
    evidence.add("template_differs", "chat template" in changed, words)
    if "tokenizer" in changed:
        evidence.add("vocabularies_differ", True, words)


def add_card_ratio(evidence: Evidence, draft: Path, found: Sequence[tuple[float, float]]) -> None:
    """Add the measured acceptance probability relative to the one on the draft's card.

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
    """Return the figures of a draft's card at one temperature."""
    return next((f for f in card.after if math.isclose(f.temperature, temperature)), None)


def evidence_of_misfit(error: IncompatibleDraft) -> Evidence:
    """Return the facts about a pair with different tokenizers, which must not be run."""
    evidence = Evidence(readings=[Reading(source="forerun probe", kinds={"probe"})])
    evidence.add("vocabularies_differ", True, str(error))
    return evidence


MIN_SIZE = 64
"""Least rows and columns of a matrix that is examined."""
MAX_Z = 3.0
POWER_STEPS = 20
"""Where a direction stands out, this many passes find it; where none does, any will do."""


def add_weights(evidence: Evidence, files: Sequence[Path]) -> None:
    """Add whether matrices are constant or not finite, and the share that appears untrained."""
    wrong: list[str] = []
    drawn: list[str] = []
    num_large = 0
    for name, matrix in matrices(files):
        if not bool(matrix.isfinite().all()) or bool((matrix == matrix[0, 0]).all()):
            wrong.append(name)
        elif min(matrix.shape) >= MIN_SIZE:
            num_large += 1
            if looks_drawn(matrix):
                drawn.append(name)
    if wrong:
        words = f"{len(wrong)} matrices are not finite or constant: {', '.join(wrong[:3])}"
        evidence.add("weights_incomplete", True, words)
    if num_large:
        words = f"{len(drawn)} of {num_large} matrices: {', '.join(drawn[:3]) or 'none'}"
        evidence.add("drawn_share", len(drawn) / num_large, words)


def matrices(files: Sequence[Path]) -> Iterator[tuple[str, Float[Tensor, "rows columns"]]]:
    """Yield the weight matrices one by one."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                tensor = file.get_tensor(name)
                if tensor.ndim == 2 and tensor.is_floating_point():
                    yield name, tensor.float()


def looks_drawn(matrix: Float[Tensor, "rows columns"]) -> bool:
    """Whether a matrix is consistent with independent entries from one distribution (untrained).

    Args:
        matrix: finite, not constant, with some dozens of rows and columns.
    """
    centred = matrix - matrix.mean()
    squares = centred.square()
    scatter = max(abs(dispersion(squares)), abs(dispersion(squares.T)))
    return scatter < MAX_Z and edge_excess(centred) < MAX_Z


def dispersion(squares: Float[Tensor, "rows columns"]) -> float:
    """Deviation of the row sums' variance from independent entries, in standard errors."""
    num_rows, num_columns = squares.shape
    expected = squares.var() / num_columns
    ratio = float(squares.mean(1).var() / expected)
    return (ratio - 1.0) / math.sqrt(2.0 / (num_rows - 1))


def edge_excess(centred: Float[Tensor, "rows columns"]) -> float:
    """Standardised excess of the largest singular value over that of independent entries."""
    long, short = max(centred.shape), min(centred.shape)
    generator = torch.Generator().manual_seed(0)
    vector = torch.empty(centred.shape[1]).normal_(generator=generator)
    for _ in range(POWER_STEPS):
        vector = centred.T @ (centred @ (vector / vector.norm()))
    sides = math.sqrt(long - 1), math.sqrt(short)
    centre = sum(sides) ** 2
    scale: float = sum(sides) * (1.0 / sides[0] + 1.0 / sides[1]) ** (1.0 / 3.0)
    square = float(vector.norm() / centred.var())
    return (square - centre) / scale
