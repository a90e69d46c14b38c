from __future__ import annotations

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forerun.align.data.prompt_files import read_entries
from forerun.errors import InvalidRequest

HELLO = {"role": "user", "content": "hello"}
ANSWER = {"role": "assistant", "content": "hi"}


def entries(path):
    return list(read_entries(path))


def test_json_lines_keep_what_a_record_says_of_itself(write_lines, tmp_path):
    path = write_lines(
        {"prompt": "a", "tag": "code", "response": "b", "id": 7},
        {"text": "c", "tag": None},
        {"messages": [HELLO, ANSWER], "tag": "chat"},
    )
    first, second, third = entries(path)
    assert (first.text, first.tag, first.response, first.messages) == ("a", "code", "b", ())
    assert (second.text, second.tag, second.response) == ("c", "", None)
    assert (third.text, third.tag, third.messages) == (None, "chat", (HELLO, ANSWER))
    assert [entry.where for entry in (first, third)] == [f"{path}:1", f"{path}:3"]


def test_empty_lines_count_but_are_no_records(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n  \n{"prompt": "b"}\n')
    assert [entry.where for entry in entries(path)] == [f"{path}:1", f"{path}:4"]


def test_parquet_rows_are_the_same_records(tmp_path):
    path = tmp_path / "p.parquet"
    rows = [
        {"prompt": "a", "messages": None, "tag": "code", "number": 1},
        {"prompt": None, "messages": [HELLO], "tag": None, "number": 2},
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    first, second = entries(path)
    assert (first.text, first.tag, first.messages) == ("a", "code", ())
    assert (second.text, second.tag, second.messages) == (None, "", (HELLO,))
    assert second.where == f"{path}, row 2"


def test_text_is_a_prompt_per_line_or_per_block(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("one\n\n  two \n", encoding="utf-8")
    assert [(entry.text, entry.where) for entry in entries(path)] == [
        ("one", f"{path}:1"),
        ("  two ", f"{path}:3"),
    ]
    path.write_text("a\nb\n---\n\n---\nc\n", encoding="utf-8")
    assert [(entry.text, entry.where) for entry in entries(path)] == [
        ("a\nb", f"{path}:1"),
        ("c", f"{path}:6"),
    ]


def test_a_folder_is_all_its_files_in_the_order_of_their_names(write_lines, tmp_path):
    write_lines({"prompt": "b"}, name="b.jsonl")
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "c.txt").write_text("c\n")
    (tmp_path / "README.md").write_text("nothing\n")
    assert [entry.text for entry in entries(tmp_path)] == ["a", "b", "c"]


def test_a_folder_without_any_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"has no \.jsonl, \.parquet, \.txt file"):
        entries(tmp_path)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a"], "is no object"),
        ({}, 'must have one of "prompt", "text" and "messages"'),
        ({"prompt": None}, "must have one of"),
        ({"prompt": "a", "messages": [HELLO]}, "must have one of"),
        ({"prompt": ""}, "\"prompt\" is ''; it must be text, not empty"),
        ({"prompt": 3}, '"prompt" is 3'),
        ({"prompt": "a", "response": ""}, '"response" is'),
        ({"prompt": "a", "tag": ["x"]}, '"tag" is'),
        ({"messages": []}, "must be a list of messages, not empty"),
        ({"messages": "hello"}, "must be a list of messages"),
        ({"messages": [HELLO, "hi"]}, "message 1 must have"),
        ({"messages": [{"role": "user"}]}, "message 0 must have"),
        ({"messages": [{"role": "user", "content": [1]}]}, "message 0 must have"),
        ({"messages": [ANSWER, HELLO]}, "begins with the assistant's answer"),
    ],
)
def test_malformed_records_are_named_by_their_line(write_lines, row, message):
    path = write_lines({"prompt": "fine"}, row)
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:2") as caught:
        entries(path)
    assert message in str(caught.value)


@pytest.mark.parametrize("line", [b"{", b"\xff\xfe", b"[" * 100_000])
def test_lines_that_are_no_json_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n' + line + b"\n")
    with pytest.raises(InvalidRequest, match=r"p\.jsonl:2 is no JSON"):
        entries(path)


def test_text_of_another_encoding_is_refused(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("größe\n".encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"cannot be read from .*p\.txt"):
        entries(path)


def test_a_table_that_is_cut_off_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a" * 1000}]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidRequest, match=r"p\.parquet is no whole Parquet file"):
        entries(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"cannot be read from .*nowhere"):
        entries(tmp_path / "nowhere.jsonl")
