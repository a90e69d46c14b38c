"""The contents of config.json with transformers' defaults, cached per content and version.

To read a configuration transformers loads a good part of itself and torch's compiler: a second of
every start, for a handful of numbers. So what came out is kept on disk, under a name made of the
file's content and the version that read it.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.cache import cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel
from forerun.models.architecture import check_layer_count
from forerun.models.checkpoint import Checkpoint, read_object

__all__ = ["read_settings"]


def read_settings(checkpoint: Checkpoint, folder: Path | None = None) -> dict[str, Any]:
    """Return the configuration with all defaults filled in, in the form of `config.to_dict()`.

    Args:
        checkpoint: whose.
        folder: cache to use instead of `cache_folder()`.

    Raises:
        InvalidModel: transformers refuses it.
    """
    check_layer_count(read_object(checkpoint.folder / "config.json"))
    content = (checkpoint.folder / "config.json").read_bytes()
    key = hash_of(content + b"\0" + version("transformers").encode())
    return cached_json(folder or cache_folder(), f"settings-{key}", lambda: understood(checkpoint))


def understood(checkpoint: Checkpoint) -> dict[str, Any]:
    """Read the configuration with transformers and convert it to JSON types."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            checkpoint.folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise InvalidModel(
            f"the configuration in {checkpoint.folder} is refused: {error}"
        ) from error
    settings: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return settings
