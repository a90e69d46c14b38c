"""Sends the requests of an audit to a server with the OpenAI API."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Protocol, runtime_checkable

import msgspec

from forerun.client.client import MAX_ID, Client, ServerAnswer, TokenId, TokenLogprob
from forerun.client.connection import ID_FLAGS, BrokenReply, ClientConfig
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.doctor.audit.config import Kind
from forerun.doctor.audit.records import HIGHEST, LOWEST, AuditAnswer, Question
from forerun.doctor.readers.prometheus import read_page
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.measure.request_fields import NEUTRAL_FIELDS

NUM_TOP = 20
_PLACES_APART = 12
"""Distance of the tokens of an answer that are scored where each takes a request."""
_METRICS_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 120.0
"""Most time for a whole answer, or for the next event of a stream."""
MOST_REQUESTS = len(ID_FLAGS)
"""Requests that one question can take: a strict server refuses flags that it does not know."""


@runtime_checkable
class Endpoint(Protocol):
    """Interface of a server that is audited.

    Attributes:
        control: how tokens without speculation are had: "off" by a field of the request, "server"
            from a second server, or "first tokens" by asking for single tokens.
        max_context: tokens of prompt and answer that the server takes; None if it does not say.
    """

    name: str
    control: str

    @property
    def max_context(self) -> int | None: ...

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        """Send requests at once and return their answers, in order.

        A failed one has its `problem` set.
        """
        ...


class HttpEndpoint:
    """A server, and perhaps a second one with the same model and without speculation.

    Attributes:
        ids_by_text: token id by text, for texts that only one token has; used for a server that
            streams one token per event without its id.
        scores: whether the log-probabilities of answers are those of a text that is only read.

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
        self.scores = False
        self.ids_by_text = ids_by_text or {}
        self._clients: dict[str, Client] = {}
        for arm, config in (("served", server), ("control", control)):
            if config is not None:
                # A further try is a request of its own, which the limits count.
                self._clients[arm] = Client(
                    replace(
                        config,
                        num_tries=1,
                        max_connections=num_clients,
                        timeout_s=min(config.timeout_s, _ANSWER_TIMEOUT_S),
                    ),
                    transport,
                )
        try:
            self._cards = {arm: client.find_model() for arm, client in self._clients.items()}
        except BaseException:
            self.close()
            raise
        off = "first tokens" if self._cards["served"].drafters is None else "off"  # forerun's field
        self.control = "server" if "control" in self._clients else off
        self._executor = ThreadPoolExecutor(num_clients)

    @property
    def max_context(self) -> int | None:
        """Tokens of prompt and answer that the server takes; None if it does not say."""
        return self._cards["served"].max_model_len

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def ask(self, questions: Sequence[Question], kinds: Mapping[str, Kind]) -> list[AuditAnswer]:
        num_before, drafted = self._num_posted(), self._drafted_in_all()
        found = [*self._executor.map(lambda q: self._answer(q, kinds[q.kind]), questions)]
        after = self._drafted_in_all()
        if drafted is not None and after is not None:  # its counter does not tell answers apart
            each = max(0, after - drafted) // len(found)  # a server may begin afresh
            found = [
                a if a.num_drafted is not None else msgspec.structs.replace(a, num_drafted=each)
                for a in found
            ]
        if self.scores:
            pairs = zip(questions, found, strict=True)
            found = [*self._executor.map(lambda pair: self._score(*pair), pairs)]
        num_more = self._num_posted() - num_before - len(found)
        first = found[0]
        return [
            msgspec.structs.replace(first, num_requests=first.num_requests + num_more),
            *found[1:],
        ]

    def _num_posted(self) -> int:
        return sum(client.connection.num_posted for client in self._clients.values())

    def _drafted_in_all(self) -> int | None:
        """Return vLLM's count of draft tokens until now; None if there is none."""
        if self._cards["served"].owned_by != "vllm":
            return None
        client = self._clients["served"]
        try:
            page = client.connection.get(
                client.config.base.removesuffix("/v1") + "/metrics", _METRICS_TIMEOUT_S
            )
        except (InvalidRequest, ServerUnavailable):
            return None
        totals = read_page(page.decode("utf-8", "replace")).metrics.totals
        return int(totals.get("vllm:spec_decode_num_draft_tokens", 0.0))

    def _answer(self, question: Question, kind: Kind) -> AuditAnswer:
        arm = question.arm if question.arm in self._clients else "served"
        owner = self._cards[arm].owned_by
        if kind.counts_tokens and owner == "llamacpp":
            why = "llama.cpp penalises the prompt's tokens too"
            return AuditAnswer(num_charged=0, problem=why, is_refused=True)
        fields = {**kind.fields_for(question, owner), "model": self._cards[arm].id}
        if question.arm == "control" and self.control == "off":
            fields["speculation"] = "off"
        events: list[ServerAnswer] = []
        problem, is_refused, num_sent = None, False, 0
        try:
            for event in self._events(self._clients[arm], question, fields, kind):
                events.append(event)
                num_sent += _num_tokens(event)
                if num_sent > question.num_tokens:
                    problem = f"more than the {question.num_tokens} tokens asked for were sent"
                    break
                if question.cut_at is not None and num_sent >= question.cut_at:
                    break
        except InvalidRequest as error:
            problem, is_refused = str(error), True
        except ServerUnavailable as error:
            problem = str(error)
        ids = _ids_of(events, self.ids_by_text, counts_end=owner == "llamacpp")
        return _answer_of(question, events, ids, problem, is_refused)

    def _events(
        self, client: Client, question: Question, fields: dict[str, object], kind: Kind
    ) -> Iterator[ServerAnswer]:
        """Send a question and yield the events of its answer, or the answer as the only one."""
        wanted = NUM_TOP if self.wants_logprobs and not kind.has_grammar else None
        prompt = question.prompt if isinstance(question.prompt, str) else [*question.prompt]
        if question.message:
            message = {"role": "user", "content": question.message}
            yield client.chat([message], fields, logprobs=wanted)
        elif question.is_streamed:
            yield from client.stream(prompt, fields, logprobs=wanted)
        else:
            yield client.complete(prompt, fields, logprobs=wanted)

    # ----------------------------------------------------------------------------- self-reference

    def tokenize(self, text: str, *, is_message: bool = False) -> tuple[int, ...] | None:
        """Return the ids of a text, or of a message to the model; None if the server tells none."""
        client, card = self._clients["served"], self._cards["served"]
        body: dict[str, object] = {"prompt": text, "model": card.id}
        if is_message:
            body = {"messages": [{"role": "user", "content": text}], "model": card.id}
        elif card.owned_by == "llamacpp":
            body = {"content": text, "add_special": True}
        url = client.config.base.removesuffix("/v1") + "/tokenize"
        try:
            found = client.connection.post(url, body, _read_tokens)
        except (InvalidRequest, ServerUnavailable):
            return None
        return found

    def find_scoring(self, ids: Sequence[int]) -> bool:
        """Use the server's log-probabilities of a text that it only reads, if it gives them."""
        question = Question(arm="served", kind="", prompt=tuple(ids), num_tokens=1, group=0)
        answer = AuditAnswer(token_ids=tuple(ids[-2:]), num_charged=0)
        self.scores = any(self._score(question, answer).top)
        self.wants_logprobs = self.wants_logprobs and not self.scores
        return self.scores

    def _score(self, question: Question, answer: AuditAnswer) -> AuditAnswer:
        """Return an answer with its log-probabilities as the server computes them by reading.

        A server reads a prompt in one pass, without a draft, and here without its cache. One that
        gives no log-probabilities of prompts is asked for the next token at some places.
        """
        ids = answer.token_ids
        if not ids or isinstance(question.prompt, str):
            return answer
        arm = "control" if "control" in self._clients else "served"
        card, text = self._cards[arm], [*question.prompt, *ids]
        fields: dict[str, object] = {
            **NEUTRAL_FIELDS.get(card.owned_by, {}),
            "model": card.id,
            "temperature": 1.0,
            "max_tokens": 1,
        }
        if card.owned_by == "vllm":
            fields["cache_salt"] = secrets.token_hex(8)
        if arm == "served" and self.control == "off":
            fields["speculation"] = "off"
        client = self._clients[arm]
        try:
            if card.owned_by != "llamacpp":
                scored = client.complete(text, fields, logprobs=NUM_TOP, echo=True).logprobs or ()
                return _with_scores(
                    answer, dict(enumerate(scored[len(question.prompt) : len(text)]))
                )
            # The places depend on the prompt alone, not on the answer.
            first = len(question.prompt) % _PLACES_APART
            places = range(min(first, len(ids) - 1), len(ids), _PLACES_APART)
            fields["cache_prompt"] = False
            found = {
                place: client.complete(
                    text[: len(question.prompt) + place], fields, logprobs=NUM_TOP
                ).logprobs
                for place in places
            }
            return _with_scores(answer, {place: tops[0] for place, tops in found.items() if tops})
        except (InvalidRequest, ServerUnavailable) as error:
            return msgspec.structs.replace(answer, problem=f"the text is not scored: {error}")


