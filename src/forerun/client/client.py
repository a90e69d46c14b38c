"""Completions, conversations and their answers, of any server with the OpenAI API."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any

import msgspec

from forerun.bounded_read import parse_json
from forerun.client.connection import BrokenReply, ClientConfig, Connection
from forerun.client.door import Transport
from forerun.client.urls import shown_url
from forerun.errors import InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.terminal_text import printable

_ID_PREFIX = "token_id:"
MAX_ID = 2**31 - 1
"""Largest id of a token; tensors and files of forerun hold no larger one."""
TokenId = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One model in a server's list.

    Attributes:
        max_model_len: tokens of prompt and output, if the server says it.
        owned_by: the kind of server, such as "llamacpp".
    """

    id: str
    owned_by: str | None = None
    max_model_len: int | None = None
    drafters: tuple[str, ...] | None = None


class ModelList(msgspec.Struct, frozen=True):
    """The answer of `/v1/models`."""

    data: tuple[ModelCard, ...]


class SpeculationUsage(msgspec.Struct, frozen=True):
    """Counts of a request's drafting, which forerun adds to `usage`.

    Attributes:
        num_steps: those that drafted.
    """

    num_drafted: int
    num_accepted: Count = 0
    num_steps: Count = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of a request, by the server."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    speculative_decoding: SpeculationUsage | None = None


class Timings(msgspec.Struct, frozen=True):
    """Counts that llama.cpp adds to the last event of a stream."""

    draft_n: Count = 0
    draft_n_accepted: Count = 0
    predicted_n: Count = 0


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct, frozen=True, kw_only=True):
    text: str | None = None
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: Any = None


class _Reply(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] | None = None
    usage: Usage | None = None
    timings: Timings | None = None


