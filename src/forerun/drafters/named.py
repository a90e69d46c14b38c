"""Drafters that need no model of their own, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from forerun.drafters.base import Drafter
from forerun.drafters.config import DrafterName, NamedDrafter
from forerun.drafters.self_draft import SelfDraft
from forerun.drafters.suffix.config import SuffixConfig
from forerun.drafters.suffix.drafter import SuffixDrafter
from forerun.errors import InvalidRequest
from forerun.models.base import LanguageModel, LayeredModel

__all__ = ["DRAFTERS", "build_drafter"]


def suffix(argument: str, target: LanguageModel) -> Drafter:
    """`suffix` copies from the request's own text, `suffix:N` from N stored tokens as well."""
    return SuffixDrafter(SuffixConfig(store_tokens=whole_number(f"suffix:{argument}", argument)))


def self_draft(argument: str, target: LanguageModel) -> Drafter:
    """`self:N` drafts with the target's first N layers."""
    num_layers = whole_number(f"self:{argument}", argument)
    if not isinstance(target, LayeredModel):
        raise InvalidRequest(
            f"self:{argument} needs the target's first layers alone, which {type(target).__name__} "
            "cannot run; choose another runner or another draft"
        )
    if not 0 < num_layers < target.num_layers:
        raise InvalidRequest(
            f"self:{argument} drafts with {num_layers} of the target's {target.num_layers} layers; "
            f"give a number from 1 to {target.num_layers - 1}, as in self:{target.num_layers // 4}"
        )
    return SelfDraft(target.first_layers(num_layers), target.vocab_size)


DRAFTERS: Mapping[DrafterName, Callable[[str, LanguageModel], Drafter]] = MappingProxyType(
    {"suffix": suffix, "self": self_draft}
)


def build_drafter(wanted: NamedDrafter, target: LanguageModel) -> Drafter:
    """The drafter of a name for a loaded target.

    Raises:
        InvalidRequest: its argument cannot be honoured.
    """
    return DRAFTERS[wanted.name](wanted.argument, target)


def whole_number(text: str, argument: str) -> int:
    """The number behind the colon, 0 where nothing is.

    Raises:
        InvalidRequest: it is none.
    """
    if not argument:
        return 0
    if not (argument.isascii() and argument.isdigit()):
        raise InvalidRequest(f"draft {text!r} needs a whole number behind the colon")
    return int(argument)
