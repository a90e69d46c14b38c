"""How much disk a teacher's cache takes, said before anything is written."""

from __future__ import annotations

import logging
import shutil
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import CacheTooLarge
from forerun.models.memory import readable

__all__ = ["RowSizes", "allowed_bytes", "check_room"]

logger = logging.getLogger("forerun.preparation")

ID_BYTES, COUNT_BYTES = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSizes:
    """Disk that a cache takes.

    Attributes:
        what: is cached, for people.
        row_bytes: of a learned row, at most.
        fixed_bytes: whatever the number of rows.
    """

    what: str
    row_bytes: int
    fixed_bytes: int = 0

    @classmethod
    def of_states(cls, *, width: int, vocab_size: int, itemsize: int) -> RowSizes:
        """Hidden states, and the head that makes logits of them."""
        return cls(
            what="last hidden states",
            row_bytes=width * itemsize,
            fixed_bytes=(width + 1) * vocab_size * itemsize,
        )

    @classmethod
    def of_ids(cls, num_ids: int) -> RowSizes:
        """Drawn ids with counts, and how many of them are distinct."""
        return cls(what="drawn ids", row_bytes=num_ids * (ID_BYTES + COUNT_BYTES) + COUNT_BYTES)

    def total_bytes(self, num_rows: int) -> int:
        """Of so many rows."""
        return self.fixed_bytes + num_rows * self.row_bytes


def check_room(folder: Path, num_rows: int, sizes: RowSizes, max_bytes: int | None) -> None:
    """Say what will be written, and refuse what does not fit.

    Args:
        folder: of the cache, there or not.
        num_rows: learned rows to write.
        sizes: of the rows.
        max_bytes: most bytes they may take; None: nine tenths of what the disk has free.

    Raises:
        CacheTooLarge: they do not fit; nothing has been written.
    """
    needed, allowed = sizes.total_bytes(num_rows), allowed_bytes(folder, max_bytes)
    logger.info(
        "caching %s of %s positions in %s: %s (%s each), %s may be taken",
        sizes.what,
        f"{num_rows:,}",
        folder,
        readable(needed),
        readable(sizes.row_bytes),
        readable(allowed),
    )
    if needed > allowed:
        raise CacheTooLarge(
            f"{sizes.what} of {num_rows:,} positions take {readable(needed)}, {readable(allowed)} "
            f"may be taken in {folder}: use fewer prompts, another folder, a higher limit, or the "
            "teacher that reruns the target (model)"
        )


def allowed_bytes(folder: Path, max_bytes: int | None) -> int:
    """What may be written: never more than nine tenths of what the disk has free."""
    existing = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    free = shutil.disk_usage(existing).free * 9 // 10
    return free if max_bytes is None else min(free, max_bytes)
