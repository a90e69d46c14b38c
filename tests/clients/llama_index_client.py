"""LlamaIndex: completions, chats, streams, structured output by a tool."""

from __future__ import annotations

from common import KEY, MODEL, PROMPT, URL, City
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def look_up(name: str, is_capital: bool, size: str) -> str:
    """Look a city up."""
    return "found"


settings = {"model": MODEL, "api_base": URL, "api_key": KEY, "temperature": 0, "max_tokens": 200}
plain = OpenAILike(**settings, is_chat_model=False)
text = plain.complete(PROMPT).text
assert text
assert "".join(part.delta or "" for part in plain.stream_complete(PROMPT)) == text
chat = OpenAILike(**settings, is_chat_model=True, is_function_calling_model=True)
messages = [ChatMessage(role="user", content=PROMPT)]
answer = chat.chat(messages).message.content
assert answer
assert "".join(part.delta or "" for part in chat.stream_chat(messages)) == answer
assert isinstance(chat.structured_predict(City, PromptTemplate(PROMPT)), City)
tool = FunctionTool.from_defaults(look_up, fn_schema=City)
called = chat.chat_with_tools([tool], user_msg=PROMPT, tool_required=True)
(call,) = chat.get_tool_calls_from_response(called)
result = ChatMessage(role="tool", content="found", additional_kwargs={"tool_call_id": call.tool_id})
second = chat.chat_with_tools(
    [tool], chat_history=[*messages, called.message, result], tool_choice="none"
)
assert second.message.content
