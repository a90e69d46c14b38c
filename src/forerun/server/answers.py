"""Responses in the form of the OpenAI API, with acceptance figures in the usage."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any

import msgspec

from forerun.engine.results import Completion, RequestOutput, StreamChunk, TokenLogprobs
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.server.errors import error_body
from forerun.server.protocol import ChatRequest, CompletionRequest, GenerationRequest
from forerun.server.tool_calls import ToolCallParser, ToolFormat
from forerun.theory.acceptance import AcceptanceCounts

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream."""

Json = dict[str, Any]


def event(data: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


class Answer:
    """The response to a request to `/v1/chat/completions` or `/v1/completions`."""

    def __init__(
        self,
        request_id: str,
        model: str,
        body: GenerationRequest,
        tokenizer: Tokenizer,
        tool_format: ToolFormat | None = None,
        num_prompt_tokens: Sequence[int] = (),
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        names = body.tool_names if isinstance(body, ChatRequest) else []
        self._new_parser = (
            partial(ToolCallParser, tool_format, names) if tool_format and names else None
        )
        self._parsers: dict[int, ToolCallParser] = {}
        self.body = body
        self.tokenizer = tokenizer
        self.is_chat = isinstance(body, ChatRequest)
        prefix, kind = (
            ("chatcmpl", "chat.completion") if self.is_chat else ("cmpl", "text_completion")
        )
        self.head = {
            "id": f"{prefix}-{request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": model,
        }
        self.chunk_head = {**self.head, "object": kind + ".chunk"} if self.is_chat else self.head
        self._texts: dict[int, Detokenizer] = {}
        self._num_tokens: dict[int, int] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the body of a response that is not streamed."""
        body = self.body
        if isinstance(body, CompletionRequest) and body.is_only_scored:
            outputs = [_remove_tokens(output) for output in outputs]
        choices = [
            self._convert_result(place * body.n + completion.index, completion)
            | self._describe_prompt(place, output, completion)
            for place, output in enumerate(outputs)
            for completion in output.completions
        ]
        return msgspec.json.encode({**self.head, "choices": choices, "usage": usage_of(outputs)})

    def first(self, num_choices: int) -> bytes:
        """Return the first events of a stream: the role of each choice, or its echoed prompt."""
        texts: list[Json] = []
        if self.is_chat:
            texts = [{"delta": {"role": "assistant", "content": ""}}] * num_choices
        elif isinstance(self.body, CompletionRequest) and self.body.echo:
            places = range(len(self.body.prompts))
            texts = [{"text": self._echo(place)} for place in places for _ in range(self.body.n)]
        return b"".join(
            event(
                {**self.chunk_head, "choices": [_build_choice(at, text)], **self._report_usage(at)}
            )
            for at, text in enumerate(texts)
        )

    def _echo(self, place: int) -> str:
        """Return the text of a prompt."""
        assert isinstance(self.body, CompletionRequest)
        prompt = self.body.prompts[place]
        return prompt if isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _describe_prompt(self, place: int, output: RequestOutput, completion: Completion) -> Json:
        """Return the fields of a choice that concern its prompt, if they are asked for."""
        body = self.body
        if not isinstance(body, CompletionRequest):
            return {}
        found: Json = {}
        scored = output.prompt_logprobs
        if body.prompt_logprobs is not None and scored is not None:
            found["prompt_logprobs"] = [None, *map(self._index_by_id, scored)]
        if not body.echo:
            return found
        prompt = self._echo(place)
        found["text"] = prompt + completion.text
        if completion.logprobs is not None and scored is not None:
            parts = (
                self._list_logprobs(scored, Detokenizer(self.tokenizer), output.prompt_token_ids),
                self._list_logprobs(completion.logprobs, Detokenizer(self.tokenizer)),
            )
            parts[1]["text_offset"] = [len(prompt) + at for at in parts[1]["text_offset"]]
            found["logprobs"] = {name: [*parts[0][name], *parts[1][name]] for name in parts[0]}
        return found

    def _index_by_id(self, entry: TokenLogprobs) -> Json:
        """Return log-probabilities in the form that vLLM uses for prompts."""
        found = {entry.token_id: {"logprob": entry.logprob, "rank": None}}
        for rank, (token, logprob) in enumerate(entry.top, start=1):
            found[token] = {"logprob": logprob, "rank": rank}
        return {
            str(token): {**values, "decoded_token": self._decode_token(token)}
            for token, values in found.items()
        }

    def chunk(self, at: int, chunk: StreamChunk) -> bytes:
        """Return the event of a chunk; empty if the chunk has neither text nor other fields."""
        body = self.body
        self._num_tokens[at] = self._num_tokens.get(at, 0) + len(chunk.token_ids)
        extras = body.return_token_ids or body.return_token_sources or chunk.logprobs is not None
        choice = self._convert_result(at, chunk)
        text = choice.get("text", choice.get("delta", {}).get("content"))
        if text == "" and choice["finish_reason"] is None and not extras:
            return b""
        return event({**self.chunk_head, "choices": [choice], **self._report_usage(at)})

    def _report_usage(self, at: int) -> Json:
        """Return the usage of one choice up to now, where each event is to have it."""
        options = self.body.stream_options
        if options is None or not (options.include_usage and options.continuous_usage_stats):
            return {}
        num_prompt = self.num_prompt_tokens[at // self.body.n]
        num = self._num_tokens.get(at, 0)
        tokens = {"prompt_tokens": num_prompt, "completion_tokens": num}
        return {"usage": tokens | {"total_tokens": num_prompt + num}}

    def last(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the last events of a stream."""
        options = self.body.stream_options
        if options is None or not options.include_usage:
            return DONE
        return event({**self.chunk_head, "choices": [], "usage": usage_of(outputs)}) + DONE

    def failed(self, message: str, status: int) -> bytes:
        """Return the last events of a stream that an error ends."""
        return b"data: " + error_body(message, status) + b"\n\n" + DONE

    def _convert_result(self, at: int, result: StreamChunk | Completion) -> Json:
        """Return a choice of the response, or what a chunk adds to it."""
        content, calls, reason = self._split_content(at, result.text, result.finish_reason)
        text: Json = {"text": content}
        if self.is_chat and isinstance(result, StreamChunk):
            text = {"delta": {"content": content} if content or not calls else {}}
            if calls:
                text["delta"]["tool_calls"] = calls
        elif self.is_chat:
            text = {"message": {"role": "assistant", "content": content}}
            if calls:
                for call in calls:
                    del call["index"]  # a field of streams
                text["message"] |= {"content": content or None, "tool_calls": calls}
        choice = _build_choice(at, text, reason, result.stop_reason)
        if result.logprobs is not None:
            choice["logprobs"] = self._convert_logprobs(at, result.logprobs)
        return choice | self._list_tokens(result)

    def _split_content(
        self, at: int, text: str, finish_reason: str | None
    ) -> tuple[str, list[Json], str | None]:
        """Return plain text, tool calls and finish reason of new text of one choice."""
        if self._new_parser is None:
            return text, [], finish_reason
        if at not in self._parsers:
            self._parsers[at] = self._new_parser()
        parser = self._parsers[at]
        place = parser.num_calls
        content, found = parser.feed(text, is_last=finish_reason is not None)
        calls = [
            {"index": index, **call.to_dict(parser.format)}
            for index, call in enumerate(found, start=place)
        ]
        is_call = finish_reason == "stop" and parser.num_calls > 0
        return content, calls, "tool_calls" if is_call else finish_reason

    def _list_tokens(self, result: StreamChunk | Completion) -> Json:
        """Return the fields of each token that the request asks for besides the text."""
        found: Json = {}
        if self.body.return_token_ids:
            found["token_ids"] = result.token_ids
        if self.body.return_token_sources:
            found["token_sources"] = [source.value for source in result.sources]
            found["token_texts"] = [self._decode_token(token) for token in result.token_ids]
        return found

    def _convert_logprobs(self, at: int, entries: Sequence[TokenLogprobs]) -> Json:
        if self.is_chat:
            return self._convert_chat_logprobs(entries)
        so_far = self._texts.setdefault(at, Detokenizer(self.tokenizer))
        return self._list_logprobs(entries, so_far)

    def _convert_chat_logprobs(self, entries: Sequence[TokenLogprobs]) -> Json:
        return {
            "content": [
                {
                    **self._describe_token(entry.token_id, entry.logprob),
                    "top_logprobs": [
                        self._describe_token(*alternative) for alternative in entry.top
                    ],
                }
                for entry in entries
            ]
        }

    def _describe_token(self, token: int, logprob: float) -> Json:
        found = {"token": self._name_token(token), "logprob": logprob}
        return found | {"bytes": list(self.tokenizer.token_bytes(token))}

    def _list_logprobs(
        self, entries: Sequence[TokenLogprobs], so_far: Detokenizer, prompt: Sequence[int] = ()
    ) -> Json:
        """Return log-probabilities; the first token of a `prompt` has none.

        The offset of a token is the number of characters of the text before it, which `so_far` has.
        """
        before = [None] * len(prompt[:1])
        tokens = [*prompt[:1], *(entry.token_id for entry in entries)]
        offsets = []
        for token in tokens:
            offsets.append(len(so_far.text))
            so_far.append(token)
        texts = [self._name_token(token) for token in tokens]
        tops = [{self._name_token(token): value for token, value in entry.top} for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [*before, *(entry.logprob for entry in entries)],
            "top_logprobs": [*before, *tops],
            "text_offset": offsets,
        }

    def _name_token(self, token: int) -> str:
        """Return how log-probabilities name a token: by its text, or as vLLM does by its id."""
        by_id = self.body.return_tokens_as_token_ids
        return f"token_id:{token}" if by_id else self._decode_token(token)

    def _decode_token(self, token: int) -> str:
        """Return the text of one token; a special token by its name."""
        if token in self.tokenizer.added:
            return self.tokenizer.added[token][0]
        content = self.tokenizer.token_bytes(token)
        try:
            return content.decode()
        except UnicodeDecodeError:  # a part of a character, named as the OpenAI API names it
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)


def _remove_tokens(output: RequestOutput) -> RequestOutput:
    """Return an output whose samples have no tokens."""
    empty: Json = {"text": "", "token_ids": (), "sources": (), "finish_reason": "length"}
    samples = [
        replace(sample, **empty, logprobs=() if sample.logprobs is not None else None)
        for sample in output.completions
    ]
    return replace(output, completions=tuple(samples))


def _build_choice(
    at: int, text: Json, finish_reason: str | None = None, stop_reason: str | int | None = None
) -> Json:
    """Return one choice of a response; finish reasons unknown to the OpenAI API become "length"."""
    if finish_reason in ("deadline", "abort"):
        finish_reason, stop_reason = "length", finish_reason
    ends = {"finish_reason": finish_reason, "stop_reason": stop_reason}
    return {"index": at, **text, "logprobs": None, **ends}


def usage_of(outputs: Sequence[RequestOutput]) -> Json:
    """Return the usage of a response: token counts and acceptance figures.

    The figures of speculation are those of the steps that drafted; `num_plain_steps` counts the
    others.
    """
    completions = [completion for output in outputs for completion in output.completions]
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    num_output = sum(len(completion.token_ids) for completion in completions)
    cached = sum(output.completions[0].num_cached_tokens for output in outputs)
    counts = reduce(add, (c.acceptance for c in completions), AcceptanceCounts())
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": cached},
        "speculative_decoding": counts.to_dict(),
    }
