"""The table of drafting methods, and settings of drafters without a model; torch-free."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forerun.errors import Range, check_ranges

Function = str | Callable[..., Any]
"""A function, or `MODULE:NAME` of one whose module is imported when it is called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingMethod:
    """The row of a drafting method: how it is chosen, and what makes its drafter.

    Attributes:
        name: `--draft NAME` or `--draft NAME:ARGUMENT` chooses it if it has `build`.
        build: from the argument and the target.
        check: refuses an argument, given the number of the target's layers, before weights are
            read; without it there is no argument.
        matches: whether a checkpoint is the method's, by the contents of its config.json.
        load: from the folder of such a checkpoint and the target.
    """

    name: str
    build: Function | None = None
    check: Function | None = None
    matches: Function | None = None
    load: Function | None = None


METHODS: list[DraftingMethod] = [
    DraftingMethod(name="suffix", build="forerun.drafters.suffix:build_suffix"),
    DraftingMethod(
        name="self",
        build="forerun.drafters.draft_model:build_self_draft",
        check="forerun.drafters.draft_model:check_self_draft",
    ),
    DraftingMethod(name="recycling", build="forerun.drafters.recycling:build_recycling"),
    DraftingMethod(
        name="mtp", build="forerun.drafters.mtp:load_mtp", check="forerun.drafters.mtp:check_mtp"
    ),
    DraftingMethod(
        name="eagle3",
        matches="forerun.drafters.eagle3.head:is_eagle3",
        load="forerun.drafters.eagle3.load:load_eagle3",
    ),
    DraftingMethod(
        name="dflash",
        matches="forerun.drafters.dflash.network:is_dflash",
        load="forerun.drafters.dflash.load:load_dflash",
    ),
    DraftingMethod(
        name="medusa",
        matches=lambda config: "medusa_num_heads" in config or config.get("model_type") == "medusa",
        load="forerun.drafters.medusa:load_medusa",
    ),
]
"""All drafting methods, one row each; the first checkpoint that matches is loaded.

A folder that none matches is a draft model.
"""
AUTO = "auto"
"""In place of a draft: those at hand, among which a controller chooses."""
NONE = "none"
"""In place of a draft: plain decoding, without the message that advises a draft."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedDrafter:
    """A drafter in its command-line form: `NAME` or `NAME:ARGUMENT`."""

    name: str
    argument: str = ""


def parse_drafter(text: str) -> NamedDrafter | None:
    """Return the drafter that `text` names; None if `text` is a model folder or model name."""
    head, _, argument = text.partition(":")
    is_named = any(row.name == head and row.build is not None for row in METHODS)
    return NamedDrafter(name=head, argument=argument) if is_named else None


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
