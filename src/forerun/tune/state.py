"""The folder of a run of `forerun tune`, from which an interrupted run goes on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from forerun.errors import InvalidRequest, UnreadableInput
from forerun.record_file import RecordFile, lock_run_folder
from forerun.tune.arms import Load
from forerun.tune.load import LoadBlock

FORMAT = "1"
OWN_FILES = {".lock", "logs", "state.jsonl"}
"""What a run may leave in its folder before its first record."""


class Header(msgspec.Struct, frozen=True, tag="header"):
    """The settings that decide what a run measures, as text by name."""

    settings: dict[str, str]


class BlockRecord(msgspec.Struct, frozen=True, kw_only=True, tag="block"):
    """A measured block.

    Attributes:
        is_final: whether it is of the final measurement, whose prompts chose nothing.
    """

    block: LoadBlock
    is_final: bool = False


class PromptsRecord(msgspec.Struct, frozen=True, kw_only=True, tag="prompts"):
    """What decides which prompts the blocks have.

    Attributes:
        run: number in the first lines of prompts that are used again.
        is_chat: whether prompts are sent as conversations.
        left_out: why prompts are no longer sent, by name.
    """

    run: int
    is_chat: bool
    left_out: dict[str, str] = {}


class GivenUpRecord(msgspec.Struct, frozen=True, kw_only=True, tag="given up"):
    """An arm that is measured no more at a load."""

    arm: str
    reason: str
    load: Load


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True, tag="audit"):
    """The audit of an arm, in JSON values."""

    arm: str
    report: dict[str, Any]


Record: TypeAlias = BlockRecord | PromptsRecord | GivenUpRecord | AuditRecord


class RunState:
    """What a run measured and decided, in `state.jsonl`, one record appended at a time.

    Used in a `with` statement, while which no other run can use the folder.

    Args:
        folder: created if it does not exist.
        settings: a run goes on only with the same ones.

    Attributes:
        records: those of the interrupted run and of this one, in their order.
    """

    def __init__(self, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self._header = Header({**settings, "format": FORMAT})
        self._file = RecordFile[Header | Record](folder / "state.jsonl", Header | Record)
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> RunState:
        """Take the folder and read it.

        Raises:
            InvalidRequest: another run uses it, it is of a run with other settings, or it cannot
                be read or written.
        """
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = lock_run_folder(self.folder, "tune")
            self.records = self._load()
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError | UnreadableInput):
                raise InvalidRequest(
                    f"--out {self.folder} cannot be used: {error}; name another folder"
                ) from error
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append(self, record: Record) -> None:
        """Append a record, and wait until it is on the disk."""
        self._file.append(record)
        self.records.append(record)

    def _load(self) -> list[Record]:
        if self._file.is_empty():
            others = {path.name for path in self.folder.iterdir()} - OWN_FILES
            if others:
                raise InvalidRequest(
                    f"--out {self.folder} has files that tune did not write ({min(others)!r:.100}, "
                    "...); name a new folder"
                )
            self._file.append(self._header)
            return []
        found = self._file.read()
        if not found or not isinstance(first := found[0], Header):
            raise InvalidRequest(
                f"{self._file.path} is not of forerun tune; name another folder with --out"
            )
        kept, wanted = first.settings, self._header.settings
        changes = [
            f"{name} was {kept.get(name, 'not set')}, is {wanted.get(name, 'not set')}"
            for name in sorted(kept.keys() | wanted.keys())
            if kept.get(name) != wanted.get(name)
        ]
        if changes:
            raise InvalidRequest(
                f"{self.folder} holds a run with other settings ({'; '.join(changes)}); name "
                "another folder with --out, or give those settings to go on"
            )
        return [record for record in found if not isinstance(record, Header)]
