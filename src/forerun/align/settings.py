"""Settings of an alignment as JSON, and back: what a folder remembers of the run it belongs to.

Dataclasses from what JSON kept of them, by the types of their fields.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from forerun.align.config import AlignConfig
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card

__all__ = ["built", "read_settings", "settings_of"]

LEFT_OUT = ("out", "engine", "export")
"""Of the file: where and how fast things happen, not what is learned."""


def settings_of(config: AlignConfig) -> dict[str, Any]:
    """The settings as JSON keeps them."""
    settings = asdict(config)
    for name in LEFT_OUT:
        del settings[name]
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def read_settings(folder: Path) -> tuple[AlignConfig, Path]:
    """What an earlier alignment was asked for, and the draft it left.

    Args:
        folder: of the alignment; or of the draft, wherever that is now, whose card repeats them.

    Raises:
        InvalidRequest: the folder is neither, or of another version.
        InvalidModel: the draft's card cannot be read.
    """
    workspace = Workspace(root=folder)
    if workspace.settings.exists():
        values: Mapping[str, Any] = read_object(workspace.settings)
        draft = workspace.draft
    elif (card := read_card(folder)) is not None:
        values, draft = card.settings, folder
    else:
        raise InvalidRequest(
            f"{folder} is no alignment, nor the draft of one: it has neither "
            f"{workspace.settings.name} nor {CARD_FILE}"
        )
    try:
        return built(AlignConfig, values), draft
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"the settings in {folder} are of another version of forerun, or damaged ({error}); "
            "align anew"
        ) from error


KindT = TypeVar("KindT")


def built(kind: type[KindT], values: Mapping[str, Any]) -> KindT:
    """An instance from its JSON.

    What JSON leaves out has its default, and what is null there may be a field of another version:
    nothing was asked of it.

    Raises:
        KeyError, TypeError, ValueError: these are no values of such an instance.
    """
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    names = {field.name for field in fields(kind)}
    unknown = {name for name in values.keys() - names if values[name] is not None}
    if unknown:
        raise KeyError(f"unknown: {sorted(unknown)}")
    return kind(**{name: value_of(hints[name], values[name]) for name in values.keys() & names})


def value_of(hint: Any, value: Any) -> Any:
    """A value of JSON in the type of its field."""
    origin, arguments = get_origin(hint), get_args(hint)
    if value is None:
        return value
    if origin in (Union, UnionType):
        some = [argument for argument in arguments if argument is not NoneType]
        return value_of(some[0], value) if len(some) == 1 else value
    if origin is tuple:
        return tuple(value_of(arguments[0], item) for item in value)
    if origin in (dict, Mapping):
        key, item = arguments
        return {key(name): value_of(item, kept) for name, kept in value.items()}
    if is_dataclass(hint) and isinstance(hint, type):
        return built(hint, value)
    return Path(value) if hint is Path else value
