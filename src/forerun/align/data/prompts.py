"""Tokenised prompts, with the responses that some records already contain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from forerun.align.data.sample import Sample, prompt_hash
from forerun.cache import hash_of
from forerun.errors import InvalidRequest
from forerun.measure.prompt_files import Message, PromptEntry, read_entries
from forerun.models.tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRecord:
    """One prompt of a data set, as token ids.

    Attributes:
        prompt_ids: tokens to be continued, at most as many as were asked for.
        messages: the conversation it was rendered from; empty for plain text.
        brought: texts with the response, or all answers of a conversation, that records of this
            prompt have; their prompt is not cut.
    """

    prompt_ids: tuple[int, ...]
    prompt_hash: str
    tag: str
    where: str
    messages: tuple[Message, ...] = ()
    brought: tuple[Sample, ...] = ()


def read_prompts(path: Path, tokenizer: Tokenizer, max_prompt_tokens: int) -> list[PromptRecord]:
    """Read the prompts of a file or folder without duplicates, in the order of the file.

    Texts are continued as they are. Conversations go through the tokenizer's chat template and are
    continued with the assistant's last answer, which the record may have.
    """
    found: dict[str, PromptRecord] = {}
    brought: dict[str, list[Sample]] = {}
    seen: set[str] = set()
    for entry in read_entries(path):
        key = hash_of(repr((entry.text, entry.messages, entry.response)).encode())
        if key in seen:  # a table may repeat one row millions of times
            continue
        seen.add(key)
        try:
            record = record_of(entry, tokenizer, max_prompt_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(f"{entry.where}: {error}") from error
        found.setdefault(record.prompt_hash, record)
        brought.setdefault(record.prompt_hash, []).extend(record.brought)
    if not found:
        raise InvalidRequest(f"{path} has no prompts")
    return [replace(record, brought=tuple(brought[key])) for key, record in found.items()]


def record_of(entry: PromptEntry, tokenizer: Tokenizer, max_prompt_tokens: int) -> PromptRecord:
    messages = _messages_of(entry)
    if messages:
        has_answer = messages[-1]["role"] == "assistant"
        asked = messages[:-1] if has_answer else messages
        prompt_ids = tokenizer.encode(tokenizer.render_chat(asked), add_special_tokens=False)
        text = _learned_text(messages, tokenizer) if has_answer else None
    else:
        asked = ()
        prompt_ids = tokenizer.encode(entry.text or "")
        text = continued(prompt_ids, entry.response, tokenizer)
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty: the tokenizer makes no token of it")
    kept = shortened(prompt_ids, tokenizer.encode(""), max_prompt_tokens)
    own_hash = prompt_hash(kept)
    return PromptRecord(
        prompt_ids=kept,
        prompt_hash=own_hash,
        tag=entry.tag,
        where=entry.where,
        messages=asked,
        brought=() if text is None else (sample_of(text, own_hash, entry.tag),),
    )


def _messages_of(entry: PromptEntry) -> tuple[Message, ...]:
    """Return an entry's conversation with its response appended; empty for plain text."""
    if not entry.messages or entry.response is None:
        return entry.messages
    if entry.messages[-1]["role"] == "assistant":
        raise InvalidRequest('it has a "response", but its messages end with an answer already')
    return (*entry.messages, {"role": "assistant", "content": entry.response})


Text = tuple[list[int], list[tuple[int, int]]]
"""Token ids, and the ranges of them that are learned."""


def continued(prompt_ids: Sequence[int], response: str | None, tokenizer: Tokenizer) -> Text | None:
    """Append the record's response to a plain prompt, without an end token."""
    if response is None:
        return None
    ids = [*prompt_ids, *tokenizer.encode(response, add_special_tokens=False)]
    return ids, [(max(len(prompt_ids), 1), len(ids))]


def sample_of(text: Text, own_hash: str, tag: str) -> Sample:
    """Make a training sample of a prompt record that contains its response."""
    token_ids, spans = text
    return Sample(
        prompt_hash=own_hash,
        token_ids=tuple(token_ids),
        spans=tuple(spans),
        tag=tag,
        source="fixed",
    )


def shortened(ids: Sequence[int], start: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the last `most` tokens of a prompt, after the special tokens at its start if any."""
    if len(ids) <= most:
        return tuple(ids)
    kept = tuple(start) if len(start) < most and list(ids[: len(start)]) == list(start) else ()
    return (*kept, *ids[len(ids) - (most - len(kept)) :])


def _learned_text(
    messages: Sequence[Message], tokenizer: Tokenizer
) -> tuple[list[int], list[tuple[int, int]]]:
    """Render a conversation as token ids and find the ranges of the assistant's messages.

    What is asked and what is answered are made into tokens one by one, so that tokens end where a
    prompt ends, as they do when the draft is used. An answer includes the token that ends it. A
    template may render an early answer otherwise once others follow (without its thoughts, say):
    such answers are context and not learned.
    """
    whole = tokenizer.render_chat(messages, with_answer_begun=False)
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    done = 0
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.render_chat(messages[:index])
        answered = tokenizer.render_chat(messages[: index + 1], with_answer_begun=False)
        if not (whole.startswith(answered) and answered.startswith(asked)):
            continue
        ids += tokenizer.encode(whole[done : len(asked)], add_special_tokens=False)
        answer = tokenizer.encode(whole[len(asked) : len(answered)], add_special_tokens=False)
        eos = tokenizer.eos_token_id  # a line end may follow it
        length = answer.index(eos) + 1 if eos in answer else len(answer)
        spans.append((len(ids), len(ids) + length))
        ids += answer
        done = len(answered)
    if done < len(whole):
        raise InvalidRequest(
            "the chat template does not render the answer after its prompt, so that the answer's "
            "tokens cannot be found; give prompts without answers"
        )
    return ids, spans
