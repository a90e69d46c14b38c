"""OpenAI Agents: runs over chats and over responses, streams, output as a type, a tool."""

from __future__ import annotations

import asyncio

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from common import KEY, MODEL, PROMPT, URL, City
from openai import AsyncOpenAI

set_tracing_disabled(True)
settings = ModelSettings(temperature=0, max_tokens=200)
calls = []


@function_tool
def look_up(city: City) -> str:
    """Look a city up."""
    calls.append(city)
    return "found"


async def main() -> None:
    client = AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model=MODEL, openai_client=client)
        agent = Agent(name="agent", model=model, model_settings=settings)
        if kind is OpenAIChatCompletionsModel:  # a response that max_tokens ends is an error
            assert (await Runner.run(agent, PROMPT)).final_output
        typed = agent.clone(output_type=City)
        found = (await Runner.run(typed, PROMPT)).final_output
        assert isinstance(found, City), kind
        streamed = Runner.run_streamed(typed, PROMPT)
        async for _ in streamed.stream_events():
            pass
        assert streamed.final_output == found, kind
        forced = ModelSettings(
            temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
        )
        caller = agent.clone(
            tools=[look_up], model_settings=forced, tool_use_behavior="stop_on_first_tool"
        )
        calls.clear()
        assert (await Runner.run(caller, PROMPT)).final_output == "found", kind
        assert isinstance(calls[0], City), kind
        if kind is OpenAIChatCompletionsModel:
            # After a call the choice of tools is free again, and the result is answered by text.
            again = caller.clone(tool_use_behavior="run_llm_again")
            assert (await Runner.run(again, PROMPT, max_turns=4)).final_output


asyncio.run(main())
