"""OpenAI's Python library: completions, chats, streams, structured output, tools, errors."""

from __future__ import annotations

import asyncio
import json

import openai
from common import KEY, MODEL, PROMPT, URL, City

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
MESSAGES = [{"role": "user", "content": PROMPT}]
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "parameters": City.model_json_schema()},
}


def check_models() -> None:
    (served,) = client.models.list()
    assert served.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def check_completions() -> None:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
    whole = client.completions.create(**asked)
    text = whole.choices[0].text
    assert whole.usage.completion_tokens == 24
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(client.completions.create(**asked, **options))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == text
    assert chunks[-1].usage.completion_tokens == 24
    known = client.completions.create(**asked, logprobs=2, n=2, seed=1)
    assert len(known.choices) == 2
    assert "".join(known.choices[0].logprobs.tokens) == text


def check_chats() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 16, "temperature": 0}
    text = client.chat.completions.create(**asked).choices[0].message.content
    streamed = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
    with client.chat.completions.stream(**asked) as events:
        deltas = [event.delta for event in events if event.type == "content.delta"]
    assert "".join(deltas) == text


def check_structured_output() -> None:
    asked = {"model": MODEL, "messages": MESSAGES, "max_tokens": 200, "seed": 1}
    parsed = client.chat.completions.parse(**asked, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)
    called = client.chat.completions.create(**asked, tools=[TOOL], tool_choice="required")
    (call,) = called.choices[0].message.tool_calls
    assert called.choices[0].finish_reason == "tool_calls"
    City.model_validate(json.loads(call.function.arguments))


def check_second_turns() -> None:
    """A call has no content, and its result and the next question are part of the prompt."""
    asked = {"model": MODEL, "max_tokens": 200, "seed": 1, "tools": [TOOL]}
    first = client.chat.completions.create(messages=MESSAGES, tool_choice="required", **asked)
    message = first.choices[0].message
    assert message.content is None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found"}
    once = {"role": "assistant", "tool_calls": [message.tool_calls[0].model_dump()]}
    for called in (message, message.model_dump(), once, once | {"content": None}):
        history = [*MESSAGES, called, result]
        second = client.chat.completions.create(messages=history, tool_choice="none", **asked)
        assert second.choices[0].message.content
        assert second.usage.prompt_tokens > first.usage.prompt_tokens
    history += [{"role": "assistant", "content": "done"}, *MESSAGES]
    third = client.chat.completions.create(messages=history, tool_choice="required", **asked)
    assert third.choices[0].message.tool_calls
    with client.chat.completions.stream(messages=history, tool_choice="required", **asked) as s:
        s.until_done()
        assert s.get_final_completion().choices[0].message.tool_calls


def check_second_responses() -> None:
    tool = {"type": "function", **TOOL["function"]}
    asked = {"model": MODEL, "max_output_tokens": 200, "temperature": 0, "tools": [tool]}
    first = client.responses.create(input=PROMPT, tool_choice="required", **asked)
    (call,) = [item for item in first.output if item.type == "function_call"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "found"}
    history = [{"role": "user", "content": PROMPT}, call.model_dump(exclude_none=True), result]
    second = client.responses.create(input=history, tool_choice="none", **asked)
    assert second.output_text


def check_responses() -> None:
    asked = {"model": MODEL, "input": PROMPT, "temperature": 0, "max_output_tokens": 16}
    whole = client.responses.create(**asked)
    assert whole.output_text
    events = list(client.responses.create(**asked, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text


def check_errors() -> None:
    for changes, kind in (
        ({"model": "other"}, openai.NotFoundError),
        ({"prompt": "a " * 5000}, openai.BadRequestError),
        ({"temperature": -1}, openai.BadRequestError),
    ):
        try:
            client.completions.create(**{"model": MODEL, "prompt": PROMPT, **changes})
        except kind as error:
            assert error.body["message"]
            continue
        raise AssertionError(f"{changes} was accepted")


async def check_many() -> None:
    """Sixteen requests at once get the texts that they get alone."""
    asked = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    prompts = [f"def function_{n}(" for n in range(16)]
    alone = [client.completions.create(prompt=p, **asked).choices[0].text for p in prompts]
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as many:
        found = await asyncio.gather(
            *(many.completions.create(prompt=prompt, **asked) for prompt in prompts)
        )
    assert [each.choices[0].text for each in found] == alone


check_models()
check_completions()
check_chats()
check_structured_output()
check_second_turns()
check_responses()
check_second_responses()
check_errors()
asyncio.run(check_many())
