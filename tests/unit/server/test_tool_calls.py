"""Tool calls in texts: what is a call in every format, and what stays text."""

from __future__ import annotations

import json

import pytest

from forerun.errors import InvalidRequest
from forerun.server.tool_calls import TOOL_FORMATS, ToolCallParser, chosen_format, forced

HERMES = '<tool_call>\n{"name": "look", "arguments": {"q": "a}<b\\"{"}}\n</tool_call>'
ARGUMENTS = {"q": 'a}<b"{'}


def parsed(name: str, *pieces: str) -> tuple[str, list[tuple[str, object]]]:
    parser = ToolCallParser(TOOL_FORMATS[name], ["look", "find"])
    text, calls = "", []
    for piece in pieces:
        more, found = parser.feed(piece)
        text, calls = text + more, calls + found
    more, found = parser.feed("", is_last=True)
    assert parser.num_calls == len(calls + found)
    return text + more, [(call.name, json.loads(call.arguments)) for call in calls + found]


@pytest.mark.parametrize(
    ("name", "text", "plain", "calls"),
    [
        ("hermes", HERMES, "", [("look", ARGUMENTS)]),
        ("hermes", f"I look. \n{HERMES}\n", "I look.", [("look", ARGUMENTS)]),
        ("hermes", f"{HERMES}\n{HERMES}\nDone.", "Done.", [("look", ARGUMENTS)] * 2),
        ("hermes", HERMES.removesuffix("call>"), "", [("look", ARGUMENTS)]),
        ("hermes", HERMES.removesuffix("\n</tool_call>"), "", [("look", ARGUMENTS)]),
        ("hermes", f"<tool_call> x {HERMES}", "<tool_call> x", [("look", ARGUMENTS)]),
        ("hermes", f"<tool_call> {{]{HERMES}", "<tool_call> {]", [("look", ARGUMENTS)]),
        ("mistral", '[TOOL_CALLS] [{"name": "find", "arguments": {}}]', "", [("find", {})]),
        ("mistral", '[{"name": "find"}, {"name": "look"}]', "", [("find", {}), ("look", {})]),
        ("mistral", 'So: [TOOL_CALLS][{"name": "find"}]', "So:", [("find", {})]),
        ("llama3", '{"name": "find", "parameters": {"n": 1}}', "", [("find", {"n": 1})]),
        ("llama3", '\n{"name": "find"}; {"name": "look"}', "", [("find", {}), ("look", {})]),
        ("llama3", '<|python_tag|>{"name": "find"} Yes.', "Yes.", [("find", {})]),
    ],
)
def test_calls_are_found(name, text, plain, calls):
    assert parsed(name, text) == (plain, calls)
    assert parsed(name, *text) == (plain, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", ""),
        ("hermes", " \n two  spaces \n"),
        ("hermes", "<tool_call"),
        ("hermes", "<tool_call>\n"),
        ("hermes", '<tool_call>{"name": "look", "arguments": {'),
        ("hermes", '<tool_call>{"name": "look", "arguments": {"q": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": ["look"], "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look", "arguments": "x"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "look"}</tool'[:-1] + "x>"),
        ("hermes", '<tool_call>["look"]</tool_call>'),
        ("hermes", '{"name": "look", "arguments": {}}'),
        ("hermes", "<tool_call>" + "[" * 2000),
        ("hermes", '<tool_call>{"a":' * 50),
        ("mistral", "[TOOL_CALLS] []"),
        ("mistral", "[1] is the source"),
        ("mistral", 'See [{"name": "find"}]'),
        ("mistral", "[TOOL"),
        ("llama3", '{"name": "find", "parameters": [1]}'),
        ("llama3", 'The answer is {"name": "find"}'),
        ("llama3", "  "),
        ("llama3", "{" * 2000),
    ],
)
def test_all_else_stays_text(name, text):
    assert parsed(name, text) == (text, [])
    assert parsed(name, *text) == (text, [])


def test_text_before_a_call_is_returned_at_once_and_a_call_when_it_is_complete():
    parser = ToolCallParser(TOOL_FORMATS["hermes"], ["look"])
    assert parser.feed("I look <b") == ("I look <b", [])
    assert parser.feed("> and <tool") == ("> and", [])
    assert parser.feed("box>") == (" <toolbox>", [])
    start, end = HERMES[:-1], HERMES[-1]
    assert parser.feed(start) == ("", [])
    text, (call,) = parser.feed(end)
    assert (text, call.name, json.loads(call.arguments)) == ("", "look", ARGUMENTS)


def test_a_call_has_openais_form():
    (call,) = ToolCallParser(TOOL_FORMATS["hermes"], ["look"]).feed(HERMES)[1]
    found = call.to_dict(TOOL_FORMATS["hermes"])
    assert found["id"].startswith("call_")
    assert found["type"] == "function"
    assert found["function"] == {"name": "look", "arguments": json.dumps(ARGUMENTS)}
    assert len(call.to_dict(TOOL_FORMATS["mistral"])["id"]) == 9  # templates refuse other lengths


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|python_tag|>", "llama3"),
        ("<tool_call>\n<function=f>", None),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_format_follows_from_the_template(template, name):
    assert chosen_format("auto", template) is (TOOL_FORMATS[name] if name else None)
    assert chosen_format("none", template) is None
    assert chosen_format("llama3", template) is TOOL_FORMATS["llama3"]


def test_an_unknown_format_cannot_be_enforced():
    with pytest.raises(InvalidRequest, match="--tool-format hermes or mistral or llama3"):
        forced([{"function": {"name": "look"}}], None, {})
