"""LiteLLM: an answer, a stream, structured output and a tool call, also asynchronously."""

from __future__ import annotations

import asyncio
import json

import litellm
from common import KEY, MODEL, PROMPT, URL, City

asked = {
    "model": f"openai/{MODEL}",
    "api_base": URL,
    "api_key": KEY,
    "messages": [{"role": "user", "content": PROMPT}],
    "temperature": 0,
    "max_tokens": 200,
}
text = litellm.completion(**asked).choices[0].message.content
assert text
streamed = litellm.completion(**asked, stream=True)
assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == text
assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == text
found = litellm.completion(**asked, response_format=City).choices[0].message.content
City.model_validate_json(found)
tool = {"type": "function", "function": {"name": "look", "parameters": City.model_json_schema()}}
called = litellm.completion(
    **asked, tools=[tool], tool_choice="required", parallel_tool_calls=False
)
message = called.choices[0].message
City.model_validate(json.loads(message.tool_calls[0].function.arguments))
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "found"}
history = asked | {"messages": [*asked["messages"], message, result]}
second = litellm.completion(**history, tools=[tool], tool_choice="none")
assert second.choices[0].message.content
