"""From the name of a source to its evidence: a trace, a text of any engine, stdin, or a URL."""

from __future__ import annotations

import shutil
import sys
from io import BufferedReader, RawIOBase
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from forerun.diagnose.evidence import Evidence
from forerun.errors import InvalidRequest

__all__ = ["as_reference", "read_source"]

REFERENCE = {
    "alpha": "reference_alpha",
    "k": "reference_k",
    "speedup": "reference_speedup",
    "acceptance_length": "reference_acceptance_length",
    "draft_acceptance_rate": "reference_acceptance_rate",
    "tokens_per_s": "tokens_per_s_before",
}
"""What a figure of an earlier or other run is called beside today's."""
TRACE_START = b'{"record":'


def read_source(name: str, *, interval_s: float) -> Evidence:
    """Evidence of one source.

    Args:
        name: a path, - for stdin, or an http(s) URL.
        interval_s: between the two samples of a URL.

    Raises:
        InvalidRequest: it cannot be read, or nothing in it is understood.
    """
    if name.startswith(("http://", "https://")):
        from forerun.diagnose.readers.live import read_live

        return read_live(name, interval_s=interval_s)
    if name == "-":
        return read_stdin(BufferedReader(cast("RawIOBase", sys.stdin.buffer)))
    from forerun.diagnose.readers.text import read_text

    path = Path(name)
    try:
        if path.is_dir() or starts_as_trace(path):
            from forerun.diagnose.readers.trace.reader import read_trace_evidence

            return read_trace_evidence(path)
        with path.open("rb") as file:
            return read_text(file, path.name)
    except OSError as error:
        raise InvalidRequest(f"{name} cannot be read: {error.strerror or error}") from error


def read_stdin(stream: BufferedReader) -> Evidence:
    """Evidence of what is piped in; a trace is put into a file first, as its reader wants one."""
    if not stream.peek(len(TRACE_START)).startswith(TRACE_START):
        from forerun.diagnose.readers.text import read_text

        return read_text(stream, "stdin")
    from forerun.diagnose.readers.trace.reader import read_trace_evidence

    with TemporaryDirectory() as folder:
        path = Path(folder) / "stdin"
        with path.open("wb") as copy:
            shutil.copyfileobj(stream, copy)
        return read_trace_evidence(path)


def starts_as_trace(path: Path) -> bool:
    """Whether the first bytes are those of our own JSON lines."""
    with path.open("rb") as file:
        return file.read(len(TRACE_START)) == TRACE_START


def as_reference(evidence: Evidence) -> Evidence:
    """The figures of a run that something is compared with, under the names they have then."""
    from forerun.diagnose.derive.costs import add_costs
    from forerun.diagnose.derive.counts import add_rates

    add_rates(evidence)
    add_costs(evidence)
    found = Evidence(readings=evidence.readings)
    for name, reference in REFERENCE.items():
        fact = evidence.facts.get(name)
        if fact is not None:
            found.add(reference, fact.value, f"before: {fact.source}", fact.interval)
    return found
