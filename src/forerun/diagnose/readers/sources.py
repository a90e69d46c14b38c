"""Returns the evidence of a source by its name: a trace, a text, standard input or a URL."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from forerun.bounded_read import BoundedFile, ReadLimits, open_bounded, open_stdin
from forerun.diagnose.evidence import Evidence
from forerun.errors import InvalidRequest, UnreadableInput

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
LIMITS = ReadLimits(max_bytes=1 << 32, max_seconds=600.0)
"""Of a source. A log is read from a pipe for as long as its server runs, hence the minutes."""
FIRST_DATA_S = 20.0
"""How long a named pipe may take until its writer has written anything."""


def read_source(name: str, *, interval_s: float) -> Evidence:
    """Return the evidence of one source.

    Args:
        name: a path, - for stdin, or an http(s) URL.
        interval_s: between the two samples of a URL.

    Raises:
        InvalidRequest: it cannot be read, or nothing in it is understood.
    """
    if name.startswith(("http://", "https://")):
        from forerun.diagnose.readers.live import read_live

        return read_live(name, interval_s=interval_s)
    try:
        if name == "-":
            with open_stdin(LIMITS) as stream:
                return read_stream(stream, "stdin")
        path = Path(name)
        if path.is_dir():
            return read_trace(path)
        with open_bounded(path, LIMITS, name=path.name) as file:
            file.wait_for_data(FIRST_DATA_S)
            if file.peek(len(TRACE_START)) == TRACE_START and path.is_file():
                return read_trace(path)
            return read_stream(file, path.name)
    except OSError as error:
        raise InvalidRequest(f"{name[:300]} cannot be read: {error.strerror or error}") from error
    except UnreadableInput as error:
        raise InvalidRequest(str(error)) from error


def read_trace(path: Path) -> Evidence:
    """Return the evidence of a trace of forerun; pyarrow is loaded for traces only."""
    from forerun.diagnose.readers.trace.reader import read_trace_evidence

    return read_trace_evidence(path)


def read_stream(file: BoundedFile, name: str) -> Evidence:
    """Return the evidence of a stream; a trace is copied into a file first."""
    if file.peek(len(TRACE_START)) != TRACE_START:
        from forerun.diagnose.readers.text import read_text

        return read_text(file, name)
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        with path.open("wb") as copy:
            while chunk := file.read():
                copy.write(chunk)
        return read_trace(path)


def as_reference(evidence: Evidence) -> Evidence:
    """Return the figures of a run as those of the reference that another run is compared with."""
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
