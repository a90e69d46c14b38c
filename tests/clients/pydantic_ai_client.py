"""Pydantic AI: text, a stream, and output as a type, by a tool and by a schema."""

from __future__ import annotations

import asyncio

from common import KEY, MODEL, PROMPT, URL, City
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.messages import (
    ModelRequest,
    ModelResponse,
    ToolCallPart,
    ToolReturnPart,
    UserPromptPart,
)
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=URL, api_key=KEY))
settings = {"temperature": 0, "max_tokens": 200, "parallel_tool_calls": False}
text = Agent(model, model_settings=settings).run_sync(PROMPT).output
assert text
assert isinstance(
    Agent(model, output_type=City, model_settings=settings).run_sync(PROMPT).output, City
)
native = Agent(model, output_type=NativeOutput(City), model_settings=settings)
assert isinstance(native.run_sync(PROMPT).output, City)


async def streamed() -> str:
    async with Agent(model, model_settings=settings).run_stream(PROMPT) as result:
        parts = [part async for part in result.stream_text(delta=True)]
    return "".join(parts)


assert asyncio.run(streamed()) == text
agent = Agent(model, model_settings=settings)


@agent.tool_plain
def look_up(name: str) -> str:
    """Look a city up."""
    return "found"


call = ToolCallPart("look_up", {"name": "Rome"}, tool_call_id="call-1")
history = [
    ModelRequest(parts=[UserPromptPart(PROMPT)]),
    ModelResponse(parts=[call]),
    ModelRequest(parts=[ToolReturnPart("look_up", "found", tool_call_id="call-1")]),
]
assert agent.run_sync(message_history=history).output
