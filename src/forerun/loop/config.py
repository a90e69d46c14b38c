"""Settings of `forerun loop`, read from a TOML or JSON file."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from forerun.bounded_read import ReadLimits, first_line, parse_json, read_bytes
from forerun.errors import InvalidRequest, explain_invalid

CONFIG_FILE = ReadLimits(max_bytes=1 << 20)
Count = Annotated[int, Meta(ge=1)]


class LoopConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a loop.

    Attributes:
        serve: arguments of `forerun serve`: the target, and one draft after --draft.
        folder: of the journal, the collected texts and the drafts.
        train: further arguments of `forerun align`, such as its method and temperature.
        old_texts: file or folder of conversations with answers, which are trained on beside the
            collected ones.
        min_texts: collected texts from which a training starts.
        max_texts: most collected texts of a training, the newest.
        train_minutes: after so long a training is given up.
        shadow_requests: requests on which a new draft is tried before it may be promoted.
        settle_requests: requests after a promotion on which the draft before is tried beside it.
        shadow_share: of the time of steps that a trial takes on average.
        quota_mb: megabytes of texts kept per tenant.
    """

    serve: Annotated[tuple[str, ...], Meta(min_length=1)]
    folder: Path
    train: tuple[str, ...] = ()
    old_texts: Path | None = None
    min_texts: Count = 300
    max_texts: Count = 2000
    train_minutes: Annotated[float, Meta(gt=0.0)] = 30.0
    shadow_requests: Annotated[int, Meta(ge=30)] = 200
    settle_requests: Annotated[int, Meta(ge=30)] = 500
    shadow_share: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.1
    quota_mb: Annotated[float, Meta(gt=0.0)] = 64.0


def read_config(path: Path) -> LoopConfig:
    """Read a file; its relative paths are relative to it.

    Raises:
        InvalidRequest: it is no such file, or a value is wrong; the message names it.
        UnreadableInput: it cannot be read.
    """
    content = read_bytes(path, CONFIG_FILE)
    try:
        is_json = path.suffix == ".json"
        values = parse_json(content, str(path)) if is_json else tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is neither TOML nor JSON: {first_line(error)}") from error
    try:
        found = msgspec.convert(values, LoopConfig, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{path}: {explain_invalid(error, values, LoopConfig)}") from error
    root, old = path.parent.resolve(), found.old_texts
    return msgspec.structs.replace(
        found,
        folder=root / found.folder,
        old_texts=None if old is None else root / old,
    )


def _to_path(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    raise ValueError(f"{value!r:.60} is no path")
