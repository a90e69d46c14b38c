"""The manifest of an alignment: its settings, and that its folder belongs to the same alignment.

The identity of an alignment has all inputs that decide its result, so that no two share a folder.
It leaves out settings that decide only where and how fast things happen, and the names of files
whose content is hashed. A setting that is newer than a folder had its default when the run began.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forerun.align.config import FREE_TRAINING_SETTINGS, AlignConfig, DataConfig
from forerun.align.data.sample import data_hash
from forerun.align.texts import PromptSplit
from forerun.align.training.checkpoint import differences
from forerun.align.workspace import IDENTITY, Workspace, settings_of, write_json
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.provenance import content_hash

Identity = Mapping[str, str]

FREE = {
    "sampling": ("n", "logprobs"),  # responses are single samples
    "data": ("prompts", "held_out", "held_out_share", "max_prompt_tokens"),  # see the two hashes
    "teacher": ("teacher_device", "cache_dir", "max_cache_bytes"),
    "objective": (),
    "attached": (),
    "training": FREE_TRAINING_SETTINGS,
    "evaluation": (),
}
"""By stage, settings that do not change the result, or whose effect a hash covers."""
OF_THE_TEACHER = "teacher."


def identity_of(config: AlignConfig, prompts: PromptSplit, target_hash: str) -> dict[str, str]:
    """Return all inputs that decide the result of an alignment, as text by name."""
    learned = [[prompt.prompt_hash, data_hash(prompt.brought)] for prompt in prompts.training]
    judged = [[prompt.prompt_hash, prompt.tag] for prompt in prompts.held_out]
    return {
        "target": target_hash,
        "draft": _start_hash(config),
        "training prompts": hash_of(json.dumps(learned).encode()),
        "held-out prompts": hash_of(json.dumps(judged).encode()),
        **_settings_of_result(config),
    }


def _start_hash(config: AlignConfig) -> str:
    if config.draft is not None:
        return content_hash(config.draft)
    if config.init is None:
        return "none"  # a fresh head, whose shape is in the settings
    try:
        return hashlib.sha256(config.init.read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidRequest(f"{config.init} cannot be read: {error.strerror}") from error


def _settings_of_result(config: AlignConfig) -> dict[str, str]:
    """Return the settings that influence the trained draft, as text by stage and name."""
    settings = settings_of(config)
    return {"dtype": config.dtype, "method": config.method} | {
        f"{stage}.{name}": _as_text(value)
        for stage, free in FREE.items()
        for name, value in settings[stage].items()
        if name not in free
    }


def _as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(None if value in ([], {}) else value)


DEFAULTS = _settings_of_result(AlignConfig(target="", data=DataConfig(prompts=Path())))
"""Values of settings that a run of an earlier version did not store."""


def _of_folder(identity: Identity) -> dict[str, str]:
    """Return the part of the identity that an output folder must match, without the teacher.

    Not the teacher: where its cache turned out too large, responses are there, and another may go
    on with them until the first checkpoint.
    """
    return {name: text for name, text in identity.items() if not name.startswith(OF_THE_TEACHER)}


def of_training(identity: Identity) -> dict[str, str]:
    """Return the part of the identity that a checkpoint must match."""
    return {name: text for name, text in identity.items() if not name.startswith("training.")}


def check_folder(workspace: Workspace, identity: Identity) -> None:
    """Refuse a folder that holds an alignment with other settings (InvalidRequest)."""
    if not workspace.manifest.exists():
        return
    kept = read_object(workspace.manifest).get(IDENTITY)
    if not isinstance(kept, dict):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment of an earlier version of forerun, which cannot "
            "be continued; give another --out (--refresh begins with its draft)"
        )
    if found := differences(kept, _of_folder(identity), DEFAULTS):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment with other settings ({'; '.join(found)}); "
            "give another --out, or those settings to go on"
        )


def claim_folder(config: AlignConfig, workspace: Workspace, identity: Identity) -> None:
    """Write the settings of the run, and what decides its result, into its folder."""
    try:
        write_json(workspace.manifest, {**settings_of(config), IDENTITY: _of_folder(identity)})
    except OSError as error:
        raise InvalidRequest(f"{workspace.root} cannot be written: {error}") from error
