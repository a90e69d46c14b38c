"""Tool calls over HTTP, found in the text or enforced, with OpenAI's own client."""

from __future__ import annotations

import json
import re

import openai
import pytest
from tests import tiny
from tests.server.conftest import MODEL, NUM_SLOTS, serving
from tests.server.test_completions import streamed

from forerun.models.tokenizers import adopt
from forerun.server.config import ServerConfig

SCHEMA = {
    "type": "object",
    "properties": {"q": {"$ref": "#/$defs/Q"}},
    "required": ["q"],
    "additionalProperties": False,
    "$defs": {"Q": {"enum": ["a", "b"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("look", "find")
]
MESSAGES = [{"role": "user", "content": "x"}]
CALL = '<tool_call>\n{"name": "look", "arguments": {"q": "a"}}\n</tool_call>'
BODY = {"messages": MESSAGES, "tools": TOOLS, "seed": 3, "max_tokens": 200}
NAMED = {"type": "function", "function": {"name": "find"}}


def tool_engine():
    sizes = {"vocab_size": 304, "max_context": 256}
    target = tiny.adapted(tiny.network("llama", **sizes), num_slots=NUM_SLOTS)
    draft = tiny.adapted(tiny.network("llama", seed=1, **sizes), num_slots=NUM_SLOTS)
    engine = tiny.engine_over(
        target, tiny.drafting(draft, 304), max_batch=4, max_waiting=12, max_context=256
    )
    backend = tiny.backend(("<tool_call>", "</tool_call>"))
    backend.chat_template = (
        "{# <tool_call> #}{% for m in messages %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments.q }}{% endfor %}{% endfor %}:"
    )
    engine.tokenizer = engine.intake.tokenizer = adopt(backend)
    return engine


@pytest.fixture(scope="module")
def tools():
    with serving(tool_engine()) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(tools):
    with openai.OpenAI(base_url=f"{tools.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(client, **changes):
    response = client.post("/v1/chat/completions", json=BODY | changes)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def written(text: str) -> dict:
    """A grammar of one text, in which the marks are tokens as a model writes them."""
    ids = {"<tool_call>": "<[300]>", "</tool_call>": "<[301]>"}
    pieces = filter(None, re.split("(</?tool_call>)", text))
    parts = [ids.get(piece) or json.dumps(piece) for piece in pieces]
    return {"structured_outputs": {"grammar": "start: " + " ".join(parts)}}


def test_an_enforced_call_has_no_argument_that_the_tool_does_not_name(tools):
    properties = {"q": {"enum": ["a", "b"]}}
    open_schema = {"type": "object", "properties": properties, "required": ["q"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": open_schema}}
    for seed in range(8):  # a model of random weights goes on with further arguments
        (choice,) = asked(tools, tools=[tool], tool_choice="required", seed=seed)
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]).keys() == {"q"}


def test_a_call_in_the_text_is_found(tools):
    (choice,) = asked(tools, **written(f"I look.\n{CALL}"))
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "I look."
    (call,) = message["tool_calls"]
    assert set(call) == {"id", "type", "function"}
    assert call["function"]["name"] == "look"
    assert json.loads(call["function"]["arguments"]) == {"q": "a"}


def test_a_text_that_is_cut_behind_a_call_ended_by_its_length(tools):
    (choice,) = asked(tools, **written(CALL + "x" * 300), max_tokens=100)
    assert choice["finish_reason"] == "length"
    assert len(choice["message"]["tool_calls"]) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"tool_choice": "none"},
        {"tools": []},
        {"tools": [{"type": "function", "function": {"name": "other"}}]},
    ],
)
def test_without_such_a_tool_it_stays_text(tools, changes):
    (choice,) = asked(tools, **written(CALL), **changes)
    assert choice["message"] == {"role": "assistant", "content": CALL}
    assert choice["finish_reason"] == "stop"


def test_a_stream_has_the_same_calls(tools):
    parts = streamed(tools, "/v1/chat/completions", BODY | written(f"I look.\n{CALL}\n{CALL}"))
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert "".join(delta.get("content", "") for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0, 1]
    assert len({call["id"] for call in calls}) == 2
    assert {call["function"]["name"] for call in calls} == {"look"}
    assert [part["choices"][0]["finish_reason"] for part in parts][-1] == "tool_calls"


@pytest.mark.parametrize("speculation", ["auto", "off"])
@pytest.mark.parametrize(("choice", "names"), [("required", {"look", "find"}), (NAMED, {"find"})])
def test_a_call_is_enforced(tools, choice, names, speculation):
    for found in asked(tools, tool_choice=choice, n=3, speculation=speculation):
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None
        (call,) = found["message"]["tool_calls"]
        assert call["function"]["name"] in names
        assert json.loads(call["function"]["arguments"]) in ({"q": "a"}, {"q": "b"})


@pytest.mark.parametrize("tool_format", ["mistral", "llama3"])
def test_a_call_is_enforced_in_other_formats(tool_format):
    with serving(tool_engine(), ServerConfig(port=0, tool_format=tool_format)) as client:
        (found,) = asked(client, tool_choice="required")
        assert found["finish_reason"] == "tool_calls"
        assert found["message"]["content"] is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": [{"name": "look"}], "tool_choice": "required"}, "tool_choice needs tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "none of the tools"),
        ({"tool_choice": "required", **written("a")}, "tool_choice other than auto"),
        ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        (
            {
                "tool_choice": "required",
                "tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}],
            },
            "no JSON schema",
        ),
    ],
)
def test_bad_choices_are_refused(tools, changes, message):
    response = tools.post("/v1/chat/completions", json=BODY | changes)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_a_bad_schema_and_an_unknown_format_are_refused(tools):
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}]
    response = tools.post("/v1/chat/completions", json=BODY | {"tools": bad, "tool_choice": NAMED})
    assert response.status_code == 400
    bad_schema = BODY | {"tools": bad, "tool_choice": "required"}
    response = tools.post("/v1/chat/completions", json=bad_schema)
    assert response.status_code == 400
    assert "the grammar cannot be used" in response.json()["error"]["message"]
    with serving(tool_engine(), ServerConfig(port=0, tool_format="none")) as client:
        response = client.post("/v1/chat/completions", json=BODY | {"tool_choice": "required"})
        assert response.status_code == 400
        assert "--tool-format" in response.json()["error"]["message"]


def test_the_client_of_openai_calls_a_tool_and_sends_its_result(openai_client):
    asked = {"model": MODEL, "tools": TOOLS, "seed": 3, "max_tokens": 200}
    answer = openai_client.chat.completions.create(
        messages=MESSAGES, tool_choice="required", **asked
    )
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
    follow = openai_client.chat.completions.create(
        messages=[*MESSAGES, message, result], tool_choice="none", **asked
    )
    prompt = tiny.tokenizer().encode("x" + json.loads(call.function.arguments)["q"] + "found:")
    assert follow.usage.prompt_tokens == len(prompt)
    parts = openai_client.chat.completions.create(
        messages=MESSAGES, stream=True, extra_body=written(f"I look.\n{CALL}"), **asked
    )
    choices = [part.choices[0] for part in parts]
    assert "".join(choice.delta.content or "" for choice in choices) == "I look."
    (call,) = [call for choice in choices for call in choice.delta.tool_calls or ()]
    assert call.function.name == "look"
    assert json.loads(call.function.arguments) == {"q": "a"}
    assert choices[-1].finish_reason == "tool_calls"
