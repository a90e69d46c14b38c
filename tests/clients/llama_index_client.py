"""LlamaIndex: completions, chats, streams, structured output by a tool."""

from __future__ import annotations

from common import KEY, MODEL, PROMPT, URL, City
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.llms.openai_like import OpenAILike

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
