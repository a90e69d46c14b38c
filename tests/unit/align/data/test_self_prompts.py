"""Prompts that the target writes: where a user's words go, what is kept, and interruptions."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from tests import tiny
from tests.unit.align.data.conftest import chatty

from forerun.align import self_prompts
from forerun.align.self_prompts import (
    FIRST_TEXTS,
    SEEDS,
    Opening,
    PromptWriter,
    Selection,
    find_objection,
    find_opening,
    text_of,
)
from forerun.align.texts import Response
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest

SYSTEM_FIRST = (
    "{% if messages[0].role != 'system' %}[system]Be kind.<|end|>\n{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
WORDS = "red blue green tall small quick slow early late warm cold bright dark soft hard".split()


def response(tokens=(5, 6, 7, 8), reason="stop", number=0) -> Response:
    return Response(prompt_hash=f"{number:016x}", token_ids=tuple(tokens), finish_reason=reason)


def test_the_opening_is_what_stands_before_the_users_words(chat):
    opening = find_opening(chat, raw=False)
    assert (opening.text, opening.end_token, opening.end_text) == ("[user]", None, "[assistant]")
    assert opening.params.stop == ("[assistant]",)


def test_a_default_system_prompt_is_part_of_it_and_a_special_token_ends_the_turn():
    tokenizer = chatty(SYSTEM_FIRST)
    opening = find_opening(tokenizer, raw=False)
    assert opening.text == "[system]Be kind.<|end|>\n[user]"
    assert opening.end_token == tiny.EOS
    assert "[assistant]" in opening.speakers


def test_a_seed_begins_the_turn_and_is_a_part_of_it(chat):
    opening, number = find_opening(chat, raw=False), SEEDS.index("How")
    prompt = opening.prompt(number, chat)
    assert chat.decode(prompt.prompt_ids) == "[user]How"
    said = response([*chat.encode(" do I sort?"), *chat.encode("[assistant]")])
    assert text_of(prompt, said, opening, chat) == "How do I sort?"


@pytest.mark.parametrize("raw", [True, False])
def test_without_a_template_a_text_begins_with_the_token_between_texts(plain, chat, raw):
    opening = find_opening(chat if raw else plain, raw=raw)
    assert opening == Opening()
    assert opening.prompt(3, plain).prompt_ids == (plain.eos_token_id,)


def test_a_template_that_hides_the_words_or_fails_is_refused():
    with pytest.raises(InvalidRequest, match="does not show a user's message as it is"):
        find_opening(chatty("[user]{{ messages[0].content | length }}"), raw=False)
    with pytest.raises(InvalidRequest, match="no users here"):
        find_opening(chatty("{{ raise_exception('no users here') }}"), raw=False)


CHAT = Opening(text="[user]", end_token=0, speakers=frozenset({"user", "assistant"}), is_chat=True)


@pytest.mark.parametrize(
    ("text", "changes", "objection"),
    [
        ("How do I sort a list?", {}, None),
        ("Sort this:\n\n- b\n- a", {}, None),
        ("How do I sort a list", {"finish_reason": "length"}, "did not end"),
        ("How do I sort a list?", {"token_ids": (5, 1, 6, 0)}, "have special tokens"),
        ("How do I?\nassistant\nLike this.", {}, "have the next turn"),
        ("How do I?\nAssistant: like this.", {}, "have the next turn"),
        ("Sort.", {}, "are too short"),
        ("sort " * 500, {}, "are too long"),
        ("How do I \x00\x01 sort?", {}, "cannot be printed"),
        ("How do I � sort?", {}, "cannot be printed"),
        ("go on and on", {"token_ids": (5, 6, 7, 8) * 4}, "repeat themselves"),
    ],
)
def test_what_is_no_prompt_is_dropped_for_a_reason(text, changes, objection):
    said = replace(response((5, 6, 7, 8, 0)), **changes)
    assert find_objection(text, said, CHAT, special=(0, 1)) == objection


def test_without_a_template_a_text_need_not_end():
    said = response(reason="length")
    assert find_objection("def add(left, right):", said, Opening(), special=(0,)) is None


def test_a_text_that_repeats_most_phrases_of_earlier_ones_is_dropped():
    selection = Selection()
    for text in (
        "What is the best way to prepare for a job interview?",
        "WHAT is the best way, to prepare for a job interview!",
        "What is the best way to prepare for a job interview in May?",
        "What is the best way to learn French in a month?",
        "Hello there",
        "hello there!",
    ):
        selection.add(text, None)
    assert len(selection.prompts) == 3
    assert selection.dropped == {"are like an earlier one": 3}
    assert str(selection) == "6 texts written, 3 kept as prompts; 3 are like an earlier one"


class Target:
    """Stands for an engine: says of text `number` what a function returns, as far as it lives."""

    def __init__(self, say, tokenizer, lives=10**6) -> None:
        self.say, self.tokenizer, self.lives, self.asked = say, tokenizer, lives, []

    def write(self, engine, prompts, store, on_progress) -> None:
        for prompt in store.missing(prompts):
            if len(self.asked) == self.lives:
                raise KeyboardInterrupt
            number = int(prompt.prompt_hash, 16)
            self.asked.append(number)
            text, reason = self.say(number)
            store.add(response(self.tokenizer.encode(text), reason, number))


@pytest.fixture(scope="module")
def engine(chat) -> Engine:
    return Engine(
        target=tiny.adapted(tiny.network(seed=3)),
        tokenizer=chat,
        config=tiny.settings(k=0),
        eos_token_ids=frozenset({tiny.EOS}),
    )


@pytest.fixture
def write(chat, engine, monkeypatch, tmp_path):
    def run(target: Target, number: int, folder="texts") -> list[str]:
        monkeypatch.setattr(self_prompts, "write_responses", target.write)
        writer = PromptWriter(
            engine=engine,
            opening=find_opening(chat, raw=False),
            target_hash="t",
            tokenizer_hash="k",
            folder=tmp_path / folder,
        )
        path = tmp_path / f"{folder}.jsonl"
        writer.write(path, number, lambda done, of: None)
        return [json.loads(line)["prompt"] for line in path.read_text().splitlines()]

    return run


def various(number: int) -> tuple[str, str]:
    """A turn that no other number has; every third does not end."""
    words = [WORDS[(number // len(WORDS) ** place) % len(WORDS)] for place in range(4)]
    return f" {' '.join(words)} {number} {number * 7} thing", "stop" if number % 3 else "length"


def test_as_many_prompts_as_wanted_are_written(write, chat):
    prompts = write(Target(various, chat), 300)
    assert len(prompts) == len(set(prompts)) == 300
    assert prompts[0].endswith("1 7 thing")  # text 0 did not end


def test_an_interrupted_run_goes_on_and_ends_with_the_same_prompts(write, chat):
    whole = write(Target(various, chat), 300, "whole")
    first, second = Target(various, chat, lives=290), Target(various, chat)
    with pytest.raises(KeyboardInterrupt):
        write(first, 300)
    assert write(second, 300) == whole
    assert not set(first.asked) & set(second.asked)


def test_more_prompts_are_written_after_those_there(write, chat):
    first, second = Target(various, chat), Target(various, chat)
    few = write(first, 20)
    assert write(second, 30)[:20] == few
    assert not set(first.asked) & set(second.asked)


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda n: (f"turn {n} without an end", "length"), "0 kept as prompts; 256 did not end"),
        (lambda n: (" do I sort a list of names by age?", "stop"), "give --num-self-prompts"),
    ],
)
def test_a_target_without_new_prompts_is_given_up(write, chat, say, message):
    target = Target(say, chat)
    with pytest.raises(InvalidRequest, match=message):
        write(target, 5000)
    assert len(target.asked) <= 40 * FIRST_TEXTS


def test_an_engine_writes_texts_of_its_own(engine, chat, tmp_path):
    """A random network says nothing sensible: every reason is counted, and it ends."""
    writer = PromptWriter(
        engine=engine,
        opening=find_opening(chat, raw=True),
        target_hash="t",
        tokenizer_hash="k",
        folder=tmp_path / "texts",
    )
    try:
        selection = writer.write(tmp_path / "p.jsonl", 3, lambda done, of: None)
    except InvalidRequest as error:
        assert "texts written" in str(error)
    else:
        assert len(selection.prompts) == 3
