"""One process at a time writes to a place; the system frees it when that process ends, however."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from forerun.errors import InvalidRequest

__all__ = ["held", "lock_beside"]


def lock_beside(path: Path) -> FileLock:
    """A lock for a file, kept in an empty one beside it.

    Holding it twice in one process takes the same lock twice: another one for the same file is
    another writer.
    """
    return FileLock(path.with_name(f".{path.name}.lock"))


@contextmanager
def held(lock: FileLock, what: Path) -> Iterator[None]:
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
