"""Sends the requests of an audit to a server with the OpenAI API."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

import msgspec

from forerun.client.client import MAX_ID, Client, ServerAnswer, TokenLogprob
from forerun.client.connection import ID_FLAGS, ClientConfig
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.doctor.audit.config import Kind
from forerun.doctor.audit.records import HIGHEST, LOWEST, AuditAnswer, Question
from forerun.engine.http_backend import NEUTRAL_FIELDS
from forerun.errors import InvalidRequest, ServerUnavailable

NUM_TOP = 20
MOST_REQUESTS = len(ID_FLAGS)
"""Requests that one question can take: a strict server refuses flags that it does not know."""


@runtime_checkable
class Endpoint(Protocol):
    """Interface of a server that is audited.

    Attributes:
        control: how tokens without speculation are had: "off" by a field of the request, "server"
            from a second server, or "first tokens" by asking for single tokens.
    """

    name: str
    control: str

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        """Send requests and return their answers, in order; a failed one has its `problem` set."""
        ...


class HttpEndpoint:
    """A server, and perhaps a second one with the same model and without speculation.

    Args:
        ids_by_text: token id by text, for texts that only one token has; used for a server that
            streams one token per event without its id.

    Raises:
        InvalidRequest: a server refuses the key, or does not serve the model.
        ServerUnavailable: a server cannot be reached.
    """

    def __init__(
        self,
        server: ClientConfig,
        control: ClientConfig | None = None,
        *,
        wants_logprobs: bool,
        num_clients: int,
        ids_by_text: Mapping[str, int] | None = None,
        transport: Transport | None = None,
    ) -> None:
        self.name = shown_url(server.url)
        self.wants_logprobs = wants_logprobs
        self._ids_by_text = ids_by_text or {}
        self._clients: dict[str, Client] = {}
        for arm, config in (("served", server), ("control", control)):
            if config is not None:
                # A further try is a request of its own, which the limits count.
                self._clients[arm] = Client(
                    replace(config, num_tries=1, max_connections=num_clients), transport
                )
        try:
            cards = {arm: client.find_model() for arm, client in self._clients.items()}
        except BaseException:
            self.close()
            raise
        self._models = {arm: card.id for arm, card in cards.items()}
        self._owners = {arm: card.owned_by for arm, card in cards.items()}
        off = "first tokens" if cards["served"].drafters is None else "off"  # forerun can switch
        self.control = "server" if "control" in self._clients else off
        self._executor = ThreadPoolExecutor(num_clients)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        num_before = self._num_posted()
        found = [*self._executor.map(lambda q: self._answer(q, kinds[q.kind]), questions)]
        num_more = self._num_posted() - num_before - len(found)
        first = found[0]
        return [
            msgspec.structs.replace(first, num_requests=first.num_requests + num_more),
            *found[1:],
        ]

    def _num_posted(self) -> int:
        return sum(client.connection.num_posted for client in self._clients.values())

    def _answer(self, question: Question, kind: Kind) -> AuditAnswer:
        arm = question.arm if question.arm in self._clients else "served"
        if kind.frequency_penalty and self._owners[arm] == "llamacpp":
            why = "llama.cpp penalises the prompt's tokens too"
            return AuditAnswer(num_charged=0, problem=why, is_refused=True)
        fields: dict[str, object] = {
            **NEUTRAL_FIELDS.get(self._owners[arm], {}),
            **kind.fields,
            "model": self._models[arm],
            "max_tokens": question.num_tokens,
        }
        if question.arm == "control" and self.control == "off":
            fields["speculation"] = "off"
        prompt = question.prompt if isinstance(question.prompt, str) else [*question.prompt]
        events: list[ServerAnswer] = []
        problem, is_refused, num_sent = None, False, 0
        try:
            wanted = NUM_TOP if self.wants_logprobs and not kind.has_grammar else None
            for event in self._clients[arm].stream(prompt, fields, logprobs=wanted):
                events.append(event)
                num_sent += _num_tokens(event)
                if num_sent > question.num_tokens:
                    problem = f"more than the {question.num_tokens} tokens asked for were sent"
                    break
        except InvalidRequest as error:
            problem, is_refused = str(error), True
        except ServerUnavailable as error:
            problem = str(error)
        counts_end = self._owners[arm] == "llamacpp"
        ids = _ids_of(events, self._ids_by_text, counts_end=counts_end)
        return _answer_of(question, events, ids, problem, is_refused)


def _ids_of(
    events: Sequence[ServerAnswer], ids_by_text: Mapping[str, int], *, counts_end: bool
) -> list[int] | None:
    """Return the ids of a stream's tokens; None if one of them is uncertain, or cannot be one.

    llama.cpp sends accepted draft tokens without id and log-probability, one event each. Their ids
    follow from their texts if the server counts as many tokens as there are events; otherwise two
    tokens may be in one event, with the text of a third. `counts_end`: the server counts the token
    that ends a text.
    """
    ids: list[int | None] = []
    by_text = False
    for event in events:
        if event.token_ids:
            ids += event.token_ids
        elif event.logprobs:
            ids += (token.token_id for token in event.logprobs)
        elif event.text:
            ids.append(ids_by_text.get(event.text))
            by_text = True
    found = [token for token in ids if token is not None and 0 <= token <= MAX_ID]
    if not found or len(found) < len(ids):
        return None
    used = max((e.usage.completion_tokens or 0 for e in events if e.usage), default=0)
    has_ended = any(event.finish_reason == "stop" for event in events)
    is_counted = used == len(found) + (has_ended and counts_end)
    return None if by_text and not is_counted else found


def _num_tokens(event: ServerAnswer) -> int:
    """Return the least number of tokens that an event of a stream can hold."""
    return max(len(event.token_ids or ()), len(event.logprobs or ())) or int(bool(event.text))


def _answer_of(
    question: Question,
    events: Sequence[ServerAnswer],
    ids: list[int] | None,
    problem: str | None,
    is_refused: bool,
) -> AuditAnswer:
    logprobs = [token for event in events for token in event.logprobs or ()]
    used = [event.usage.completion_tokens for event in events if event.usage is not None]
    counted = max([sum(map(_num_tokens, events)), *(n for n in used if n is not None)])
    is_whole = problem is None and (ids is not None or any(n is not None for n in used))
    refused = is_refused and not events
    return AuditAnswer(
        token_ids=None if ids is None else tuple(ids),
        step_sizes=tuple(len(event.token_ids or event.logprobs or ()) for event in events),
        text="".join(event.text or "" for event in events),
        finish_reason=next((e.finish_reason for e in reversed(events) if e.finish_reason), None),
        top=tuple(_top_of(token) for token in logprobs),
        logprobs=tuple(_clamp(t.logprob or 0.0) for t in logprobs),
        num_charged=0 if refused else counted if is_whole else max(counted, question.num_tokens),
        problem=problem,
        is_refused=is_refused,
    )


def _top_of(token: TokenLogprob) -> tuple[tuple[int, float], ...]:
    """Return the alternatives with their ids; a text without an id is named by its hash."""
    return tuple((_id_of(text, token_id), _clamp(value)) for text, token_id, value in token.top)


def _clamp(logprob: float) -> float:
    return min(max(logprob, LOWEST), HIGHEST)


def _id_of(text: str, token_id: int | None) -> int:
    if token_id is not None:
        return token_id
    name = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=7).digest()
    return int.from_bytes(name, "big") + (1 << 40)
