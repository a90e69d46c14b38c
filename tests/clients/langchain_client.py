"""LangChain: answers, streams, batches, structured output by schema and by tool, tool calls."""

from __future__ import annotations

from common import KEY, MODEL, PROMPT, URL, City
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI

chat = ChatOpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=200)
text = chat.invoke(PROMPT).content
assert text
assert "".join(chunk.content for chunk in chat.stream(PROMPT)) == text
assert [answer.content for answer in chat.batch([PROMPT, PROMPT])] == [text, text]
assert OpenAI(base_url=URL, api_key=KEY, model=MODEL, temperature=0, max_tokens=8).invoke(PROMPT)
for method in ("json_schema", "function_calling"):
    found = chat.with_structured_output(City, method=method).invoke(PROMPT)
    assert isinstance(found, City), method
called = chat.bind_tools([City], tool_choice="any", parallel_tool_calls=False).invoke(PROMPT)
assert called.tool_calls[0]["name"] == "City"
result = ToolMessage("found", tool_call_id=called.tool_calls[0]["id"])
history = [HumanMessage(PROMPT), called, result]
assert chat.bind_tools([City], tool_choice="none").invoke(history).content
