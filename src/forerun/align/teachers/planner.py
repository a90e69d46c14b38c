"""How much disk a teacher's cache takes, said before anything is written."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import CacheTooLarge
from forerun.models.memory import readable

__all__ = ["CachePlan", "RowSizes", "allowed_bytes", "plan_cache"]

logger = logging.getLogger("forerun.preparation")

ID_BYTES, COUNT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Disk that a cache takes.

    Attributes:
        row_bytes: of a learned row, at most.
        fixed_bytes: whatever the number of rows.
    """

    row_bytes: int
    fixed_bytes: int = 0

    @classmethod
    def of_states(cls, *, width: int, vocab_size: int, itemsize: int) -> RowSizes:
        """Hidden states, and the head that makes logits of them."""
        return cls(row_bytes=width * itemsize, fixed_bytes=(width + 1) * vocab_size * itemsize)

    @classmethod
    def of_ids(cls, num_ids: int) -> RowSizes:
        """Drawn ids with counts, and how many of them are distinct."""
        return cls(row_bytes=num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES)

    def total_bytes(self, num_rows: int) -> int:
        """Of so many rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What is about to be written.

    Attributes:
        what: for people: "last hidden states".
        folder: where.
        num_rows: learned rows that are not there yet.
        needed_bytes: what they take at most.
        allowed_bytes: what they may take.
        row_bytes: of each.
    """

    what: str
    folder: Path
    num_rows: int
    needed_bytes: int
    allowed_bytes: int
    row_bytes: int

    def check(self) -> None:
        """Say what will be written, and refuse what does not fit.

        Raises:
            CacheTooLarge: it does not; nothing has been written.
        """
        logger.info(
            "caching %s of %s positions in %s: %s (%s each), %s may be taken",
            self.what,
            f"{self.num_rows:,}",
            self.folder,
            readable(self.needed_bytes),
            readable(self.row_bytes),
            readable(self.allowed_bytes),
        )
        if self.needed_bytes > self.allowed_bytes:
            raise CacheTooLarge(
                f"{self.what} of {self.num_rows:,} positions take {readable(self.needed_bytes)}, "
                f"{readable(self.allowed_bytes)} may be taken in {self.folder}: use fewer prompts, "
                "another folder, a higher limit, or the teacher that reruns the target (model)"
            )


def plan_cache(
    what: str, folder: Path, num_rows: int, sizes: RowSizes, max_bytes: int | None
) -> CachePlan:
    """Plan rows that are lacking in a cache.

    Args:
        what: for people.
        folder: of the cache, there or not.
        num_rows: learned rows to write.
        sizes: of the rows.
        max_bytes: most bytes they may take; None: nine tenths of what the disk has free.
    """
    return CachePlan(
        what=what,
        folder=folder,
        num_rows=num_rows,
        needed_bytes=sizes.total_bytes(num_rows),
        allowed_bytes=allowed_bytes(folder, max_bytes),
        row_bytes=sizes.row_bytes,
    )


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    """What may be written: never more than nine tenths of what the disk has free."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)
