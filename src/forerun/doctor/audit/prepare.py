"""Prepares an audit: opens the server and what its texts are compared with, reads prompts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from forerun.bounded_read import json_lines
from forerun.client.connection import ClientConfig
from forerun.client.urls import is_url, shown_source, shown_url
from forerun.doctor.audit.config import KINDS, AuditConfig, Kind, kinds_of
from forerun.doctor.audit.endpoint import HttpEndpoint
from forerun.doctor.audit.records import StateFile
from forerun.doctor.audit.reference import Reference, ReportedLogprobs, load_reference
from forerun.doctor.audit.rounds import Chat, Prompt
from forerun.doctor.audit.run import Audit
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.measure.prompt_files import STREAM, read_entries
from forerun.models.catalog import chat_prompts, held_out_prompts
from forerun.terminal_text import write_count

_MOST_PROMPTS, _JOINED_EVERY, _NUM_JOINED = 400, 10, 6
"""Most prompts; of the shipped ones, one in ten is several of them, one after the other."""
_NUM_CHATS = 20
_LEAST_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditSource:
    """What is audited, and what it is compared with.

    Attributes:
        url: address of the server.
        reference: a model, the address of a server without speculation, or "self"; see
            `forerun audit --help`.
        draft: the draft model of the server; it needs a model as reference.
        model: its name on the server; None takes the first one that it lists.
        key_variables: environment variables with the API keys of the server and of the reference.
        prompts: file of texts; None takes the shipped ones.
        state: file that records questions and answers.
    """

    url: str
    reference: str | None = None
    draft: str | None = None
    model: str | None = None
    key_variables: Sequence[str] = ()
    prompts: Path | None = None
    state: Path | None = None


def prepare_audit(source: AuditSource, config: AuditConfig, stack: ExitStack) -> Audit:
    """Return the audit of a server; the stack closes its connections, model and state file."""
    name, keys = source.reference, source.key_variables
    is_model = name is not None and name != "self" and not is_url(name)
    control = None
    usual = ClientConfig(url=source.url, model=source.model, key_variable=next(iter(keys), None))
    limit_s = max(_LEAST_ANSWER_S, config.max_seconds / 4.0)
    server = replace(
        usual, timeout_s=min(limit_s, usual.timeout_s), stream_s=min(limit_s, usual.stream_s)
    )
    if name is not None and is_url(name):
        control = replace(server, url=name, model=None, key_variable=keys[-1] if keys else None)
    endpoint = HttpEndpoint(
        server, control, wants_logprobs=not is_model, num_clients=config.num_clients
    )
    stack.callback(endpoint.close)
    texts, messages = _read_prompts(source.prompts)
    reference: Reference = ReportedLogprobs()
    encode: Callable[[str], tuple[int, ...] | None] = endpoint.tokenize
    if is_model:
        assert name is not None
        longest = max(map(len, (*texts, *messages)))  # a token has a character or more
        needed = min(longest + 2 * config.longest, endpoint.max_context or 1 << 20)
        loaded = load_reference(name, source.draft, max_context=needed)
        endpoint.ids_by_text = loaded.ids_by_text
        tokenizer, reference = loaded.tokenizer, loaded
        if tokenizer is not None:
            encode = lambda text: tuple(tokenizer.encode(text))  # noqa: E731
    prompts = encode_prompts(texts, encode, endpoint.max_context, config)
    if not is_model and not isinstance(prompts[0], str):
        endpoint.find_scoring(prompts[0])
    if name == "self" and not endpoint.scores:
        raise InvalidRequest(
            "--reference self: the server reports no log-probabilities of texts that it reads, or "
            "no token ids (/tokenize); name a model or a second server"
        )
    chats = find_chats(endpoint, messages)
    header = {
        "url": shown_url(source.url),
        "reference": shown_source(name or ""),
        "draft": source.draft or "",
    }
    state = StateFile(source.state, header)
    return Audit(config, endpoint, reference, [*prompts, *chats], state)


def read_kinds(path: Path | None) -> tuple[Kind, ...]:
    """Return the kinds of request that a prompt file has parameters of, or the default ones."""
    if path is None or path.suffix != ".jsonl" or path.is_dir():
        return KINDS
    try:
        rows = [row for _, row in islice(json_lines(path, STREAM), _MOST_PROMPTS)]
    except UnreadableInput as error:
        raise InvalidRequest(f"--prompts: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"--prompts {path} cannot be read: {error}") from error
    return kinds_of(row for row in rows if isinstance(row, dict))


def _read_prompts(path: Path | None) -> tuple[list[str], list[str]]:
    """Return the texts to continue, and the messages to answer."""
    if path is None:
        texts = [prompt.text for prompt in held_out_prompts()]
        for place in range(0, len(texts), _JOINED_EVERY):
            texts[place] = "\n".join(texts[place : place + _NUM_JOINED])
        return texts, [prompt.text for prompt in chat_prompts()][:_NUM_CHATS]
    entries = [*islice(read_entries(path), _MOST_PROMPTS)]
    texts = [entry.text for entry in entries if entry.text]
    messages = [e.messages[0]["content"] for e in entries if e.messages]
    if not texts and not messages:
        raise InvalidRequest(f"--prompts {path} has no text to continue")
    return texts or messages, messages[:_NUM_CHATS]


def find_chats(endpoint: HttpEndpoint, messages: Sequence[str]) -> list[Chat]:
    """Return messages with their prompts; where one is refused, no more are tried."""
    found: list[Chat] = []
    for text in messages:
        ids = endpoint.tokenize(text, is_message=True)
        if not ids:
            break
        found.append(Chat(message=text, ids=ids))
    return found


def encode_prompts(
    texts: Sequence[str],
    encode: Callable[[str], tuple[int, ...] | None],
    max_context: int | None,
    config: AuditConfig,
) -> list[Prompt]:
    """Return the ids of prompts, or their texts if ids are unknown; says which ones are cut."""
    found: list[Prompt] = []
    # A text is scored with room for one more token.
    most = None if max_context is None else max(1, max_context - config.num_tokens - 1)
    num_cut = 0
    for text in texts:
        ids = encode(text)
        if ids is None:
            return [*texts]
        num_cut += most is not None and len(ids) > most
        found.append(ids[:most])
    if num_cut:
        print(
            f"{write_count(num_cut, 'prompt')} cut to {most} tokens: the server's context holds "
            f"{max_context}",
            file=sys.stderr,
        )
    return found
