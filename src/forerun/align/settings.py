"""Settings of an alignment kept for a refresh: in its folder and in the draft's card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.align.config import AlignConfig
from forerun.align.json_files import from_json, to_json
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card

__all__ = ["read_settings", "settings_of"]

LEFT_OUT = ("out", "engine", "export", "push_to_hub")
"""Settings that decide where and how fast things happen, and not what is learned."""


def settings_of(config: AlignConfig) -> dict[str, Any]:
    """The settings that decide what is learned, as JSON values."""
    values: dict[str, Any] = to_json(config)
    return {name: value for name, value in values.items() if name not in LEFT_OUT}


def read_settings(folder: Path) -> tuple[AlignConfig, Path]:
    """The settings of an earlier alignment and the folder of the draft it kept.

    Args:
        folder: of the alignment, or of its draft wherever that has been copied: the draft's card
            repeats the settings.

    Raises:
        InvalidRequest: the folder is neither, or was written by another version of forerun.
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
            f"{folder} is neither an alignment nor the draft of one: it has neither "
            f"{workspace.settings.name} nor {CARD_FILE}"
        )
    try:
        return from_json(AlignConfig, values), draft
    except ValueError as error:
        raise InvalidRequest(
            f"the settings in {folder} are of another version of forerun, or damaged ({error}); "
            "align without --refresh"
        ) from error
