"""Buffering, flushing, and what a failing file costs: nothing but the rest of the trace."""

from __future__ import annotations

import errno
import logging
from io import RawIOBase

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP, steps

from forerun.trace.files import DECODER, Record, TraceWriter


@pytest.fixture(autouse=True)
def short_buffers(monkeypatch):
    monkeypatch.setattr("forerun.trace.files.NUM_BUFFERED", 4)
    monkeypatch.setattr("forerun.trace.files.BUFFERED_S", 0.5)


class Pile(RawIOBase):
    """A file that keeps the records of every write, and refuses from some write on."""

    def __init__(self, refuse_from: int = 1000, *, refuse_close: bool = False) -> None:
        self.writes: list[list[Record]] = []
        self.refuse_from = refuse_from
        self.refuse_close = refuse_close
        self.num_tries = 0

    def write(self, data) -> int:
        self.num_tries += 1
        if self.num_tries > self.refuse_from:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.writes.append([DECODER.decode(line) for line in bytes(data).splitlines()])
        return len(data)

    def close(self) -> None:
        if self.refuse_close:
            self.refuse_close = False
            raise OSError(errno.EIO, "Input/output error")


def test_records_are_written_in_order_and_many_at_a_time():
    pile = Pile()
    writer = TraceWriter(pile, "t")
    records = [HEADER, *steps(9), REQUEST]
    for record in records:
        writer.add(record)
    assert [len(write) for write in pile.writes] == [4, 4]
    writer.close()
    assert [record for write in pile.writes for record in write] == records
    assert writer.num_written == len(records)


def test_what_waits_is_written_when_the_steps_say_that_time_has_passed():
    pile = Pile()
    writer = TraceWriter(pile, "t")
    times = [10.0, 10.4, 10.5, 10.6, 11.2]
    for record, t_s in zip(steps(5), times, strict=True):
        writer.add(type(STEP)(**record.to_dict() | {"t_s": t_s}))
    assert [[record.t_s for record in write] for write in pile.writes] == [times[:3], times[3:]]


def test_nothing_is_written_twice_or_where_nothing_waits():
    pile = Pile()
    writer = TraceWriter(pile, "t")
    writer.flush()
    writer.add(STEP)
    writer.flush()
    writer.flush()
    writer.close()
    assert pile.writes == [[STEP]]


def test_a_caller_may_say_what_the_engine_does_not_know():
    pile = Pile()
    writer = TraceWriter(pile, "t")
    writer.add(STEP, {"drafter_hash": "d0", "token_ids": (1, 2)})
    writer.add(REQUEST, {"request_id": "K=2/r"})
    writer.close()
    changed = replace(STEP, drafter_hash="d0", token_ids=(1, 2))
    assert pile.writes == [[changed, replace(REQUEST, request_id="K=2/r")]]


def test_a_full_disk_is_said_once_and_ends_the_trace_only(caplog):
    pile = Pile(refuse_from=1)
    writer = TraceWriter(pile, "runs/t.jsonl")
    with caplog.at_level(logging.WARNING, "forerun"):
        for record in steps(100):
            writer.add(record)
        writer.close()
    assert pile.writes == [list(steps(4))]
    assert pile.num_tries == 2
    assert writer.failed
    (message,) = caplog.messages
    assert message == (
        "the trace runs/t.jsonl cannot be written (No space left on device); it ends after "
        "4 records, the rest goes on"
    )


def test_a_failed_trace_keeps_nothing_in_memory():
    writer = TraceWriter(Pile(refuse_from=0), "t")
    for record in steps(50):
        writer.add(record)
    assert writer._waiting == []


def test_a_file_that_fails_on_closing_is_said_too(caplog):
    with caplog.at_level(logging.WARNING, "forerun"):
        TraceWriter(Pile(refuse_close=True), "t").close()
    assert "Input/output error" in caplog.text


def test_a_defect_of_a_file_is_not_hidden(monkeypatch):
    pile = Pile()
    monkeypatch.setattr(pile, "write", lambda rows: 1 / 0)
    writer = TraceWriter(pile, "t")
    writer.add(STEP)
    with pytest.raises(ZeroDivisionError):
        writer.flush()
