"""Traces on disk: written, read back, cut short, damaged, in both formats."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.records import FULL, HEADER, REQUEST, STEP, steps

from forerun.errors import InvalidRequest, InvalidTrace
from forerun.trace import files as jsonl
from forerun.trace.files import Damage, Record, TraceWriter, open_trace, read_trace

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "trace.jsonl"


def write(path: Path, records: Sequence[Record]) -> None:
    with open_trace(path) as writer:
        for record in records:
            writer.add(record)


def damage_in(path: Path) -> list[str]:
    return [str(item) for item in read_trace(path) if isinstance(item, Damage)]


def records_in(path: Path) -> list[Record]:
    return [item for item in read_trace(path) if not isinstance(item, Damage)]


def test_what_is_written_is_read(path):
    records = [HEADER, STEP, FULL, *steps(5000), REQUEST]
    write(path, records)
    assert list(read_trace(path)) == records


def test_lines_are_json_whatever_is_in_them(tmp_path):
    path = tmp_path / "t.jsonl"
    odd = replace(FULL, request_id='a "b" \\ %s %d\n\u2028é\x00', method="", t_s=1e9, draft_s=0)
    write(path, [odd, replace(REQUEST, parameters={"stop": ["%s"], "x": {"y": None}})])
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    assert lines[0] == {"record": "step", **json.loads(json.dumps(odd.to_dict()))}
    assert lines[1]["parameters"] == {"stop": ["%s"], "x": {"y": None}}
    assert list(lines[0])[:3] == ["record", "cycle_id", "t_s"]
    assert records_in(path)[0] == odd


def test_several_headers_and_requests_among_steps(path):
    records = [HEADER, STEP, REQUEST, HEADER, FULL]
    write(path, records)
    found = list(read_trace(path))
    assert sorted(map(repr, found)) == sorted(map(repr, records))
    assert [r for r in found if r in (STEP, FULL)] == [STEP, FULL]


def test_a_new_trace_replaces_the_old_one(path):
    write(path, [HEADER, *steps(5000), REQUEST])
    write(path, [HEADER, STEP])
    assert list(read_trace(path)) == [HEADER, STEP]


def test_a_trace_without_steps_is_whole(path):
    write(path, [HEADER])
    assert list(read_trace(path)) == [HEADER]


def test_a_trace_without_records_is_refused(path):
    write(path, [])
    with pytest.raises(InvalidTrace, match="it is empty"):
        list(read_trace(path))


def test_an_exception_outside_loses_no_record(path):
    with pytest.raises(ZeroDivisionError), open_trace(path) as writer:
        writer.add(HEADER)
        writer.add(STEP)
        raise ZeroDivisionError
    assert list(read_trace(path)) == [HEADER, STEP]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.records import HEADER, steps
from forerun.trace.files import open_trace
with open_trace(Path(sys.argv[1])) as writer:
    for record in (HEADER, *steps(700)):
        writer.add(record)
    writer.flush()
    for record in steps(100, request_id="never written"):
        writer.add(record)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def child(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )


def test_a_killed_process_leaves_what_it_had_flushed(path):
    assert child(KILLED, str(path)).returncode == -9
    assert list(read_trace(path)) == [HEADER, *steps(700)]


# No file may grow beyond 100 kB, which the system reports like a full disk.
LIMITED = """
import logging, resource, signal, sys
from pathlib import Path
from tests.records import FULL, HEADER, REQUEST, STEP, steps
from forerun.trace.files import open_trace
logging.basicConfig(format="%(message)s")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
with open_trace(Path(sys.argv[1])) as writer:
    for record in (HEADER, *steps(8)):
        writer.add(record)
    writer.flush()
    for index, record in enumerate(steps(20_000)):
        writer.add(type(record)(**record.to_dict() | {"verify_s": (index * 0.7310585) % 1.0}))