# msgspec examines a type at its first use, and two threads that do so at the same time end the
# process with a segmentation fault (msgspec 0.22); answers are read in many threads.
msgspec.convert({}, _Reply)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """Log-probability of one token of a text, as a server reports it.

    Attributes:
        token: its text, or "token_id:7" from a server that names tokens by their ids.
        token_id: None if the server gives none.
        top: the most likely tokens there with their ids (or None) and log-probabilities.
    """

    token: str
    token_id: int | None
    logprob: float | None
    top: tuple[tuple[str, int | None, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswer:
    """A whole answer, or what one event of a stream adds to it.

    Attributes:
        logprobs: of each token; None without them, or if they are malformed.
        reasoning: what a model thinks before its answer, where the server sends it apart.
    """

    text: str | None
    token_ids: tuple[int, ...] | None
    finish_reason: str | None
    logprobs: tuple[TokenLogprob, ...] | None
    usage: Usage | None
    timings: Timings | None = None
    reasoning: str | None = None

    @property
    def num_values(self) -> int:
        """Number of token ids and of log-probabilities, alternatives included."""
        logprobs = self.logprobs or ()
        return len(self.token_ids or ()) + sum(1 + len(token.top) for token in logprobs)


MAX_ALTERNATIVES = 128
"""Most alternatives at one token of an answer; clients here ask for at most 20."""
MAX_VALUES = 1 << 20
"""Most token ids and log-probabilities of one answer, which take about 200 MB."""


def _check_values(num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise BrokenReply(f"more than {MAX_VALUES} token ids and log-probabilities, the limit here")


def read_answer(found: Any) -> ServerAnswer:
    """Return the first choice of a parsed answer or event, empty if it has none."""
    try:
        reply = msgspec.convert(found, _Reply)
    except (msgspec.ValidationError, OverflowError) as error:
        raise BrokenReply(
            f"no completion in {printable(found, max_length=200)}: {error}"
        ) from error
    choice = reply.choices[0] if reply.choices else _Choice()
    message = choice.message or choice.delta
    answer = ServerAnswer(
        text=choice.text if message is None else message.content,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
        logprobs=_read_logprobs(choice.logprobs),
        usage=reply.usage,
        timings=reply.timings,
        reasoning=None if message is None else message.reasoning_content or message.reasoning,
    )
    _check_values(answer.num_values)
    return answer


def _read_logprobs(found: Any) -> tuple[TokenLogprob, ...] | None:
    """Read log-probabilities in the shape of completions or of conversations."""
    try:
        if found.get("content") is not None:
            return tuple(
                _build_logprob(
                    entry,
                    entry["logprob"],
                    ((t, t["logprob"]) for t in entry.get("top_logprobs") or ()),
                )
                for entry in found["content"]
            )
        tokens = found["tokens"]
        values = found.get("token_logprobs") or [None] * len(tokens)
        tops = found.get("top_logprobs") or [None] * len(tokens)
        return tuple(
            _build_logprob({"token": token}, value, (({"token": t}, v) for t, v in top.items()))
            for token, value, top in zip(tokens, values, (t or {} for t in tops), strict=True)
        )
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def _build_logprob(
    entry: Mapping[str, Any], logprob: Any, top: Iterable[tuple[Mapping[str, Any], Any]]
) -> TokenLogprob:
    name, token_id = _read_name(entry)
    listed = tuple(
        (*_read_name(one), _read_number(value)) for one, value in islice(top, MAX_ALTERNATIVES + 1)
    )
    if len(listed) > MAX_ALTERNATIVES:
        raise BrokenReply(f"more than {MAX_ALTERNATIVES} alternatives at one token, the limit here")
    return TokenLogprob(
        token=name,
        token_id=token_id,
        logprob=None if logprob is None else _read_number(logprob),
        top=listed,
    )


def _read_name(entry: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the name of a token, and its id if the server gives it (llama.cpp as a field)."""
    name = str(entry.get("token", ""))
    if "id" in entry:
        token_id = int(entry["id"])
    elif name.startswith(_ID_PREFIX):
        token_id = int(name.removeprefix(_ID_PREFIX))
    else:
        return name, None
    if not 0 <= token_id <= MAX_ID:
        raise ValueError(f"a token has the id {token_id}")
    return name, token_id


def _read_number(value: Any) -> float:
    found = float(value)
    if math.isnan(found):
        raise ValueError("a log-probability is not a number")
    return found


SEED_MASK = (1 << 31) - 1
"""Seeds that every server takes."""
_LISTING_TIMEOUT_S = 20.0


class Client:
    """Client of one server; several threads may use it at once.

    Further fields of a request (`temperature`, `top_k`, `max_tokens`, `stop`, `speculation`, ...)
    are given as a mapping under the names that the server knows. Token ids are asked for; a server
    that refuses the flag is asked without it. `transport` carries the requests in tests.

    Example:
        with Client(ClientConfig(url="http://localhost:8000/v1", model="m")) as client:
            answer = client.complete("def add(", {"max_tokens": 20}, logprobs=5, seed=1)

    Raises:
        InvalidRequest: the variable of the key is not set, or its value cannot be sent.
    """

    def __init__(self, config: ClientConfig, transport: Transport | None = None) -> None:
        self.config = config
        self.connection = Connection(config, transport)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections and end waits between tries; the client cannot be used again."""
        self.connection.close()

    def find_model(self) -> ModelCard:
        """Return the server's description of the configured model, or of the first one it lists.

        Raises:
            InvalidRequest: the server refuses the API key, or does not serve the model.
            ServerUnavailable: the server cannot be reached, or does not list its models.
        """
        base, model = self.config.base, self.config.model
        body = self.connection.get(f"{base}/models", _LISTING_TIMEOUT_S)
        name = shown_url(f"{base}/models")
        try:
            cards = msgspec.convert(parse_json(body, "the list"), ModelList).data
        except (UnreadableInput, msgspec.ValidationError) as error:
            raise ServerUnavailable(f"{name} lists no models: {printable(error)}") from error
        names = ", ".join(card.id for card in cards)
        for card in cards:
            if model is None or card.id == model:
                return card
        if not cards:
            raise InvalidRequest(f"{shown_url(base)} serves no model")
        raise InvalidRequest(
            f"{shown_url(base)} does not serve {model!r}; it serves "
            f"{printable(names, max_length=1000)}"
        )

    def complete(
        self,
        prompt: str | Sequence[int],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        echo: bool = False,
        seed: int | None = None,
    ) -> ServerAnswer:
        """Return the continuation of a text.

        Args:
            logprobs: how many of the most likely tokens to report at every position.
            echo: whether the answer begins with the prompt.
            seed: its lowest 31 bits are sent.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: no answer came after as many tries as were allowed.
        """
        body = self._build_body(prompt, fields, logprobs, seed)
        body |= {"echo": True} if echo else {}
        return self._answer("/completions", body)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        seed: int | None = None,
    ) -> ServerAnswer:
        """Return the next message of a conversation; arguments and errors as `complete`."""
        body = self._build_chat(messages, fields, logprobs, seed)
        return self._answer("/chat/completions", body)

    def stream(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, object]],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        seed: int | None = None,
    ) -> Generator[ServerAnswer, None, None]:
        """Yield the pieces of an answer, the last with the usage; see `complete`.

        Args:
            prompt: a text or token ids to continue, or the messages of a conversation.
        """
        is_chat = not isinstance(prompt, str) and any(isinstance(m, Mapping) for m in prompt)
        build = self._build_chat if is_chat else self._build_body
        body = build(prompt, fields, logprobs, seed)  # type: ignore[arg-type]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        url = self.config.base + ("/chat/completions" if is_chat else "/completions")
        events, num_values = self.connection.events(url, body), 0
        try:
            for event in events:
                answer = read_answer(event)
                num_values += answer.num_values
                _check_values(num_values)
                yield answer
        except BrokenReply as error:
            problem = f"{shown_url(url)} sends an event with {error}"
            raise ServerUnavailable(self.connection.hide_key(problem)) from error
        finally:
            events.close()

    def _collect_fields(self, fields: Mapping[str, object], seed: int | None) -> dict[str, object]:
        found: dict[str, object] = {"model": self.config.model, **fields}
        return found if seed is None else {**found, "seed": seed & SEED_MASK}

    def _build_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        fields: Mapping[str, object],
        logprobs: int | None,
        seed: int | None,
    ) -> dict[str, object]:
        body = {
            "messages": [dict(message) for message in messages],
            **self._collect_fields(fields, seed),
        }
        return body | ({} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs})

    def _build_body(
        self,
        prompt: str | Sequence[int],
        fields: Mapping[str, object],
        logprobs: int | None,
        seed: int | None,
    ) -> dict[str, object]:
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **self._collect_fields(fields, seed),
        }
        return body if logprobs is None else {**body, "logprobs": logprobs}

    def _answer(self, path: str, body: Mapping[str, object]) -> ServerAnswer:
        return self.connection.post(self.config.base + path, body, read_answer)
