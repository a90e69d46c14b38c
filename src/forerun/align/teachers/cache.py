"""Cache of a teacher on disk: rows of tensors per sample, in safetensors shards.

A shard is written whole or not at all, and its name ends in the hash of its content: a process that
is killed loses only the shard it was filling, and a damaged shard is computed again. The name of
the folder has everything that decides its content, so the cache of a changed target is never used.
The target runs once over every sample that is missing, if the disk has room.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from forerun.align.progress import OnProgress
from forerun.align.samples import PackedBatch, Sample
from forerun.align.teachers.base import ProcessShare, RowSizes, check_room, one_per_row, passes
from forerun.align.teachers.target import TargetModel, check_samples
from forerun.atomic_write import atomic_write
from forerun.cache import hash_of, is_whole, write_cached
from forerun.errors import CacheTooLarge, InvalidCache, NumericalError

logger = logging.getLogger("forerun.cache")

FORMAT = 1
DESCRIPTION = "cache.json"
SHARD, SUFFIX = "rows", ".safetensors"
SHARD_BYTES = 1 << 27
"""What is lost at most to an interruption."""
MAX_OPEN = 256
"""Shards open at once for reading."""
ENTRIES = "entries"

Columns = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheIdentity:
    """All settings that influence the cached rows of a given sample."""

    kind: str
    target_hash: str
    tokenizer_hash: str
    template_hash: str
    settings: Mapping[str, str | int | float]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, indent=1) + "\n"

    @property
    def folder_name(self) -> str:
        return f"{self.kind}-{hash_of(self.to_json().encode())}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEntry:
    """Location of a sample's cached rows: a shard, and a range in every column."""

    shard: Path
    ranges: Mapping[str, tuple[int, int]]


def key_of(sample: Sample) -> str:
    """Return the key of a sample's rows: the hash of its text and of its learned ranges."""
    content = json.dumps([sample.prompt_hash, sample.token_ids, sample.spans])
    return hash_of(content.encode())


class RowCache:
    """Rows of tensors by key, stored on disk in shards."""

    def __init__(self, root: Path, identity: CacheIdentity) -> None:
        self.folder = root / identity.folder_name
        self.identity = identity
        self._pending: dict[str, Columns] = {}
        self._pending_bytes = 0
        self._open: dict[Path, Any] = {}

    @cached_property
    def _entries(self) -> dict[str, CacheEntry]:
        self._check_identity()
        found: dict[str, CacheEntry] = {}
        for shard in sorted(self.folder.glob(f"{SHARD}-*{SUFFIX}")):
            found |= entries_of(shard)
        return found

    def _check_identity(self) -> None:
        path = self.folder / DESCRIPTION
        if path.exists() and path.read_text(encoding="utf-8") != self.identity.to_json():
            raise InvalidCache(
                f"{self.folder} is the cache of another target, tokenizer, template or setting "
                f"(see {DESCRIPTION} in it); delete the folder, or name another one for caches"
            )

    def lacking(self, keys: Sequence[str]) -> list[str]:
        """Return the keys without undamaged rows, each once, after reading every shard needed."""
        wanted = dict.fromkeys(keys)
        for shard in {self._entries[key].shard for key in wanted if key in self._entries}:
            if not is_whole(shard):
                self._drop(shard)
        return [key for key in wanted if key not in self._entries]

    def _drop(self, shard: Path) -> None:
        logger.warning("%s is damaged; its content is computed again", shard)
        for key in [key for key, entry in self._entries.items() if entry.shard == shard]:
            del self._entries[key]
        with suppress(OSError):
            shard.unlink()

    def look_again(self) -> None:
        for shard in sorted(self.folder.glob(f"{SHARD}-*{SUFFIX}")):
            self._entries.update(entries_of(shard))

    def read(self, key: str) -> dict[str, Tensor]:
        entry = self._entries.get(key)
        if entry is None:
            raise InvalidCache(f"{self.folder} has no rows of a sample that was not prepared")
        try:
            file = self._opened(entry.shard)
            return {name: file.get_slice(name)[a:b] for name, (a, b) in entry.ranges.items()}
        except (OSError, SafetensorError) as error:
            raise InvalidCache(
                f"{entry.shard} cannot be read any more: {error}; start again, and its content is "
                "computed again"
            ) from error

    def _opened(self, shard: Path) -> Any:
        """Return an open shard; at the limit, the shard that was opened first is closed."""
        if shard not in self._open:
            if len(self._open) == MAX_OPEN:
                del self._open[next(iter(self._open))]
            self._open[shard] = safe_open(shard, framework="pt")
        return self._open[shard]

    def put(self, key: str, columns: Columns) -> None:
        """Add rows under a key; they are on disk once a shard is full, or after `flush`."""
        self._pending[key] = {name: column.contiguous() for name, column in columns.items()}
        self._pending_bytes += sum(column.nbytes for column in columns.values())
        if self._pending_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the pending rows as one more shard; raises CacheTooLarge if the disk is full."""
        if not self._pending:
            return
        content, ranges = packed(self._pending)
        with full_disk_named(self.folder):
            self._write_description()
            shard = write_cached(self.folder, SHARD, SUFFIX, content)
        for key, places in ranges.items():
            self._entries[key] = CacheEntry(shard=shard, ranges=places)
        self._pending, self._pending_bytes = {}, 0

    def _write_description(self) -> None:
        path = self.folder / DESCRIPTION
        if not path.exists():
            with atomic_write(path) as scratch:
                scratch.write_text(self.identity.to_json(), encoding="utf-8")


def packed(pending: Mapping[str, Columns]) -> tuple[bytes, dict[str, dict[str, tuple[int, int]]]]:
    """Pack rows into the bytes of a shard, whose header has the ranges of every key."""
    ends: dict[str, int] = {}
    ranges: dict[str, dict[str, tuple[int, int]]] = {}
    for key, columns in pending.items():
        ranges[key] = {}
        for name, column in columns.items():
            start = ends.get(name, 0)
            ends[name] = start + len(column)
            ranges[key][name] = (start, ends[name])
    tensors = {name: torch.cat([columns[name] for columns in pending.values()]) for name in ends}
    return save(tensors, {ENTRIES: json.dumps(ranges)}), ranges


def entries_of(shard: Path) -> dict[str, CacheEntry]:
    """Return the entries in a shard's header; none if it is damaged."""
    try:
        with safe_open(shard, framework="pt") as file:
            ranges: dict[str, dict[str, Any]] = json.loads(file.metadata()[ENTRIES])
        return {
            key: CacheEntry(shard=shard, ranges={name: (a, b) for name, (a, b) in places.items()})
            for key, places in ranges.items()
        }
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        logger.warning("%s is damaged; its content is computed again", shard)
        with suppress(OSError):
            shard.unlink()
        return {}


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Raise CacheTooLarge when the disk is full; other disk errors are raised unchanged."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise CacheTooLarge(
            f"the disk of {folder} is full; finished shards are kept and are not computed again: "
            "make room, or name another folder for caches, and start again"
        ) from error