print("went on", writer.failed)
"""


def test_a_disk_that_fills_up_costs_the_end_of_the_trace_only(path):
    run = child(LIMITED, str(path))
    assert run.stdout == "went on True\n"
    (warning,) = run.stderr.splitlines()
    assert warning.startswith(f"the trace {path} cannot be written (")
    assert "the rest goes on" in warning
    found = records_in(path)
    assert found[:9] == [HEADER, *steps(8)]
    assert len(damage_in(path)) <= 1  # half a line, where a line is what is written


def test_a_device_that_is_always_full(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    path.symlink_to("/dev/full")
    write(path, [HEADER, *steps(1000)])
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "No space left on device" in caplog.text
    assert "after 0 records" in caplog.text


class Sipping(RawIOBase):
    """A file that takes a few bytes at a time, as pipes and nearly full disks do."""

    def __init__(self) -> None:
        self.content = b""

    def write(self, data: memoryview) -> int:
        self.content += bytes(data[:7])
        return min(7, len(data))


def test_partial_writes_are_completed(tmp_path, unchecked):
    file = Sipping()
    writer = TraceWriter(file, "t")
    writer.add(HEADER)
    writer.add(STEP)
    writer.flush()
    path = tmp_path / "trace.jsonl"
    path.write_bytes(file.content)
    assert list(read_trace(path)) == [HEADER, STEP]


# ------------------------------------------------------------------------------------ unwritable


@pytest.mark.parametrize("name", ["trace.txt", "trace", "trace.json", "trace.parquet"])
def test_other_suffixes_are_refused(tmp_path, name):
    with (
        pytest.raises(InvalidRequest, match=r"must end in \.jsonl"),
        open_trace(tmp_path / name),
    ):
        pass
    assert not (tmp_path / name).exists()


def test_unwritable_places_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for parent in ("nowhere", "file"):
        with (
            pytest.raises(InvalidRequest, match="cannot be written"),
            open_trace(tmp_path / parent / "t.jsonl"),
        ):
            pass


# --------------------------------------------------------------------------------- damaged lines


@pytest.fixture
def lines(tmp_path) -> tuple[Path, list[bytes]]:
    path = tmp_path / "trace.jsonl"
    write(path, [HEADER, *steps(4), REQUEST])
    return path, path.read_bytes().splitlines(keepends=True)


def test_a_line_cut_off_at_the_end(lines):
    path, content = lines
    path.write_bytes(b"".join(content)[:-30])
    assert records_in(path) == [HEADER, *steps(4)]
    offset = sum(map(len, content[:-1]))
    assert damage_in(path) == [f"line 6 (byte {offset}): cut off in the middle"]


@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (b"\x00" * 200 + b"\n", "JSON is malformed: invalid character (byte 0)"),
        (b"\xff\xfe\x80{}\n", "JSON is malformed: invalid character (byte 0)"),
        (b"[1, 2]\n", "Expected `object`, got `array`"),
        (b"[" * 100_000 + b"\n", "Expected `object`, got `array`"),
        (b'{"record": "step"}\n', "Object missing required field `cycle_id`"),
        (b'{"cycle_id": 3}\n', "Object missing required field `record`"),
        (b'{"record": "banana"}\n', "Invalid value 'banana' - at `$.record`"),
        (b'{"record": {"a": 1}}\n', "Expected `str` - at `$.record`"),
    ],
)
def test_damage_in_the_middle_costs_its_own_line(lines, bad, what):
    path, content = lines
    path.write_bytes(b"".join([*content[:3], bad, *content[3:]]))
    assert records_in(path) == [HEADER, *steps(4), REQUEST]
    assert damage_in(path) == [f"line 4 (byte {sum(map(len, content[:3]))}): {what}"]


def test_a_number_too_large_for_a_float_is_damage(lines):
    path, content = lines
    content[2] = content[2].replace(b'"draft_s":0.01', b'"draft_s":1' + b"0" * 400)
    path.write_bytes(b"".join(content))
    assert len(damage_in(path)) == 1
    assert len(records_in(path)) == 5


def test_a_line_without_end_needs_no_memory(lines, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path, content = lines
    path.write_bytes(content[0] + b"\x00" * 5000 + b"\n" + content[1])
    assert records_in(path) == [HEADER, *steps(1)]
    assert damage_in(path) == [f"line 2 (byte {len(content[0])}): longer than 1000 bytes"]
    path.write_bytes(content[0] + b"\x00" * 5000)
    assert len(damage_in(path)) == 1
    monkeypatch.setattr(jsonl, "MAX_SKIPPED_BYTES", 2000)
    path.write_bytes(content[0] + b"\x00" * 5000 + b"\n" + content[1])
    assert "the rest of the file was not read" in damage_in(path)[-1]
    assert records_in(path) == [HEADER]


def test_reading_ends_where_most_lines_are_damaged(lines, monkeypatch):
    monkeypatch.setattr(jsonl, "MAX_DAMAGED", 10)
    path, content = lines
    path.write_bytes(content[0] + b"{}\n" * 50 + content[1])
    assert damage_in(path)[-1].endswith(
        "10 parts cannot be read; the rest of the file was not read"
    )
    assert len(damage_in(path)) == 11
    assert records_in(path) == [HEADER]


def test_a_newer_schema_is_said(lines):
    path, content = lines
    content[0] = content[0].replace(b'"schema_version":1', b'"schema_version":2')
    path.write_bytes(b"".join(content))
    assert "schema version 2; this forerun reads 1" in damage_in(path)[0]


def test_the_version_is_said_although_a_newer_schema_has_other_fields(lines):
    path, content = lines
    newer = content[0].replace(b'"schema_version":1', b'"schema_version":2,"colour":"red"')
    path.write_bytes(newer + b"".join(content[1:]))
    assert damage_in(path) == ["line 1 (byte 0): schema version 2; this forerun reads 1"]


def test_text_that_is_not_utf_8_ends_the_trace_and_nothing_else(tmp_path, caplog):
    write(tmp_path / "t.jsonl", [replace(HEADER, target="\udcff"), STEP])
    (message,) = caplog.messages
    assert "cannot be written" in message
    assert "surrogates not allowed" in message


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n" * 50, b"hello\nworld\n", b"PAR1\x00PAR1"])
def test_what_is_no_trace_at_all_is_refused(tmp_path, content):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidTrace, match="holds no record of a trace: line 1"):
        list(read_trace(path))


def test_a_folder_that_is_no_trace_is_refused(tmp_path):
    with pytest.raises(InvalidTrace, match="is a folder; name a file in it"):
        list(read_trace(tmp_path))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidTrace, match="No such file"):
        list(read_trace(tmp_path / "t.jsonl"))


def test_traces_are_written_and_read_without_pyarrow(tmp_path):
    code = """
import sys
from pathlib import Path
from tests.records import HEADER
from forerun.trace.files import open_trace, read_trace
import forerun.trace.cycles, forerun.cli.explain, forerun.doctor.readers.trace
with open_trace(Path(sys.argv[1])) as writer:
    writer.add(HEADER)
list(read_trace(Path(sys.argv[1])))
print(*sorted({"torch", "pyarrow", "matplotlib"} & sys.modules.keys()))
"""
    run = child(code, str(tmp_path / "t.jsonl"))
    assert run.stdout == "\n", run.stderr


def test_a_long_schema_version_is_not_repeated_whole(path):
    write(path, [HEADER, STEP])
    newer = json.dumps(HEADER.to_dict() | {"schema_version": "x" * 100_000})
    path.write_text(newer + "\n" + path.read_text())
    (damage,) = damage_in(path)
    assert "schema version xxx" in damage
    assert len(damage) < 500
