"""The Responses API: the same texts as chat, as items and events; OpenAI's own client."""

from __future__ import annotations

import json

import openai
import pytest
from tests.server.conftest import MODEL, serving
from tests.server.test_chat import ANSWER, MESSAGES, chat_engine, expected
from tests.server.test_tools import TOOLS, tool_engine

BODY = {"input": "import os", "seed": 5, "max_output_tokens": 12, "logit_bias": {"70": 2.0}}
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture(scope="module")
def served():
    with serving(chat_engine()) as client:
        yield client


def events_of(client, body):
    with client.stream("POST", "/v1/responses", json={**body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line]
    kinds = [line.removeprefix("event: ") for line in lines[::2]]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [event["type"] for event in found] == kinds
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_conversation_is_answered_with_the_text_of_chat(served):
    text = expected("<user>import os\n<assistant>")
    found = served.post("/v1/responses", json=BODY).json()
    (item,) = found["output"]
    assert item["content"] == [{"type": "output_text", "text": text, "annotations": []}]
    assert found["status"] in ("completed", "incomplete")
    assert found["usage"]["output_tokens"] == 12 or found["status"] == "completed"
    with_items = BODY | {"input": MESSAGES}
    assert (
        served.post("/v1/responses", json=with_items).json()["output"][0]["content"]
        == (item["content"])
    )
    limited = BODY | {"max_output_tokens": 2}
    cut = served.post("/v1/responses", json=limited).json()
    assert (cut["status"], cut["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )


def test_events_add_up_to_the_response(served):
    whole = served.post("/v1/responses", json=BODY).json()
    events = events_of(served, BODY)
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert events[2]["item"]["content"] == []
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == whole["output"][0]["content"][0]["text"]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole['status']}",
    ]
    last = events[-1]["response"]
    for found in (last["output"][0], whole["output"][0]):
        del found["id"]
    same = ("status", "output", "usage", "text", "tools", "incomplete_details")
    assert {name: last[name] for name in same} == {name: whole[name] for name in same}


def test_instructions_tools_and_results_reach_the_template(served):
    body = BODY | {
        "instructions": "be short",
        "input": [
            {"role": "developer", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "b"},
        ],
        "tools": FLAT,
    }
    found = served.post("/v1/responses", json=body).json()
    names = "".join(f"<tool {tool['name']}>" for tool in FLAT)
    text = expected(f"<system>be short\n<system>a\n<assistant>\n<tool>b\n{names}<assistant>")
    assert found["output"][0]["content"][0]["text"] == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input": [{"type": "item_reference"}]}, "'item_reference' are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "'input_image'"),
        ({"tools": [{"type": "web_search"}]}, "'web_search' are not offered"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"n": 2}, "n: "),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "json_schema"),
        ({"metadata": {"a": "\ud800"}}, "is no Unicode: surrogates not allowed"),
        ({"tools": [{"type": "function", "name": "\ud800"}]}, "is no Unicode"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(served, changes, message):
    content = json.dumps(BODY | changes)
    headers = {"Content-Type": "application/json"}
    answer = served.post("/v1/responses", content=content, headers=headers)
    assert answer.status_code == 400, answer.text
    assert message in answer.json()["error"]["message"]


def test_the_client_of_openai(served):
    text = expected("<user>import os\n<assistant>")
    extra = {"seed": ANSWER["seed"], "logit_bias": ANSWER["logit_bias"]}
    asked = {"model": MODEL, "input": "import os", "max_output_tokens": 12, "extra_body": extra}
    with openai.OpenAI(base_url=f"{served.base_url}/v1", api_key="none", max_retries=0) as client:
        assert client.responses.create(**asked).output_text == text
        with client.responses.stream(**asked) as stream:
            deltas = [e.delta for e in stream if e.type == "response.output_text.delta"]
        assert "".join(deltas) == text


def test_json_follows_its_schema(served):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
    asked = {"type": "json_schema", "name": "s", "schema": schema | {"additionalProperties": False}}
    body = BODY | {"text": {"format": asked}, "max_output_tokens": 40}
    answer = served.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["output"][0]["content"][0]["text"]
    assert json.loads(found) == {"a": "x"}


def test_a_call_is_an_item_and_its_events():
    body = {"input": "x", "tools": FLAT, "tool_choice": {"type": "function", "name": "find"}}
    body |= {"seed": 3, "max_output_tokens": 200}
    with serving(tool_engine()) as client:
        (item,) = client.post("/v1/responses", json=body).json()["output"]
        events = events_of(client, body)
    assert (item["type"], item["name"], item["status"]) == ("function_call", "find", "completed")
    assert json.loads(item["arguments"])["q"] in ("a", "b")
    assert [event["type"] for event in events[2:]] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert (events[2]["item"]["arguments"], events[3]["delta"]) == ("", item["arguments"])
