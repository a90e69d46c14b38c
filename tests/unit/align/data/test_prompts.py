from __future__ import annotations

import pytest
from tests.unit.align.data.conftest import chatty

from forerun.align.samples import prompt_hash, read_prompts, shortened
from forerun.errors import InvalidRequest

MOST = 200
HELLO = {"role": "user", "content": "x = 1"}
ANSWER = {"role": "assistant", "content": "y = 2"}
MORE = {"role": "user", "content": "import"}


def learned(sample, tokenizer):
    return [
        "".join(tokenizer.vocabulary[token] for token in sample.token_ids[start:end])
        for start, end in sample.spans
    ]


def test_a_text_is_continued_as_it_is(write_lines, plain):
    (record,) = read_prompts(write_lines({"prompt": "import os", "tag": "code"}), plain, MOST)
    assert list(record.prompt_ids) == plain.encode("import os")
    assert record.prompt_hash == prompt_hash(record.prompt_ids)
    assert (record.tag, record.brought) == ("code", ())


def test_a_response_that_is_brought_is_what_is_learned(write_lines, plain):
    row = {"prompt": "import os", "response": "\nx", "tag": "t"}
    (record,) = read_prompts(write_lines(row), plain, MOST)
    (sample,) = record.brought
    num_prompt = len(record.prompt_ids)
    assert sample.token_ids[:num_prompt] == record.prompt_ids
    assert sample.spans == ((num_prompt, len(sample.token_ids)),)
    assert plain.decode(sample.token_ids[num_prompt:]) == "\nx"
    assert (sample.source, sample.tag) == ("fixed", "t")
    assert sample.prompt_hash == record.prompt_hash


def test_a_conversation_goes_through_the_template(write_lines, chat):
    (record,) = read_prompts(write_lines({"messages": [HELLO]}), chat, MOST)
    text = "[user]x = 1[assistant]"
    assert list(record.prompt_ids) == chat.encode(text, add_special_tokens=False)
    assert record.brought == ()


def test_the_assistants_answers_alone_are_learned(write_lines, chat):
    last = {"role": "assistant", "content": "return"}
    (record,) = read_prompts(write_lines({"messages": [HELLO, ANSWER, MORE, last]}), chat, MOST)
    (sample,) = record.brought
    assert learned(sample, chat) == ["yĠ=Ġ2<|end|>", "return<|end|>"]
    asked = "[user]x = 1[assistant]y = 2<|end|>\n[user]import[assistant]"
    assert chat.decode(record.prompt_ids) == asked.replace("<|end|>", "")
    assert sample.token_ids[: len(record.prompt_ids)] == record.prompt_ids


def test_a_response_beside_messages_is_the_last_answer(write_lines, chat):
    one = write_lines({"messages": [HELLO], "response": "y = 2"}, name="one.jsonl")
    other = write_lines({"messages": [HELLO, ANSWER]}, name="other.jsonl")
    (first,), (second,) = (read_prompts(path, chat, MOST) for path in (one, other))
    assert first.brought == second.brought
    assert first.prompt_ids == second.prompt_ids


def test_an_answer_that_is_rendered_otherwise_later_is_context(write_lines):
    forgetful = chatty(
        "{% for m in messages %}[{{ m.role }}]"
        "{% if loop.last or m.role == 'user' %}{{ m.content }}{% else %}...{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    path = write_lines({"messages": [HELLO, ANSWER, MORE, {**ANSWER, "content": "return"}]})
    (record,) = read_prompts(path, forgetful, MOST)
    (sample,) = record.brought
    assert learned(sample, forgetful) == ["return"]
    assert (
        forgetful.decode(sample.token_ids)
        == "[user]x = 1[assistant]...[user]import[assistant]return"
    )


def test_a_template_that_hides_where_answers_begin_is_refused(write_lines):
    backwards = chatty("{% for m in messages | reverse %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:1: .* does not render the answer"):
        read_prompts(write_lines({"messages": [HELLO, ANSWER]}), backwards, MOST)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "robot", "content": "x"}]}, "template refuses .* no robots"),
        ({"messages": [HELLO, ANSWER], "response": "z"}, "end with an answer already"),
    ],
)
def test_conversations_that_cannot_be_rendered_are_named(write_lines, chat, row, message):
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:2: .*" + message):
        read_prompts(write_lines({"prompt": "a"}, row), chat, MOST)


