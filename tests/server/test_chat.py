"""Conversations, and OpenAI's own client."""

from __future__ import annotations

import openai
import pytest
from tests import tiny
from tests.server.conftest import MODEL, serving, tiny_engine
from tests.server.test_completions import streamed

from forerun.models.tokenizers import adopt
from forerun.sampling.config import SamplingParams

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% for t in tools or [] %}<tool {{ t.function.name }}>{% endfor %}{{ mood }}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MESSAGES = [{"role": "user", "content": "import os"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ANSWER = {"seed": 5, "max_tokens": 12, "logit_bias": {"70": 2.0}}


def chat_engine():
    backend = tiny.backend(("<chat-server>",))
    backend.chat_template = TEMPLATE
    engine = tiny_engine()
    engine.tokenizer = engine.intake.tokenizer = adopt(backend)
    return engine


@pytest.fixture(scope="module")
def chat():
    with serving(chat_engine()) as client:
        yield client


@pytest.fixture(scope="module")
def openai_client(chat):
    with openai.OpenAI(base_url=f"{chat.base_url}/v1", api_key="none", max_retries=0) as client:
        yield client


def expected(rendered: str) -> str:
    engine = chat_engine()
    ids = engine.tokenizer.encode(rendered, add_special_tokens=False)
    return engine.generate([ids], SamplingParams(**ANSWER))[0].text


def test_best_of_one_is_accepted(chat):
    body = {"messages": MESSAGES, **ANSWER, "best_of": 1}
    assert chat.post("/v1/chat/completions", json=body).status_code == 200


def test_a_missing_content_is_an_empty_text(chat):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    text = expected("<user>import os\n<assistant>\n<assistant>")
    found = chat.post("/v1/chat/completions", json={"messages": messages, **ANSWER}).json()
    assert found["choices"][0]["message"]["content"] == text


def test_an_image_is_refused_in_one_sentence(chat):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, image]}]
    found = chat.post("/v1/chat/completions", json={"messages": messages})
    said = "content of type 'image_url' is not supported; send texts"
    assert found.status_code == 400
    assert found.json()["error"]["message"] == f"messages.0.content: {said}"


def test_tools_that_the_template_leaves_out_are_named_in_the_header(chat):
    body = {"messages": MESSAGES, "tools": TOOLS, **ANSWER}
    found = chat.post("/v1/chat/completions", json=body)
    assert "x-forerun-ignored" not in found.headers
    with serving(chat_engine()) as client:
        client.app.state.server.engine.engine.tokenizer.use_chat_template(
            TEMPLATE.replace("tools or []", "[]")
        )
        found = client.post("/v1/chat/completions", json=body)
        assert found.headers["x-forerun-ignored"] == "tools"
        tools = [{"type": "function", **TOOLS[0]["function"]}]
        found = client.post("/v1/responses", json={"input": "x", "tools": tools})
        assert found.headers["x-forerun-ignored"] == "tools"
        none = client.post("/v1/chat/completions", json=body | {"tool_choice": "none"})
        assert "x-forerun-ignored" not in none.headers


@pytest.mark.parametrize("is_continuous", [True, False])
def test_usage_is_in_every_event_where_it_is_asked_for(chat, is_continuous):
    options = {"include_usage": True, "continuous_usage_stats": is_continuous}
    asked = {**ANSWER, "n": 2, "stream_options": options, "return_token_ids": True}
    for path, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": ["import os", "x"]}),
    ):
        *parts, last = streamed(chat, path, asked | body)
        assert last["choices"] == []
        assert all(("usage" in part) == is_continuous for part in parts)
        if not is_continuous:
            continue
        counts: dict[int, int] = {}
        prompts: dict[int, int] = {}
        for part in parts:
            (choice,), usage = part["choices"], part["usage"]
            at = choice["index"]
            counts[at] = counts.get(at, 0) + len(choice.get("token_ids", ()))
            prompts[at] = usage["prompt_tokens"]
            assert usage["completion_tokens"] == counts[at]
            assert usage["total_tokens"] == counts[at] + prompts[at]
        assert sum(counts.values()) == last["usage"]["completion_tokens"]
        assert sum(prompts.values()) == 2 * last["usage"]["prompt_tokens"]


def test_a_conversation_is_answered(chat):
    text = expected("<user>import os\n<assistant>")
    body = {"messages": MESSAGES, **ANSWER}
    found = chat.post("/v1/chat/completions", json=body).json()
    assert found["object"] == "chat.completion"
    assert found["choices"][0]["message"] == {"role": "assistant", "content": text}
    first, *rest = streamed(chat, "/v1/chat/completions", body)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {part["object"] for part in rest} == {"chat.completion.chunk"}
    assert "".join(part["choices"][0]["delta"]["content"] for part in rest) == text
    assert rest[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def test_tools_and_variables_reach_the_template(chat):
    parts = [{"type": "text", "text": "import "}, {"type": "text", "text": "os"}]
    body = {"messages": [{"role": "user", "content": parts}], "tools": TOOLS, **ANSWER}
    body["chat_template_kwargs"] = {"mood": "!", "add_generation_prompt": False}
    found = chat.post("/v1/chat/completions", json=body).json()
    text = expected("<user>import os\n<tool look>!<assistant>")
    assert found["choices"][0]["message"]["content"] == text
    none = chat.post("/v1/chat/completions", json=body | {"tool_choice": "none"}).json()
    assert none["choices"][0]["message"]["content"] == expected("<user>import os\n!<assistant>")


def test_images_are_refused_by_name(chat):
    part = {"type": "image_url", "image_url": {"url": "x"}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    response = chat.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert "image_url" in response.json()["error"]["message"]


def test_the_client_of_openai(openai_client):
    text = expected("<user>import os\n<assistant>")
    answer = openai_client.chat.completions.create(
        model=MODEL, messages=MESSAGES, logprobs=True, top_logprobs=2, **ANSWER
    )
    assert answer.choices[0].message.content == text
    logprobs = answer.choices[0].logprobs.content
    assert len(logprobs) == answer.usage.completion_tokens
    assert len(logprobs[0].top_logprobs) == 2
    parts = openai_client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculation": "off"},
        **ANSWER,
    )
    *parts, last = parts
    assert "".join(part.choices[0].delta.content for part in parts) == text
    assert last.usage.completion_tokens == answer.usage.completion_tokens
    assert last.usage.speculative_decoding["num_drafted"] == 0
    assert [model.id for model in openai_client.models.list()] == [MODEL]
    with pytest.raises(openai.BadRequestError, match="temperature is -1"):
        openai_client.completions.create(model=MODEL, prompt="x", temperature=-1)
    with pytest.raises(openai.NotFoundError):
        openai_client.completions.create(model="other", prompt="x")


def test_a_deadline_ends_the_text(chat):
    body = {"messages": MESSAGES, "max_tokens": 60, "ignore_eos": True, "deadline_s": 0.001}
    choice = chat.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "deadline")
