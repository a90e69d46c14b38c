"""Settings of an alignment as JSON, and back: what a folder remembers of the run it belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.align.config import AlignConfig
from forerun.align.from_json import built
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card

__all__ = ["read_settings", "settings_of"]

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
