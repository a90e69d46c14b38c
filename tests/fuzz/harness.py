"""Readers against hostile inputs: mutated seeds, with limits on time and memory.

A target is a function of bytes. `fuzz_test` makes a test of it:

    test_notes = fuzz_test(lambda data: read_notes(io.BytesIO(data)), seeds=[b"{}", b"[" * 9999])

Every seed is run as it is, then mutated. In the suite this takes seconds and is the same every
time; `make fuzz SECONDS=3600` runs every target for an hour.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError

__all__ = ["fuzz_test", "mutated"]

SECONDS = float(os.environ.get("FORERUN_FUZZ_SECONDS", "0"))
MAX_INPUT_S = 30.0
MAX_GROWTH_BYTES = 512 << 20
MAX_MUTATED = 20_000
"""Bytes; larger seeds are run as they are."""
ROUND = 500
"""Mutations between two looks at the clock of an opt-in run."""
PIECES = (
    *(b"1e9", b"1000000000", b"9223372036854775808", b"4611686018427387904", b"-1", b"1e308"),
    *(b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b'""', b"9" * 400, b"1e400"),
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 500, b"\n" * 3000, b" " * 3000, b"\x00" * 64),
    *(b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[31m", b"\x1b]0;x\x07", "\u202e".encode(), b"&a *a"),
    *(b"../../../etc/passwd", b"%s%n{{7*7}}<script>", b"x" * 5000, b",", b":", b'"', b"\\"),
)


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes]) -> bytes:
    """A seed after some edits."""
    data = draw(st.sampled_from(seeds))
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.sampled_from([0, 0, 1, 4, 20, 1000])))
        piece = draw(
            st.one_of(
                st.sampled_from(PIECES),
                st.binary(max_size=8),
                st.just(data[start:end] * 50),
                st.just(b""),
            )
        )
        data = (data[:start] + piece + data[end:])[: 1 << 16]
    return data


def run_bounded(read: Callable[[bytes], object], data: bytes) -> None:
    """Run a reader: it returns or raises one of our errors, in bounded time and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    started = time.process_time()
    try:
        read(data)
    except ForerunError as error:
        assert str(error), "an error without a message"
        assert len(str(error)) < 5000, "a message that repeats the input"
    seconds = time.process_time() - started
    assert seconds < MAX_INPUT_S, f"took {seconds:.0f} s"
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) - before
    assert growth < MAX_GROWTH_BYTES, f"took {growth >> 20} MiB"


def fuzz_test(
    read: Callable[[bytes], object], seeds: Sequence[bytes], *, num_examples: int = 60
) -> Callable[..., None]:
    """A test that runs a reader over seeds and mutations of them.

    Args:
        read: takes the content of a file, a page or an answer; it may raise `ForerunError` only.
        seeds: valid inputs, and hostile ones that were found.
        num_examples: mutated inputs in the suite; an opt-in run tries as many as it has time for.
    """

    @settings(
        max_examples=ROUND if SECONDS else num_examples,
        derandomize=not SECONDS,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(data=mutated([seed for seed in seeds if len(seed) <= MAX_MUTATED] or [b""]))
    def mutations(data: bytes) -> None:
        run_bounded(read, data)

    @pytest.mark.filterwarnings("ignore")
    def test() -> None:
        for seed in seeds:
            run_bounded(read, seed)
        end_s = time.monotonic() + SECONDS
        mutations()
        while time.monotonic() < end_s:
            mutations()

    return test