MAX_TOKENS = 4096
"""Tokens of one pass over the target."""

MakeColumns = Callable[[TargetModel, Sample, Float[Tensor, "rows *states"]], Mapping[str, Tensor]]
"""What is kept of a sample, from the target's hidden states at its learned rows."""
ReadRows = Callable[[TargetModel, PackedBatch], Float[Tensor, "learned ..."]]
"""What a pass of the target gives for the learned rows of a batch."""


@dataclass(kw_only=True, eq=False)
class CacheFiller:
    """Fills a cache, and resumes where an earlier run was interrupted.

    Args:
        load: gives the target; called only if something is lacking.
        max_bytes: most bytes to write; None: nine tenths of what the disk has free.
        on_progress: called after every pass with the learned rows done, of this process's share.
    """

    cache: RowCache
    load: Callable[[], TargetModel]
    sizes: RowSizes
    max_bytes: int | None
    on_progress: OnProgress
    share: ProcessShare

    def fill(
        self,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        read: ReadRows = TargetModel.hidden,
    ) -> TargetModel | None:
        by_key = {key_of(sample): sample for sample in samples}
        lacking = [by_key[key] for key in self.cache.lacking([*by_key])]
        if lacking:
            num_rows = sum(sample.num_learned for sample in lacking)
            check_room(self.cache.folder, num_rows, self.sizes, self.max_bytes)
        self.share.wait()  # no process writes before all have listed what is lacking
        if not lacking:
            return None
        target = self.load()
        check_samples(lacking, target)
        try:
            self._run(target, lacking, make_columns, read)
        finally:  # keep what was computed, also after an error
            self.cache.flush()
        self.share.wait()
        self.cache.look_again()
        return target

    def _run(
        self,
        target: TargetModel,
        samples: Sequence[Sample],
        make_columns: MakeColumns,
        read: ReadRows,
    ) -> None:
        parts = [*self.share.of([*passes(samples, MAX_TOKENS)])]
        num_rows = sum(samples[index].num_learned for part, kept in parts for index in part if kept)
        num_done = 0
        for part, kept in parts:
            states = read(target, one_per_row(samples, part))
            if not kept:
                continue
            lengths = [samples[index].num_learned for index in part]
            for index, own in zip(part, torch.split(states, lengths), strict=True):
                if not bool(own.isfinite().all()):
                    raise NumericalError(
                        "the target's hidden states are not finite in a response to the prompt "
                        f"{samples[index].prompt_hash}; load it in bf16 or fp32"
                    )
                self.cache.put(key_of(samples[index]), make_columns(target, samples[index], own))
            num_done += sum(lengths)
            self.on_progress(num_done, num_rows)
