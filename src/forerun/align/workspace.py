"""Folder of an alignment: file names, settings, hashes of snapshots, and the lock."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout

from forerun.align.config import AlignConfig
from forerun.align.json_files import from_json, to_json
from forerun.bounded_read import read_bytes
from forerun.errors import InvalidCheckpoint, InvalidRequest
from forerun.models.checkpoint import read_object
from forerun.models.draft_card import CARD_FILE, read_card

__all__ = [
    "HASHES",
    "Workspace",
    "check_hashes",
    "exclusive_access",
    "lock_for",
    "read_settings",
    "settings_of",
    "write_hashes",
]

HASHES = "sha256.json"
"""File of a snapshot with the hashes of its other files."""
START_AGAIN = (
    "delete this snapshot, and the folder training beside snapshots if its checkpoint is of a "
    "later step; the same command then trains these steps again"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """Paths in the folder of one alignment; everything except the draft can be regenerated.

    Attributes:
        root: `AlignConfig.out`.
        cache_root: where caches go instead, None: inside.
    """

    root: Path
    cache_root: Path | None = None

    @property
    def draft(self) -> Path:
        """The best draft so far, in Hugging Face format."""
        return self.root / "draft"

    @property
    def responses(self) -> Path:
        """Responses of target and draft, one file per origin."""
        return self.root / "responses"

    @property
    def cache(self) -> Path:
        """The teacher's caches."""
        return self.cache_root or self.root / "cache"

    @property
    def training(self) -> Path:
        """Folder of the checkpoint."""
        return self.root / "training"

    @property
    def metrics(self) -> Path:
        """Metrics of every optimiser step, as JSON lines."""
        return self.root / "metrics.jsonl"

    @property
    def judgements(self) -> Path:
        """Judgements of the draft during training, as JSON lines."""
        return self.root / "judgements.jsonl"

    @property
    def settings(self) -> Path:
        """File of the settings, from which `--refresh` continues."""
        return self.root / "align.json"

    @property
    def identity(self) -> Path:
        """File of all inputs that decide the result; a resumed run must have the same."""
        return self.root / "identity.json"

    @property
    def report(self) -> Path:
        """Path of the alignment's report."""
        return self.root / "report.json"

    def picture(self, name: str) -> Path:
        """Return the path of a plot of the report."""
        return self.root / f"{name}.svg"

    def snapshot(self, step: int) -> Path:
        """Return the path of the draft after the given number of optimiser steps."""
        return self.root / "snapshots" / str(step)


def write_hashes(folder: Path) -> None:
    """Write the SHA-256 of every file of a snapshot into the snapshot, for `check_hashes`."""
    hashes = {path.name: file_hash(path) for path in sorted(folder.iterdir())}
    (folder / HASHES).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


def check_hashes(folder: Path) -> None:
    """Refuse a snapshot whose files differ from their recorded hashes.

    Snapshots of earlier versions have no hashes and pass.

    Raises:
        InvalidCheckpoint: a file was changed or is missing.
    """
    path = folder / HASHES
    if not path.exists():
        return
    try:
        hashes = msgspec.json.decode(read_bytes(path), type=dict[str, str])
        damaged = [name for name in hashes if file_hash(folder / name) != hashes[name]]
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise InvalidCheckpoint(f"{folder} cannot be read ({error}); {START_AGAIN}") from error
    if damaged:
        raise InvalidCheckpoint(f"{folder / damaged[0]} is damaged; {START_AGAIN}")


def file_hash(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def lock_for(path: Path) -> FileLock:
    """Return the lock of a file, which is an empty file beside it.

    Holding it twice in one process takes the same lock twice: another one for the same file is
    another writer.
    """
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def exclusive_access(lock: FileLock, what: Path) -> Iterator[None]:
    """Hold a lock during the block.

    Args:
        lock: of `what`.
        what: is written, for the message.

    Raises:
        InvalidRequest: another process writes there, or the folder is not writable.
    """
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout as error:
        raise InvalidRequest(
            f"another process is writing {what}; wait until it has ended, or write elsewhere"
        ) from error
    except OSError as error:
        raise InvalidRequest(f"{what} cannot be written: {error}") from error
    try:
        yield
    finally:
        lock.release()


LEFT_OUT = ("out", "engine", "export", "push_to_hub")
"""Settings that decide where and how fast things happen, and not what is learned."""


def settings_of(config: AlignConfig) -> dict[str, Any]:
    """Return the settings that influence training, as JSON values."""
    values: dict[str, Any] = to_json(config)
    return {name: value for name, value in values.items() if name not in LEFT_OUT}


def read_settings(folder: Path) -> tuple[AlignConfig, Path]:
    """Read the settings of an earlier alignment and the path of its kept draft.

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
