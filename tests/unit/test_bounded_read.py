"""Every reader of files stops at its limits and says which one it met."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forerun.bounded_read import (
    ReadLimits,
    json_lines,
    open_bounded,
    open_stdin,
    parse_json,
    read_bytes,
    read_json,
    read_parquet,
    read_text,
)
from forerun.errors import ForerunError, UnreadableInput

SMALL = ReadLimits(
    max_bytes=1000, max_seconds=600.0, max_depth=8, max_values=100, max_line_bytes=50, max_rows=20
)
BRIEF = replace(SMALL, max_seconds=0.2)


def test_a_file_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 1000)
    assert len(read_bytes(path, SMALL)) == 1000
    path.write_bytes(b"x" * 1001)
    with pytest.raises(UnreadableInput, match="larger than 1000 bytes"):
        read_bytes(path, SMALL)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: folder,
        lambda _: Path("/dev/zero"),
        lambda folder: folder / "missing",
        lambda folder: folder / ("long" * 200),
        lambda folder: folder / "null\0byte",
    ],
    ids=["folder", "device", "missing", "long", "null"],
)
def test_what_is_not_a_readable_file_is_refused(tmp_path, make):
    with pytest.raises(UnreadableInput):
        read_bytes(make(tmp_path), SMALL)


def test_a_pipe_without_writer_ends_at_the_time_limit(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UnreadableInput, match=r"0\.2 s"):
        read_bytes(path, BRIEF)


def test_a_pipe_with_a_writer_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_bytes, args=(b"content",))
    writer.start()
    assert read_bytes(path) == b"content"
    writer.join()


def test_closed_standard_input_is_an_error(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    with pytest.raises(UnreadableInput, match="closed"):
        open_stdin()


def test_peeked_bytes_are_read_again(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    with open_bounded(path) as file:
        assert file.peek(3) == b"abc"
        assert file.read(2) == b"ab"
        assert file.read_all() == b"cdef"


def test_lines_have_limits(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a\n\nb")
    with open_bounded(path, SMALL) as file:
        assert list(file.lines()) == [b"a\n", b"\n", b"b"]
    for content, message in ((b"x" * 51, "line of more than 50"), (b"\n" * 21, "more than 20 l")):
        path.write_bytes(content)
        with pytest.raises(UnreadableInput, match=message), open_bounded(path, SMALL) as file:
            list(file.lines())


def test_json_lines_have_numbers(tmp_path):
    path = tmp_path / "file"
    path.write_text('{"a": 1}\n\n[2]\n')
    assert list(json_lines(path)) == [(1, {"a": 1}), (3, [2])]
    path.write_text('{"a": 1}\n{"b\n')
    with pytest.raises(UnreadableInput, match="line 2 is not JSON"):
        list(json_lines(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 9 + "]" * 9, "8 deep"),
        ("[" * 100_000, "values"),
        ("[" + "1," * 100 + "1]", "100 values"),
        ("1" * 65, "65 digits"),
        ("[1e400]", "too large"),
        ("[" + "9" * 5000 + "]", "5000 digits"),
        ('{"a":', "not JSON"),
        ("", "not JSON"),
    ],
)
def test_hostile_json_is_refused(text, message):
    with pytest.raises(UnreadableInput, match=message):
        parse_json(text, "name", SMALL)


def test_deep_json_is_an_error_whatever_the_limits():
    limits = ReadLimits(max_depth=10**6)
    with pytest.raises(UnreadableInput, match="deep"):
        parse_json("[" * 100_000 + "]" * 100_000, "name", limits)


@pytest.mark.parametrize(
    "value", [["0" * 100], {"a": [1, 2.5e-300, None]}, [[[[[[[[]]]]]]]], 1e300]
)
def test_ordinary_json_is_read(value):
    assert parse_json(json.dumps(value), "name", SMALL) == value
    assert parse_json(b"\xef\xbb\xbf" + json.dumps(value).encode(), "name", SMALL) == value


def test_text_that_is_not_utf8_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"ab\xff")
    for read in (read_text, read_json):
        with pytest.raises(UnreadableInput, match="UTF-8 at byte 2"):
            read(path)


def test_parquet_is_read_in_batches(tmp_path):
    path = tmp_path / "file.parquet"
    rows = [{"a": index, "b": [{"c": str(index)}], "d": "text"} for index in range(10_000)]
    pq.write_table(pa.Table.from_pylist(rows), path)
    found = [row for batch in read_parquet(path) for row in batch.to_pylist()]
    assert found == rows
    (first, *_) = read_parquet(path, ["a"])
    assert first.schema.names == ["a"]
    with pytest.raises(UnreadableInput, match="no column 'z'"):
        list(read_parquet(path, ["z"]))


# 2000 texts of a megabyte, which share their memory here and, once written, in the file.
TEXTS = pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0, pa.int32()), 2000), ["x" * 1_000_000])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (pa.repeat(pa.scalar(True), 60_000_000), "60000000 rows"),
        (TEXTS, "unpack to"),
        (pa.ListArray.from_arrays(pa.array([0, 2000], pa.int32()), TEXTS), "unpack to"),
        (
            pa.ListArray.from_arrays(pa.array([0, 5_000_000]), pa.repeat(pa.scalar(1), 5_000_000)),
            "5000000 values",
        ),
    ],
    ids=["rows", "texts", "nested texts", "one list"],
)
def test_parquet_bombs_are_refused(tmp_path, column, message):
    path = tmp_path / "file.parquet"
    pq.write_table(pa.table({"a": column}), path, compression="zstd", store_schema=False)
    with pytest.raises(UnreadableInput, match=message):
        list(read_parquet(path))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"PAR1" + bytes(100) + b"PAR1"])
def test_damaged_parquet_is_an_error(tmp_path, content):
    path = tmp_path / "file.parquet"
    path.write_bytes(content)
    with pytest.raises(UnreadableInput, match="as Parquet"):
        list(read_parquet(path))


def test_a_pipe_is_no_parquet(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(UnreadableInput, match="regular"):
        list(read_parquet(path))


def test_the_error_is_one_of_ours():
    assert issubclass(UnreadableInput, ForerunError)
