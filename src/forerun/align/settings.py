"""Settings of an alignment as JSON, and back: what a folder remembers of the run it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from forerun.align.config import AlignConfig
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card

__all__ = ["read_settings", "settings_of"]

LEFT_OUT = ("out", "engine", "export")
"""Of the file: where and how fast things happen, not what is learned."""

ConfigT = TypeVar("ConfigT")


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


def built(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """A settings dataclass from its JSON; what JSON leaves out has its default."""
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    unknown = values.keys() - {field.name for field in fields(kind)}
    if unknown:
        raise KeyError(f"unknown settings {sorted(unknown)}")
    return kind(**{name: value_of(hints[name], value) for name, value in values.items()})


def value_of(hint: Any, value: Any) -> Any:
    """A value of JSON in the type of its field."""
    if isinstance(hint, type) and is_dataclass(hint):
        return built(hint, value)
    if value is None:
        return None
    if isinstance(value, dict):  # logit_bias is the one mapping there is, by token id
        return {int(key): bias for key, bias in value.items()}
    is_path = Path in (hint, *get_args(hint))
    if isinstance(value, list):
        return tuple(Path(item) if is_path else item for item in value)
    return Path(value) if is_path else value
