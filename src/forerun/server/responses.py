"""OpenAI's Responses API: requests as conversations, and answers as items, whole or in events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field

from forerun.engine.intake import text_of
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.errors import InvalidRequest
from forerun.models.tokenizers import Tokenizer
from forerun.server.answers import Json, usage_of
from forerun.server.protocol import Body, ChatRequest, GenerationFields, GenerationRequest
from forerun.server.tool_calls import ToolCall, ToolCallParser, ToolFormat


class TextFormat(Body):
    """The form of the text: free, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(Body):
    """Options of the text of an answer."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class ResponsesRequest(GenerationFields):
    """Body of `/v1/responses`; nothing is stored, so each request holds the whole conversation."""

    input: str | Annotated[list[dict[str, Any]], Field(fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: TextOptions = TextOptions()
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] = "auto"
    n: Literal[1] = 1
    reasoning: dict[str, Any] | None = None
    include: Annotated[list[str], Field(max_length=0)] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] = False
    previous_response_id: None = None

    @property
    def repeated(self) -> Json:
        """The fields that the response repeats; raises InvalidRequest where one is no Unicode."""
        fields = {
            "instructions": self.instructions,
            "metadata": self.metadata or {},
            "text": self.text.model_dump(by_alias=True, exclude_none=True),
            "tool_choice": self.tool_choice,
            "tools": self.tools or [],
        }
        try:
            msgspec.json.encode(fields)
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"a text of the fields that the response repeats is no Unicode: {error.reason}"
            ) from None
        return fields


class ResponsesChat(ChatRequest):
    """A request to `/v1/responses` as a chat, with the fields that its response repeats."""

    repeated: Json = Field(default_factory=dict)

    @classmethod
    def read(cls, data: Any) -> ResponsesChat:
        """Return the chat that a parsed body asks for.

        Raises ValidationError, and InvalidRequest for items and tools that are not supported.
        """
        asked = ResponsesRequest.model_validate(data)
        messages: list[Json] = []
        if asked.instructions is not None:
            messages.append({"role": "system", "content": asked.instructions})
        items = asked.input
        for item in [{"role": "user", "content": items}] if isinstance(items, str) else items:
            _add_item(messages, item)
        choice = asked.tool_choice
        if isinstance(choice, dict):
            choice = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
        shared = asked.model_fields_set & GenerationFields.model_fields.keys() - {"ignored"}
        fields = {name: getattr(asked, name) for name in shared} | {
            "messages": messages,
            "tools": [_chat_tool(tool) for tool in asked.tools] if asked.tools else None,
            "tool_choice": choice,
            "max_completion_tokens": asked.max_output_tokens,
        }
        form = asked.text.format
        if form.type != "text":
            if asked.response_format is not None:
                raise InvalidRequest("the text can follow one grammar; the request gives several")
            schema = {"name": form.name, "schema": form.schema_} if form.schema_ else None
            fields["response_format"] = {"type": form.type, "json_schema": schema}
        found = cls.model_validate(fields)
        found.ignored = asked.ignored
        found.repeated = asked.repeated
        return found


def _chat_tool(tool: Json) -> Json:
    if tool.get("type") != "function":
        raise InvalidRequest(f"tools of type {tool.get('type')!r:.200} are not offered here")
    names = ("name", "description", "parameters")
    return {"type": "function", "function": {n: tool[n] for n in names if tool.get(n) is not None}}


def _add_item(messages: list[Json], item: Json) -> None:
    """Append an item of the input to the messages; calls of one answer form one message."""
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        role = "system" if role == "developer" else role
        messages.append({"role": role, "content": text_of(item.get("content"))})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
    elif kind == "function_call_output":
        content = text_of(item.get("output"))
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
    else:
        raise InvalidRequest(f"input items of type {kind!r:.200} are not supported")


class ResponsesAnswer:
    """The response to a request to `/v1/responses`."""

    def __init__(
        self,
        request_id: str,
        model: str,
        body: GenerationRequest,
        tokenizer: Tokenizer,
        tool_format: ToolFormat | None = None,
        num_prompt_tokens: Sequence[int] = (),
    ) -> None:
        self.id = request_id
        self.model = model
        assert isinstance(body, ResponsesChat)
        self.body = body
        self.created_at = int(time.time())
        names = body.tool_names
        self._parser = ToolCallParser(tool_format, names) if tool_format and names else None
        self._items: list[Json] = []
        self._text: Json | None = None  # the item whose text grows
        self._num_events = 0

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        completion = outputs[0].completions[0]
        for _ in self._grown(completion.text, completion.finish_reason):
            pass
        return msgspec.json.encode(self._response(completion.finish_reason, outputs))

    def first(self, num_choices: int) -> bytes:
        begun = {"response": self._response(None, ())}
        return self._event("response.created", begun) + self._event("response.in_progress", begun)

    def chunk(self, at: int, chunk: StreamChunk) -> bytes:
        """Return the events of a chunk of the text."""
        events = self._grown(chunk.text, chunk.finish_reason)
        return b"".join(self._event(kind, fields) for kind, fields in events)

    def last(self, outputs: Sequence[RequestOutput]) -> bytes:
        response = self._response(outputs[0].completions[0].finish_reason, outputs)
        return self._event(f"response.{response['status']}", {"response": response})

    def failed(self, message: str, status: int) -> bytes:
        error = {"code": "server_error", "message": message}
        response = {**self._response(None, ()), "status": "failed", "error": error}
        return self._event("response.failed", {"response": response})

    def _event(self, kind: str, fields: Json) -> bytes:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + msgspec.json.encode(content) + b"\n\n"

    def _grown(self, text: str, finish_reason: str | None) -> Iterator[tuple[str, Json]]:
        """Add text to the items of the answer, and yield the events of what changes."""
        is_last, calls = finish_reason is not None, list[ToolCall]()
        if self._parser is not None:
            text, calls = self._parser.feed(text, is_last=is_last)
        if text:
            yield from self._grown_text(text)
        for call in calls:
            yield from self._ended_text()
            found = call.to_dict(self._parser.format) if self._parser else {}
            yield from self._called(found["id"], call.name, call.arguments)
        if is_last:
            if not self._items:  # an answer has at least one item
                yield from self._grown_text("")
            yield from self._ended_text(is_cut=finish_reason != "stop")

    def _grown_text(self, text: str) -> Iterator[tuple[str, Json]]:
        if self._text is None:
            item = {"type": "message", "role": "assistant", "status": "in_progress", "content": []}
            self._text = self._new_item("msg", item)
            yield "response.output_item.added", {**self._place, "item": self._text}
            self._text["content"] = [{"type": "output_text", "text": "", "annotations": []}]
            part = {"content_index": 0, "part": self._text["content"][0]}
            yield "response.content_part.added", self._of_item | part
        self._text["content"][0]["text"] += text
        if text:
            delta = {"content_index": 0, "delta": text, "logprobs": []}
            yield "response.output_text.delta", self._of_item | delta

    def _ended_text(self, *, is_cut: bool = False) -> Iterator[tuple[str, Json]]:
        if self._text is None:
            return
        item, self._text = self._text, None
        item["status"] = "incomplete" if is_cut else "completed"
        (part,) = item["content"]
        text = {"content_index": 0, "text": part["text"], "logprobs": []}
        yield "response.output_text.done", self._of_item | text
        yield "response.content_part.done", self._of_item | {"content_index": 0, "part": part}
        yield "response.output_item.done", {**self._place, "item": item}

    def _called(self, call_id: str, name: str, arguments: str) -> Iterator[tuple[str, Json]]:
        item = {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        item = self._new_item("fc", {**item, "status": "in_progress"})
        yield "response.output_item.added", {**self._place, "item": item}
        yield "response.function_call_arguments.delta", self._of_item | {"delta": arguments}
        item |= {"arguments": arguments, "status": "completed"}
        done = {"name": name, "arguments": arguments}
        yield "response.function_call_arguments.done", self._of_item | done
        yield "response.output_item.done", {**self._place, "item": item}

    def _new_item(self, prefix: str, item: Json) -> Json:
        found = {"id": f"{prefix}_{self.id}_{len(self._items)}", **item}
        self._items.append(found)
        return found

    @property
    def _place(self) -> Json:
        return {"output_index": len(self._items) - 1}

    @property
    def _of_item(self) -> Json:
        return {"item_id": self._items[-1]["id"], **self._place}

    def _response(self, finish_reason: str | None, outputs: Sequence[RequestOutput]) -> Json:
        """Return the response; without a finish reason as it is at the beginning."""
        status = "in_progress" if finish_reason is None else "completed"
        details = None
        if finish_reason not in (None, "stop"):
            status, details = "incomplete", {"reason": "max_output_tokens"}
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self.created_at,
            "model": self.model,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": self._items,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "max_output_tokens": self.body.longest,
            "temperature": self.body.temperature,
            "top_p": self.body.top_p,
            **self.body.repeated,
            "usage": _usage_of(outputs) if outputs else None,
        }


def _usage_of(outputs: Sequence[RequestOutput]) -> Json:
    """Return the usage of a response under the names of this API."""
    found = usage_of(outputs)
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": found["prompt_tokens_details"],
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": found["total_tokens"],
        "speculative_decoding": found["speculative_decoding"],
    }
