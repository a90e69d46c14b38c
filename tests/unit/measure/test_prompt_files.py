from __future__ import annotations

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from forerun import bounded_read
from forerun.errors import InvalidRequest
from forerun.measure import prompt_files
from forerun.measure.prompt_files import read_entries, read_prompts

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
    with pytest.raises(InvalidRequest, match=r"has no \.json, \.jsonl, \.parquet, \.txt file"):
        entries(tmp_path)


def test_a_folder_of_code_is_told_what_prompts_are(tmp_path):
    (tmp_path / "module.py").write_text("x = 1\n")
    with pytest.raises(InvalidRequest, match="source code and other texts are no prompts: write"):
        list(read_entries(tmp_path))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (["a"], "is no object"),
        ({}, 'must have one of "prompt", "text" and "messages"'),
        ({"conversations": [1]}, "conversations[0] is 1; it must be an object"),
        ({"conversations": [{"from": "gpt", "value": "hi"}]}, "begins with the assistant's answer"),
        ({"conversations": [{"from": "human"}]}, "missing required field `value`"),
        ({"prompt": "a", "response": {}}, "response is {}; it must be a text"),
        ({"prompt": None}, "must have one of"),
        ({"prompt": "a", "messages": [HELLO]}, "must have only one of"),
        ({"prompt": ""}, "prompt is ''; it must be a text of length at least 1"),
        ({"prompt": 3}, "prompt is 3; it must be a text"),
        ({"prompt": "a", "response": ""}, "response is ''; it must be a text of length at least 1"),
        ({"prompt": "a", "tag": ["x"]}, "tag is ['x']; it must be a text"),
        ({"messages": []}, "messages is []; it must be a list of length at least 1"),
        ({"messages": "hello"}, "messages is 'hello'; it must be a list"),
        ({"messages": [HELLO, "hi"]}, "messages[1] is 'hi'; it must be an object"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        (
            {"messages": [{"role": "user", "content": [1]}]},
            "[0].content is [1]; it must",
        ),
        ({"messages": [ANSWER, HELLO]}, "begins with the assistant's answer"),
        ({"conversations": [{"from": ["x"], "value": "a"}]}, "conversations[0].from is ['x']; it"),
        ({"conversations": [{"from": {}, "value": "a"}]}, "conversations[0].from is {}; it must"),
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
    with pytest.raises(InvalidRequest, match=r"p\.jsonl line 2 is not|p\.jsonl line 2 nests"):
        entries(path)


def test_text_of_another_encoding_is_refused(tmp_path):
    path = tmp_path / "p.txt"
    path.write_bytes("größe\n".encode("latin-1"))
    with pytest.raises(InvalidRequest, match=r"^prompts: .*p\.txt is not UTF-8"):
        entries(path)


def test_a_table_that_is_cut_off_is_refused(tmp_path):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a" * 1000}]), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InvalidRequest, match=r"p\.parquet is no whole Parquet file"):
        entries(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"^prompts: \S*nowhere.jsonl cannot be read: No such"):
        entries(tmp_path / "nowhere.jsonl")


def test_a_json_list_has_the_same_records(tmp_path):
    path = tmp_path / "p.json"
    path.write_text('[{"prompt": "a", "tag": "code"}, "b"]')
    assert [(entry.text, entry.tag) for entry in entries(path)] == [("a", "code"), ("b", "")]
    assert entries(path)[1].where == f"{path}, record 2"
    path.write_text('{"version": 1, "data": [{"prompt": "c"}]}')
    assert [entry.text for entry in entries(path)] == ["c"]
    path.write_text('{"prompt": "c"}')
    with pytest.raises(InvalidRequest, match=r"no list of records.*name it \.jsonl"):
        entries(path)


def test_conversations_of_sharegpt_are_messages(write_lines):
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
    ]
    (entry,) = entries(write_lines({"id": "1", "conversations": turns}))
    assert [(message["role"], message["content"]) for message in entry.messages] == [
        ("system", "s"),
        ("user", "q"),
        ("assistant", "a"),
    ]


@pytest.mark.parametrize("name", ["p.yaml", "p.csv", "p.jsonlines", "p"])
def test_an_unknown_suffix_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(InvalidRequest, match=r"has the suffix .*rename it"):
        entries(path)


def test_a_small_table_of_many_characters_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("forerun.measure.prompt_files.MAX_CHARACTERS", 10_000)
    path = tmp_path / "p.parquet"
    pq.write_table(pa.table({"prompt": ["a" * 100] * 1000}), path)
    with pytest.raises(InvalidRequest, match="more than 10000 characters"):
        entries(path)
    pq.write_table(pa.table({"prompt": pa.array(["a"] * 2_100_000)}), path)
    with pytest.raises(InvalidRequest, match="2100000 rows; the limit is 1000000"):
        entries(path)


def test_too_many_records_are_refused_whatever_their_files(tmp_path, monkeypatch):
    monkeypatch.setattr(prompt_files, "MAX_RECORDS", 3)
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x\ny\n")
    assert len(read_prompts(tmp_path / "a.txt")) == 2
    with pytest.raises(InvalidRequest, match="or 3 records of prompts"):
        read_prompts(tmp_path)


def test_a_text_that_is_no_utf8_in_a_table_is_refused(tmp_path):
    buffers = (pa.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), pa.py_buffer(b"\xff\xfe"))
    table = pa.table({"prompt": pa.StringArray.from_buffers(1, *buffers)})
    pq.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(InvalidRequest, match="Invalid UTF8"):
        read_prompts(tmp_path / "p.parquet")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet", ".txt"])
def test_a_pipe_without_a_writer_is_given_up(tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(bounded_read, "FIRST_DATA_S", 0.01)
    path = tmp_path / f"pipe{suffix}"
    os.mkfifo(path)
    with pytest.raises(InvalidRequest, match=r"nothing was written|not a regular file"):
        read_prompts(path)
