"""Where an alignment keeps what it makes.

One process at a time writes to a place; the system frees it when that process ends, however.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from forerun.errors import InvalidRequest

__all__ = ["Workspace", "exclusive_access", "lock_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """The folder of one alignment; everything in it can be made again, the draft excepted.

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
        """What target and draft answered, one file per maker."""
        return self.root / "responses"

    @property
    def cache(self) -> Path:
        """The teacher's caches."""
        return self.cache_root or self.root / "cache"

    @property
    def training(self) -> Path:
        """Checkpoint of the run."""
        return self.root / "training"

    @property
    def metrics(self) -> Path:
        """Every optimiser step, as lines of JSON."""
        return self.root / "metrics.jsonl"

    @property
    def judgements(self) -> Path:
        """What drafts were found to be worth on the way, as lines of JSON."""
        return self.root / "judgements.jsonl"

    @property
    def settings(self) -> Path:
        """What was asked for: what `--refresh` goes on from."""
        return self.root / "align.json"

    @property
    def identity(self) -> Path:
        """What the alignment is a function of: whoever goes on must bring the same."""
        return self.root / "identity.json"

    @property
    def report(self) -> Path:
        """What came out."""
        return self.root / "report.json"

    def picture(self, name: str) -> Path:
        """A picture of the report."""
        return self.root / f"{name}.svg"

    def snapshot(self, step: int) -> Path:
        """The draft after so many steps."""
        return self.root / "snapshots" / str(step)


def lock_for(path: Path) -> FileLock:
    """A lock for a file, kept in an empty one beside it.

    Holding it twice in one process takes the same lock twice: another one for the same file is
    another writer.
    """
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def exclusive_access(lock: FileLock, what: Path) -> Iterator[None]:
    """Write alone.

    Args:
        lock: of `what`.
        what: is written, for the message.

    Raises:
        InvalidRequest: another process writes there, or nobody can.
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
