from __future__ import annotations

import pytest

from forerun.errors import InvalidRequest
from forerun.measure.bench.comparison import read_prompts


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def test_one_prompt_per_line(tmp_path):
    assert read_prompts(write(tmp_path, "p.txt", "one\n\n  two \n")) == ["one", "  two "]


def test_separated_prompts_keep_their_lines(tmp_path):
    path = write(tmp_path, "p.txt", "def f():\n    pass\n---\n\n---\nx\n\ny")
    assert read_prompts(path) == ["def f():\n    pass", "x\n\ny"]


def test_json_lines_with_tags(tmp_path):
    lines = '{"prompt": "a", "tag": "code"}\n\n{"prompt": "b"}\n{"prompt": "c", "tag": "chat"}\n'
    path = write(tmp_path, "p.jsonl", lines)
    assert read_prompts(path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n \n", "has no prompts"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', r"p\.jsonl line 2 is not JSON"),
        ("p.jsonl", '{"words": "a"}\n', r'p\.jsonl:1 must have one of "prompt"'),
        ("p.jsonl", '["a"]\n', r'p\.jsonl:1 is no object with a "prompt"'),
        (
            "p.jsonl",
            '{"messages": [{"role": "user", "content": "a"}]}\n',
            r"p\.jsonl:1 is a conversation",
        ),
        ("p.jsonl", '{"prompt": ""}\n', r"p\.jsonl:1"),
    ],
)
def test_what_is_no_prompt_is_refused_where_it_stands(tmp_path, name, content, message):
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(write(tmp_path, name, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nowhere\.txt"):
        read_prompts(tmp_path / "nowhere.txt")
