"""Texts that may be trained on, as Parquet files: bounded, without duplicates, with deletion.

`put` only queues: a thread writes. What cannot be written is left out and reported once, and
serving goes on. Rows have the columns that `forerun align --prompts` reads.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, Full, Queue
from types import MappingProxyType
from typing import IO, Any, NamedTuple

from forerun.atomic_write import UNFINISHED, atomic_write, remove
from forerun.bounded_read import ReadLimits, first_line, read_parquet
from forerun.engine.results import RequestOutput
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.record_file import lock_run_folder

logger = logging.getLogger("forerun.collect")

FLUSH_S = 2.0
"""Seconds in which rows are gathered for one file."""
MAX_QUEUED = 4096
"""Requests that wait to be written; further ones are left out."""
MAX_ROWS = 1024
"""Rows of a file, about; small files are merged."""
MAX_REQUEST_BYTES = 1 << 20
GROUP_ROWS = 4
"""Rows that are read at once: together not more values than a reader takes."""
ROW_BYTES = 128
"""Counted for a row beside its texts."""
NO_TEXT = MappingProxyType({"prompt": "", "response": "", "prompt_ids": [], "token_ids": []})
DEFAULT_QUOTA = 64 << 20
LIMITS = ReadLimits(max_bytes=1 << 30, max_seconds=600.0)

Row = dict[str, Any]


class Entry(NamedTuple):
    """What is remembered of a stored row; of requests with equal texts one row has the text."""

    request_id: str
    tenant: str
    digest: str
    has_text: bool
    num_bytes: int
    at_s: float
    part: Path


class TrafficStore:
    """A folder of collected texts; one process at a time writes it.

    Args:
        decode: text of token ids.
        quota_bytes: of the rows of one tenant; beyond it the oldest of the tenant give way.

    Attributes:
        num_stored: texts that were written so far, also those that are gone.
        num_left_out: requests and texts that could not be written.

    Raises:
        InvalidRequest: the folder cannot be used, or another process writes it.
    """

    def __init__(
        self, folder: Path, decode: Callable[[Sequence[int]], str], quota_bytes: int = DEFAULT_QUOTA
    ) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        self.num_stored = self.num_left_out = 0
        self._decode = decode
        self._queue: Queue[tuple[str, str, float, RequestOutput]] = Queue(MAX_QUEUED)
        self._entries: list[Entry] = []  # the oldest first
        self._digests: set[tuple[str, str]] = set()
        self._bytes = Counter[str]()
        self._guard = threading.RLock()
        self._said: set[str] = set()
        self._stop = threading.Event()
        self._writer = threading.Thread(target=self._write_queued, name="forerun-collect")
        self._lock: IO[bytes] | None = None

    def __enter__(self) -> TrafficStore:
        import pyarrow  # noqa: F401 (missing here, and not in the thread)

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.folder.chmod(0o700)
            self._lock = lock_run_folder(self.folder, "serve --collect")
            for scratch in self.folder.glob(f"*{UNFINISHED}"):
                remove(scratch)
            for part in self._list_parts():
                self._note(_read_rows(part), part)
        except (OSError, UnreadableInput) as error:
            raise InvalidRequest(f"texts cannot be collected in {self.folder}: {error}") from error
        self._writer.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Write what is queued, and leave the folder."""
        self._stop.set()
        self._writer.join()
        if self._lock is not None:
            self._lock.close()

    def put(self, request_id: str, tenant: str, output: RequestOutput) -> None:
        """Queue the texts of a finished request; takes microseconds."""
        try:
            self._queue.put_nowait((request_id, tenant, time.time(), output))
        except Full:
            self.num_left_out += 1
            self._say("busy", "texts come faster than they are written, and some are left out")

    def delete(self, request_id: str, tenant: str) -> int:
        """Delete the texts of a request of a tenant from the disk; returns how many there were.

        A text that other requests of the tenant had too is deleted with their rows.
        """
        with self._guard:
            self._flush()
            own = [e for e in self._entries if e.tenant == tenant]
            digests = {e.digest for e in own if e.request_id == request_id}
            self._drop([e for e in own if e.digest in digests])
            return len(digests)

    def count(self, since_s: float = 0.0) -> int:
        """Return the number of texts stored since a Unix time."""
        with self._guard:
            return sum(entry.has_text and entry.at_s >= since_s for entry in self._entries)

    def export(self, path: Path, most: int) -> int:
        """Write the newest texts to a file that `forerun align` reads; returns how many."""
        with self._guard:
            self._flush()
            rows = [row for part in self._list_parts() for row in _read_rows(part)]
        rows = [row for row in rows if row["token_ids"]][-most:]
        _write_rows(rows, path)
        return len(rows)

    # -------------------------------------------------------------------------------------- writing

    def _write_queued(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._flush()
        self._flush()

    def _flush(self) -> None:
        """Write what is queued; an error is reported, and these texts are left out."""
        with self._guard:
            rows: list[Row] = []
            known = set[tuple[str, str]]()
            named = set[tuple[str, str, str]]()
            while True:
                try:
                    request_id, tenant, at_s, output = self._queue.get_nowait()
                except Empty:
                    break
                for row in self._build_rows(output):
                    key = tenant, row["digest"]
                    if (*key, request_id) in named:
                        continue
                    named.add((*key, request_id))
                    text = NO_TEXT if key in self._digests or key in known else {}
                    known.add(key)
                    about = {"request_id": request_id, "tenant": tenant, "at_s": at_s}
                    rows.append({**row, **about, **text})
            if not rows:
                return
            try:
                self._append(rows)
                self._said.discard("disk")
            except (OSError, UnreadableInput) as error:
                self.num_left_out += len(rows)
                self._say("disk", f"texts are not collected at present: {error}")

    def _build_rows(self, output: RequestOutput) -> list[Row]:
        """Return a row per answer that ended by itself or at its length."""
        prompt_ids = list(output.prompt_token_ids)
        rows = []
        for answer in output.completions:
            token_ids = list(answer.token_ids)
            if answer.finish_reason in ("stop", "length") and token_ids and answer.text:
                digest = hashlib.sha256(repr((prompt_ids, token_ids)).encode()).hexdigest()[:32]
                rows.append(
                    {
                        "digest": digest,
                        "prompt": self._decode(prompt_ids),
                        "response": answer.text,
                        "prompt_ids": prompt_ids,
                        "token_ids": token_ids,
                    }
                )
        return [row for row in rows if _count_bytes(row) <= MAX_REQUEST_BYTES]

    def _append(self, rows: list[Row]) -> None:
        """Write rows into the newest file if it is small, and into a new one otherwise."""
        parts = self._list_parts()
        part = self.folder / f"{len(parts) and int(parts[-1].stem) + 1:012d}.parquet"
        before: list[Row] = []
        if parts and sum(e.part == parts[-1] for e in self._entries) + len(rows) <= MAX_ROWS:
            part = parts[-1]
            before = _read_rows(part)
        _write_rows(before + rows, part)
        self._note(rows, part)
        self.num_stored += sum(bool(row["token_ids"]) for row in rows)
        self._enforce_quotas({row["tenant"] for row in rows})

    def _enforce_quotas(self, tenants: set[str]) -> None:
        """Delete the oldest texts of tenants that have more than their quota."""
        dropped, num_bytes = [], self._bytes.copy()
        for entry in self._entries:
            if entry.tenant in tenants and num_bytes[entry.tenant] > self.quota_bytes:
                num_bytes[entry.tenant] -= entry.num_bytes
                dropped.append(entry)
                self._say(
                    f"quota of {entry.tenant}",
                    f"the texts of {entry.tenant} reach the quota of {self.quota_bytes} bytes: the "
                    "oldest give way to new ones",
                )
        self._drop(dropped)

    def _drop(self, dropped: Sequence[Entry]) -> None:
        """Delete rows from their files.

        Files with texts come first: what is interrupted then can be asked for again.
        """
        with_texts = {entry.part for entry in dropped if entry.has_text}
        for part in sorted({entry.part for entry in dropped}, key=lambda p: p not in with_texts):
            own = {entry for entry in dropped if entry.part == part}
            gone = {(e.tenant, e.digest, e.request_id) for e in own}
            kept = [row for row in _read_rows(part) if _find_key(row) not in gone]
            if kept:
                _write_rows(kept, part)
            else:
                part.unlink()
            self._entries = [e for e in self._entries if e not in own]
            for entry in own:
                self._bytes[entry.tenant] -= entry.num_bytes
                if entry.has_text:
                    self._digests.discard((entry.tenant, entry.digest))

    def _note(self, rows: Sequence[Row], part: Path) -> None:
        for row in rows:
            size, has_text = _count_bytes(row), bool(row["token_ids"])
            tenant, digest, name = _find_key(row)
            self._entries.append(Entry(name, tenant, digest, has_text, size, row["at_s"], part))
            if has_text:
                self._digests.add((tenant, digest))
            self._bytes[tenant] += size

    def _list_parts(self) -> list[Path]:
        return sorted(self.folder.glob("*.parquet"))

    def _say(self, kind: str, text: str) -> None:
        """Log a message once, until it may be true anew."""
        if kind not in self._said:
            self._said.add(kind)
            logger.warning("%s", text)


def _find_key(row: Row) -> tuple[str, str, str]:
    return row["tenant"], row["digest"], row["request_id"]


def _count_bytes(row: Row) -> int:
    """Return the bytes that count for the quota: texts, four per token, and those of the row."""
    texts = len(row["prompt"].encode()) + len(row["response"].encode())
    return texts + 4 * (len(row["prompt_ids"]) + len(row["token_ids"])) + ROW_BYTES


def _read_rows(part: Path) -> list[Row]:
    return [row for batch in read_parquet(part, limits=LIMITS) for row in batch.to_pylist()]


def _write_rows(rows: Sequence[Row], path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    ids = pa.list_(pa.int32())
    kinds = {"at_s": pa.float64(), "prompt_ids": ids, "token_ids": ids}
    texts = ("request_id", "tenant", "digest", "prompt", "response")
    schema = pa.schema([*((name, pa.string()) for name in texts), *kinds.items()])
    try:
        with atomic_write(path) as scratch:
            table = pa.Table.from_pylist(list(rows), schema)
            pq.write_table(table, scratch, row_group_size=GROUP_ROWS)
    except pa.ArrowException as error:
        raise OSError(f"{path}: {first_line(error)}") from error