def _read_tokens(found: object) -> tuple[int, ...]:
    try:
        return msgspec.convert(found, _Tokens).tokens
    except msgspec.ValidationError as error:
        raise BrokenReply(f"no list of tokens: {error}") from error


class _Tokens(msgspec.Struct, frozen=True):
    tokens: tuple[TokenId, ...]


def _with_scores(answer: AuditAnswer, scored: Mapping[int, TokenLogprob]) -> AuditAnswer:
    """Return an answer whose log-probabilities are those of some of its places."""
    ids = answer.token_ids or ()
    tops = [_top_of(scored[i]) if i in scored else () for i in range(len(ids))]
    own = []
    for place, token in enumerate(ids):
        listed = dict(tops[place]).get(token)
        reported = scored[place].logprob if place in scored else None
        if listed is None and place in scored and scored[place].token_id == token:
            listed = reported
        least = min((value for _, value in tops[place]), default=0.0)
        own.append(_clamp(least if listed is None else listed))
    return msgspec.structs.replace(answer, top=tuple(tops), logprobs=tuple(own))


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
    usages = [event.usage for event in events if event.usage is not None]
    used = [usage.completion_tokens for usage in usages]
    counted = max([sum(map(_num_tokens, events)), *(n for n in used if n is not None)])
    is_whole = problem is None and (
        question.cut_at is not None or ids is not None or any(n is not None for n in used)
    )
    refused = is_refused and not events
    return AuditAnswer(
        token_ids=None if ids is None else tuple(ids),
        step_sizes=tuple(len(event.token_ids or event.logprobs or ()) for event in events)
        if question.is_streamed
        else (),
        text="".join(event.text or "" for event in events),
        finish_reason=next((e.finish_reason for e in reversed(events) if e.finish_reason), None),
        top=tuple(_top_of(token) for token in logprobs),
        logprobs=tuple(_clamp(t.logprob or 0.0) for t in logprobs),
        num_charged=0 if refused else counted if is_whole else max(counted, question.num_tokens),
        num_prompt=next((u.prompt_tokens for u in usages if u.prompt_tokens is not None), None),
        num_drafted=_count_drafted(events),
        problem=problem,
        is_refused=is_refused,
    )


def _count_drafted(events: Sequence[ServerAnswer]) -> int | None:
    """Return the draft tokens that the latest usage counts, or else llama.cpp's latest timings."""
    for event in reversed(events):
        if event.usage is not None and event.usage.speculative_decoding is not None:
            return max(0, event.usage.speculative_decoding.num_drafted)
    return next((e.timings.draft_n for e in reversed(events) if e.timings is not None), None)


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
