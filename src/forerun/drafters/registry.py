"""Registry of drafters: builders by name, and loaders by the type of a checkpoint.

A new drafter implements `forerun.drafters.base.Drafter`. Code outside forerun gives an instance to
`Engine.with_draft`, or calls `register_checkpoint` so that `Engine.load` recognises its folder.
Only drafters of forerun itself have a name, which is an entry in `DRAFTERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from forerun.drafters.base import Drafter
from forerun.drafters.config import DrafterName, NamedDrafter, SuffixConfig
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.recycling import RecyclingDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import InvalidRequest
from forerun.models.architecture import QUANTISED
from forerun.models.base import LanguageModel, LayeredModel, QuantisableModel
from forerun.models.checkpoint import read_object

CheckpointTest = Callable[[Mapping[str, Any]], bool]
"""Returns whether a loader can read a checkpoint, from the contents of its config.json."""
CheckpointLoader = Callable[[Path, LanguageModel], Drafter]
"""Loads the drafter in a folder for a loaded target."""


def suffix(argument: str, target: LanguageModel) -> Drafter:
    """Build `suffix`, which copies from a request itself, or `suffix:N` with N stored tokens."""
    return SuffixDrafter(SuffixConfig(store_tokens=_whole_number(f"suffix:{argument}", argument)))


def recycling(argument: str, target: LanguageModel) -> Drafter:
    """Build `recycling`, which drafts from the target's own most likely tokens."""
    if argument:
        raise InvalidRequest(f"recycling:{argument}: this drafter takes no argument")
    return RecyclingDrafter()


def _self_draft(argument: str, target: LanguageModel) -> Drafter:
    """Build `self:N`, the target's first N layers, or `self:int4`, all of it in fewer bits."""
    weights = next((weights for weights in QUANTISED if weights == argument), None)
    if weights is not None:
        if not isinstance(target, QuantisableModel):
            raise InvalidRequest(
                f"self:{argument} needs the native runner, which quantises the target's weights; "
                f"{type(target).__name__} cannot: choose another draft"
            )
        return SelfDraft(target.in_fewer_bits(weights), target.vocab_size)
    num_layers = _whole_number(f"self:{argument}", argument)
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
    {"suffix": suffix, "self": _self_draft, "recycling": recycling}
)
"""Builders by name; a new name is added here and to `DrafterName` in `drafters/config.py`."""


def build_drafter(wanted: NamedDrafter, target: LanguageModel) -> Drafter:
    """Build a drafter by its name for a loaded target."""
    return DRAFTERS[wanted.name](wanted.argument, target)


def _whole_number(text: str, argument: str) -> int:
    """Return the number after the colon, or 0 if there is none."""
    if not argument:
        return 0
    if not (argument.isascii() and argument.isdigit()) or len(argument) > MAX_DIGITS:
        raise InvalidRequest(f"draft {text!r} needs a whole number after the colon")
    return int(argument)


MAX_DIGITS = 12
"""Of a number after a colon; Python itself refuses to parse more than 4,300."""


def eagle3(folder: Path, target: LanguageModel) -> Drafter:
    """Load the EAGLE-3 head in a folder; see `load_eagle3`."""
    from forerun.drafters.eagle3.load import load_eagle3  # costs a second, and few engines need it

    return load_eagle3(folder, target)


def medusa(folder: Path, target: LanguageModel) -> Drafter:
    """Load the Medusa heads in a folder; see `load_medusa`."""
    from forerun.drafters.medusa import load_medusa  # as above

    return load_medusa(folder, target)


def _is_medusa(config: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def is_head(folder: Path) -> bool:
    """Whether a folder holds an attached drafter: an EAGLE-3 head or Medusa heads."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    return is_eagle3(config) or _is_medusa(config)


_checkpoints: list[tuple[CheckpointTest, CheckpointLoader]] = [
    (is_eagle3, eagle3),
    (_is_medusa, medusa),
]


def register_checkpoint(matches: CheckpointTest, load: CheckpointLoader) -> None:
    """Register a loader, so that `Engine.load(draft=FOLDER)` accepts a further checkpoint type.

    Types that were registered later are tried first. A folder that no registered type matches is
    loaded as a draft model.
    """
    _checkpoints.insert(0, (matches, load))


def find_checkpoint(config: Mapping[str, Any]) -> CheckpointLoader | None:
    """Return the loader for a checkpoint; None for an ordinary language model."""
    return next((load for matches, load in _checkpoints if matches(config)), None)
