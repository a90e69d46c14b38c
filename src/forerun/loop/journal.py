"""What a loop has done: one line per finished stage, from which it goes on after any interruption.

A line is on the disk before its consequence is drawn: a draft is the one in service from the line
on that says so. So there is no moment in which a draft is half promoted.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import IO, Literal

import msgspec

from forerun.errors import InvalidRequest, UnreadableInput
from forerun.record_file import RecordFile, lock_run_folder

Stage = Literal["watch", "train", "shadow", "promote", "settle", "roll_back"]

NEXT: Mapping[tuple[Stage, bool], Stage] = MappingProxyType(
    {
        ("watch", True): "train",
        ("train", True): "shadow",
        ("train", False): "watch",
        ("shadow", True): "promote",
        ("shadow", False): "watch",
        ("promote", True): "settle",
        ("promote", False): "watch",
        ("settle", True): "watch",
        ("settle", False): "roll_back",
        ("roll_back", True): "watch",
        ("roll_back", False): "watch",
    }
)
"""The stage after each, by whether it ended well."""
NAME = "journal.jsonl"


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A finished stage.

    Attributes:
        version: the draft in service from here on; 0 is that of the configuration.
        why: the reason, in a sentence.
        at_s: Unix time; texts collected since the last stage are counted from it.
        draft: folder of the draft that a training made; its version is that of its round.
    """

    round: int
    stage: Stage
    is_good: bool
    version: int
    why: str
    at_s: float = msgspec.field(default_factory=time.time)
    draft: str | None = None
    figures: Mapping[str, float] = {}


def find_next(records: Sequence[Record]) -> tuple[int, Stage]:
    """Return the round and the stage that come after these records."""
    if not records:
        return 1, "watch"
    last = records[-1]
    stage = NEXT[last.stage, last.is_good]
    return last.round + (stage == "watch"), stage


def find_draft(records: Sequence[Record], version: int) -> str | None:
    """Return the folder of a version; None for that of the configuration."""
    return next((r.draft for r in records if r.draft is not None and r.round == version), None)


def find_previous(records: Sequence[Record]) -> int:
    """Return the version that was in service before the latest promotion."""
    latest = [at for at, r in enumerate(records) if r.stage == "promote" and r.is_good][-1]
    return records[latest - 1].version


def read_journal(folder: Path) -> list[Record]:
    """Read the records of a loop; raises InvalidRequest where there are none to read."""
    try:
        if not folder.is_dir():
            raise NotADirectoryError(f"there is no folder {folder}")
        return RecordFile[Record](folder / NAME, Record).read()
    except (OSError, UnreadableInput) as error:
        raise InvalidRequest(f"{folder} cannot be used: {error}; name another folder") from error


class Journal:
    """The records of a loop in its folder, which one process at a time may continue."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self._file = RecordFile[Record](folder / NAME, Record)
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> Journal:
        """Take the folder and read it; raises InvalidRequest if another loop has it."""
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_run_folder(self.folder, "loop")
            self.records = self._file.read()
        except (OSError, UnreadableInput) as error:
            self.__exit__()
            raise InvalidRequest(f"{self.folder} cannot be used: {error}") from error
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def version(self) -> int:
        """The draft in service."""
        return self.records[-1].version if self.records else 0

    def append(self, record: Record) -> None:
        """Append a record, and wait until it is on the disk."""
        self._file.append(record)
        self.records.append(record)
