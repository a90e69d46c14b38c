"""What a run is a function of: two runs that differ in it never share a folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from forerun.align.config import AlignConfig
from forerun.align.settings import settings_of
from forerun.align.texts import Prompts
from forerun.align.training.trainer import FREE_SETTINGS
from forerun.align.workspace import Workspace
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.provenance import content_hash
from forerun.replacing import replacing

__all__ = ["claim_folder", "identity_of"]


def identity_of(config: AlignConfig, prompts: Prompts) -> dict[str, str]:
    """Hashes of all that decides what the steps of a run do, besides the training settings."""
    texts = json.dumps([prompt.prompt_hash for prompt in prompts.training])
    settings = settings_of(config)
    names = ("sampling", "data", "teacher", "objective")
    return {
        "target": content_hash(config.target),
        "draft": str(config.init) if config.draft is None else content_hash(config.draft),
        "prompts": hashlib.sha256(texts.encode()).hexdigest(),
        "settings": json.dumps({name: settings[name] for name in names}, sort_keys=True),
    }


def claim_folder(config: AlignConfig, workspace: Workspace) -> None:
    """Begin in an empty folder, or go on in one that was begun with the same settings.

    What only decides how fast a step is made may change, and so may the teacher until the first
    checkpoint, which is of one teacher: where its cache turned out too large, responses are there.

    Raises:
        InvalidRequest: another alignment is kept there, or it cannot be written.
    """
    settings = settings_of(config)
    if workspace.settings.exists():
        differing = differences(bound(read_object(workspace.settings)), bound(settings))
        if differing:
            raise InvalidRequest(
                f"{workspace.root} holds an alignment with other settings "
                f"({'; '.join(differing)}); give another --out, or those settings to go on"
            )
        return
    try:
        with replacing(workspace.settings) as scratch:
            scratch.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{workspace.root} cannot be written: {error}") from error


def bound(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a run and its continuation have in common."""
    training = settings.get("training", {})
    kept = {name: value for name, value in training.items() if name not in FREE_SETTINGS}
    return {name: value for name, value in settings.items() if name != "teacher"} | {
        "training": kept
    }


def differences(before: Any, now: Any, name: str = "") -> list[str]:
    """Settings that differ, each by its name and both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        names = sorted(before.keys() | now.keys())
        return [
            difference
            for key in names
            for difference in differences(before.get(key), now.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if before == now else [f"{name} was {before}, is {now}"]