def test_conversations_need_a_template(write_lines, plain):
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:2: .* no chat template"):
        read_prompts(write_lines({"prompt": "a"}, {"messages": [HELLO]}), plain, MOST)


def test_a_prompt_of_no_tokens_is_named(write_lines):
    silent = chatty("{# nothing #}")
    with pytest.raises(InvalidRequest, match=r"prompts\.jsonl:1: the prompt is empty"):
        read_prompts(write_lines({"messages": [HELLO]}), silent, MOST)


def test_prompts_come_once_with_all_responses_they_bring(write_lines, plain):
    path = write_lines(
        {"prompt": "a", "response": "b", "tag": "first"},
        {"prompt": "c"},
        {"prompt": "a", "tag": "second"},
        {"prompt": "a", "response": "d"},
    )
    first, second = read_prompts(path, plain, MOST)
    assert (first.tag, first.where, len(first.brought)) == ("first", f"{path}:1", 2)
    assert second.where == f"{path}:2"


def test_a_file_without_prompts_is_refused(tmp_path, plain):
    path = tmp_path / "p.txt"
    path.write_text("\n")
    with pytest.raises(InvalidRequest, match="has no prompts"):
        read_prompts(path, plain, MOST)


def test_long_prompts_lose_their_beginning_but_not_the_start_token(write_lines, plain):
    (record,) = read_prompts(write_lines({"prompt": "abcdefgh"}), plain, 3)
    assert list(record.prompt_ids) == plain.encode("abcdefgh")[-3:]
    assert shortened([1, 4, 5, 6, 7], [1], 3) == (1, 6, 7)
    assert shortened([2, 4, 5, 6, 7], [1], 3) == (5, 6, 7)
    assert shortened([1, 4, 5], [1], 3) == (1, 4, 5)
    assert shortened([1, 4, 5], [1], 1) == (5,)


def test_ids_of_a_record_are_used_as_they_are(write_lines, chat):
    asked = chat.encode("x", add_special_tokens=False)
    split = [i for letter in "import" for i in chat.encode(letter, add_special_tokens=False)]
    assert split != chat.encode("import", add_special_tokens=False)  # it is one token
    row = {"prompt": "x = 1", "response": "import", "prompt_ids": asked, "token_ids": split}
    (record,) = read_prompts(write_lines(row), chat, MOST)
    assert list(record.prompt_ids) == asked
    (sample,) = record.brought
    assert list(sample.token_ids) == asked + split
    assert sample.spans == ((len(asked), len(asked) + len(split)),)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token_ids": [1]}, '"token_ids" without the "prompt_ids"'),
        ({"prompt_ids": [1 << 40], "token_ids": [1]}, "not in this model's vocabulary"),
        ({"prompt_ids": [1, True]}, r"prompt_ids\[1\] is True; it must be a whole number"),
        ({"prompt_ids": "1"}, "prompt_ids is '1'; it must be a list"),
        ({"prompt_ids": [1], "token_ids": [1]}, "are of another model"),
    ],
)
def test_ids_that_cannot_be_are_refused(fields, message, write_lines, chat):
    with pytest.raises(InvalidRequest, match=message):
        read_prompts(write_lines({"messages": [HELLO, ANSWER], **fields}), chat, MOST)


def test_a_text_is_a_users_message_to_a_chat_model(write_lines, chat):
    path = write_lines({"prompt": "x = 1", "response": "y = 2"})
    (record,), (raw,) = (read_prompts(path, chat, MOST, raw=raw) for raw in (False, True))
    (same,) = read_prompts(write_lines({"messages": [HELLO, ANSWER]}), chat, MOST)
    assert record.prompt_ids == same.prompt_ids
    assert record.brought[0].token_ids == same.brought[0].token_ids
    assert list(raw.prompt_ids) == chat.encode("x = 1")
