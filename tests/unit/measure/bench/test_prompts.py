from __future__ import annotations

import copy

import pytest
from tests import tiny

from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import (
    PromptEntry,
    plain_text,
    prompt_ids,
    read_prompts,
    shipped_prompts,
)
from forerun.models.tokenizers import Tokenizer, adopt


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    return path


def texts_of(path):
    return [plain_text(entry) for entry in read_prompts(path)]


def words(has_chat_template: bool = True) -> Tokenizer:
    """The tiny tokenizer, with a template of one line per turn."""
    backend = copy.deepcopy(tiny.backend())
    if has_chat_template:
        backend.chat_template = (
            "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant:{% endif %}"
        )
    return adopt(backend)


USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize(
    ("entry", "has_template", "raw", "expected"),
    [
        (PromptEntry(where="p", text="hi"), True, False, "user:hi\nassistant:"),
        (PromptEntry(where="p", text="hi"), True, True, None),
        (PromptEntry(where="p", text="hi"), False, False, None),
        (PromptEntry(where="p", messages=(USER,)), True, True, "user:hi\nassistant:"),
        (PromptEntry(where="p", messages=(USER, ANSWER)), True, True, "user:hi\nassistant:"),
        (
            PromptEntry(where="p", messages=(USER, ANSWER, USER)),
            True,
            False,
            "user:hi\nassistant:ho\nuser:hi\nassistant:",
        ),
    ],
)
def test_a_prompt_is_what_the_target_reads(entry, has_template, raw, expected):
    tokenizer = words(has_template)
    if expected is None:
        ids = tokenizer.encode("hi")
    else:
        ids = tokenizer.encode(expected, add_special_tokens=False)
    assert prompt_ids(entry, tokenizer, raw=raw) == ids


def test_a_conversation_without_a_template_is_refused_where_it_stands():
    with pytest.raises(InvalidRequest, match="line 3 is a conversation, and this model has no"):
        prompt_ids(PromptEntry(where="line 3", messages=(USER,)), words(False), raw=False)


def test_shipped_prompts_are_chats_for_a_chat_model_and_code_for_others():
    chats, code = (shipped_prompts(words(has), raw=False) for has in (True, False))
    assert {entry.where for entry in chats} == {f"chat-{n}" for n in range(1, 41)}
    assert [e.text for e in shipped_prompts(words(), raw=True)] == [e.text for e in code]
    assert not {entry.where for entry in chats} & {entry.where for entry in code}


def test_one_prompt_per_line(tmp_path):
    assert texts_of(write(tmp_path, "p.txt", "one\n\n  two \n")) == ["one", "  two "]


def test_separated_prompts_keep_their_lines(tmp_path):
    path = write(tmp_path, "p.txt", "def f():\n    pass\n---\n\n---\nx\n\ny")
    assert texts_of(path) == ["def f():\n    pass", "x\n\ny"]


def test_json_lines_with_tags(tmp_path):
    lines = '{"prompt": "a", "tag": "code"}\n\n{"prompt": "b"}\n{"prompt": "c", "tag": "chat"}\n'
    path = write(tmp_path, "p.jsonl", lines)
    assert texts_of(path) == ["a", "b", "c"]


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
        texts_of(write(tmp_path, name, content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"nowhere\.txt"):
        read_prompts(tmp_path / "nowhere.txt")
