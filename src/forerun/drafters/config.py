"""Names and settings of drafters that need no model folder; torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from forerun.errors import Range, check_ranges

DrafterName = Literal["suffix", "self", "recycling", "mtp"]
DRAFTER_NAMES: tuple[DrafterName, ...] = get_args(DrafterName)
AUTO = "auto"
"""In place of a draft: those at hand, among which a controller chooses."""
NONE = "none"
"""In place of a draft: plain decoding, without the message that advises a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafter:
    """A drafter in its command-line form: `NAME` or `NAME:ARGUMENT`."""

    name: DrafterName
    argument: str = ""


def parse_drafter(text: str) -> NamedDrafter | None:
    """Return the drafter that `text` names; None if `text` is a model folder or model name."""
    head, _, argument = text.partition(":")
    for name in DRAFTER_NAMES:
        if head == name:
            return NamedDrafter(name=name, argument=argument)
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixConfig:
    """Settings of the suffix drafter: length and assumed costs of copies.

    Attributes:
        tokens_per_match: budget per token of the match, the alpha of SuffixDecoding's
            MAX_SPEC = alpha x p (Oliaro et al. 2024, arXiv:2411.04975): a match of p tokens is
            continued by at most as many times alpha.
        step_cost: what drafting in a step costs before the first row; mostly overhead, so the
            default is for small models.
        row_cost: what verifying one more row costs.
    """

    tokens_per_match: float = 2.0
    step_cost: float = 0.1
    row_cost: float = 0.06

    def __post_init__(self) -> None:
        check_ranges(
            self, Range("tokens_per_match", 0), Range("step_cost", 0), Range("row_cost", 0)
        )
