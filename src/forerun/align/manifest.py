"""Settings and identity of an alignment, as its manifest (align.json) and the card have them.

The identity is all inputs that decide the result, so that no two share a folder. It leaves out
settings that decide only where and how fast things happen, and the names of files whose content is
hashed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from forerun.align.config import FREE_TRAINING_SETTINGS, LEFT_OUT, AlignConfig
from forerun.align.samples import Sample
from forerun.align.texts import PromptSplit
from forerun.align.workspace import Workspace, differences, from_json, to_json, write_json
from forerun.bounded_read import read_bytes
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card
from forerun.provenance import content_hash

IDENTITY, DTYPES = "identity", "dtypes"
"""Keys of the manifest; the other keys are settings. The second has the types of products, which
the first process measured and which resumed runs keep."""

FREE = {
    "sampling": ("n", "logprobs"),  # responses are single samples
    "data": ("prompts", "held_out", "held_out_share", "max_prompt_tokens", "raw"),
    "teacher": ("cache_dir", "max_cache_bytes"),
    "objective": (),
    "attached": (),
    "training": FREE_TRAINING_SETTINGS,
    "evaluation": (),
}
"""Settings, by stage, that do not change the result, or whose effect a hash covers."""
OF_THE_TEACHER = "teacher."


def settings_of(config: AlignConfig) -> dict[str, Any]:
    return {name: value for name, value in to_json(config).items() if name not in LEFT_OUT}


def read_settings(folder: Path) -> tuple[AlignConfig, Path]:
    """Read the settings of an earlier alignment and the path of its kept draft.

    `folder` is that of the alignment, or of its draft wherever that has been copied: the draft's
    card repeats the settings.
    """
    workspace = Workspace(root=folder)
    values: Mapping[str, Any]
    if workspace.manifest.exists():
        values, draft = read_object(workspace.manifest), workspace.draft
    elif (card := read_card(folder)) is not None:
        values, draft = card.settings, folder
    else:
        raise InvalidRequest(
            f"{folder} is neither an alignment nor the draft of one: it has neither "
            f"{workspace.manifest.name} nor {CARD_FILE}"
        )
    try:
        return from_json(AlignConfig, values), draft
    except ValueError as error:
        raise InvalidRequest(
            f"the settings in {folder} are of another version of forerun, or damaged ({error}); "
            "align without --refresh"
        ) from error


def identity_of(config: AlignConfig, prompts: PromptSplit, target_hash: str) -> dict[str, str]:
    """Return all inputs that decide the result of an alignment, as text by name."""
    learned = [[prompt.prompt_hash, data_hash(prompt.brought)] for prompt in prompts.training]
    judged = [[prompt.prompt_hash, prompt.tag] for prompt in prompts.held_out]
    draft = "none"  # a fresh head, whose shape is in the settings
    if config.draft is not None:
        draft = content_hash(config.draft)
    elif config.init is not None:
        draft = hashlib.sha256(read_bytes(config.init)).hexdigest()
    settings = settings_of(config)
    optimiser = {"optimiser": "muon"} if config.method == "eagle3" else {}
    return (
        optimiser
        | {
            "target": target_hash,
            "draft": draft,
            "training prompts": hash_of(json.dumps(learned).encode()),
            "held-out prompts": hash_of(json.dumps(judged).encode()),
            "dtype": config.dtype,
            "method": config.method,
        }
        | {
            f"{stage}.{name}": _as_text(value)
            for stage, free in FREE.items()
            for name, value in settings[stage].items()
            if name not in free
        }
    )


def data_hash(samples: Iterable[Sample]) -> str:
    """Hash texts and their learned ranges, independent of their order."""
    each = sorted(
        hashlib.sha256(repr((sample.token_ids, sample.spans)).encode()).digest()
        for sample in samples
    )
    return hash_of(b"".join(each))


def _as_text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(None if value in ([], {}) else value)


def _of_folder(identity: Mapping[str, str]) -> dict[str, str]:
    """Return the part of the identity that an output folder must match, without the teacher.

    Not the teacher: where its cache turned out too large, responses are there, and another may go
    on with them until the first checkpoint.
    """
    return {name: text for name, text in identity.items() if not name.startswith(OF_THE_TEACHER)}


def of_training(identity: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in identity.items() if not name.startswith("training.")}


def check_folder(workspace: Workspace, identity: Mapping[str, str]) -> None:
    """Refuse a folder that holds an alignment with other settings (InvalidRequest)."""
    if not workspace.manifest.exists():
        return
    kept = read_object(workspace.manifest).get(IDENTITY)
    if not isinstance(kept, dict):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment of an earlier version of forerun, which cannot "
            "be continued; give another --out (--refresh begins with its draft)"
        )
    if found := differences(kept, _of_folder(identity)):
        raise InvalidRequest(
            f"{workspace.root} holds an alignment with other settings ({'; '.join(found)}); "
            "give another --out, or those settings to go on"
        )


def claim_folder(
    settings: Mapping[str, Any],
    workspace: Workspace,
    identity: Mapping[str, str],
    dtypes: Mapping[str, str],
) -> None:
    known = {IDENTITY: _of_folder(identity), DTYPES: dict(dtypes)}
    try:
        write_json(workspace.manifest, {**settings, **known})
    except OSError as error:
        raise InvalidRequest(f"{workspace.root} cannot be written: {error}") from error
