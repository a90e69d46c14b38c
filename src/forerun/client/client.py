"""Completions and conversations of any server with the OpenAI API."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping, Sequence

import httpx
import msgspec

from forerun.bounded_read import parse_json
from forerun.client.answers import ModelCard, ModelList, ServerAnswer, read_answer
from forerun.client.config import ClientConfig
from forerun.client.connection import BrokenReply, Connection
from forerun.errors import InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.terminal_text import printable

SEED_MASK = (1 << 31) - 1
"""Seeds that every server takes."""
_LISTING_TIMEOUT_S = 30.0


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

    def __init__(self, config: ClientConfig, transport: httpx.BaseTransport | None = None) -> None:
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
        try:
            cards = msgspec.convert(parse_json(body, "the list"), ModelList).data
        except (UnreadableInput, msgspec.ValidationError) as error:
            raise ServerUnavailable(f"{base}/models lists no models: {printable(error)}") from error
        names = ", ".join(card.id for card in cards)
        for card in cards:
            if model is None or card.id == model:
                return card
        raise InvalidRequest(
            f"{base} does not serve {model!r}; it serves {printable(names) or 'nothing'}"
        )

    def complete(
        self,
        prompt: str | Sequence[int],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        echo: bool = False,
        seed: int | None = None,
        check: Callable[[ServerAnswer], None] = lambda answer: None,
    ) -> ServerAnswer:
        """Return the continuation of a text.

        Args:
            logprobs: how many of the most likely tokens to report at every position.
            echo: whether the answer begins with the prompt.
            seed: its lowest 31 bits are sent.
            check: raises BrokenReply where the request is to be sent again.

        Raises:
            InvalidRequest: the server refuses the request.
            ServerUnavailable: no answer came after as many tries as were allowed.
        """
        body = self._completion_body(prompt, fields, logprobs, seed)
        body |= {"echo": True} if echo else {}
        return self._answer("/completions", body, check)

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        seed: int | None = None,
        check: Callable[[ServerAnswer], None] = lambda answer: None,
    ) -> ServerAnswer:
        """Return the next message of a conversation; arguments and errors as `complete`."""
        body = {"messages": [dict(message) for message in messages], **self._fields(fields, seed)}
        body |= {} if logprobs is None else {"logprobs": True, "top_logprobs": logprobs}
        return self._answer("/chat/completions", body, check)

    def stream(
        self,
        prompt: str | Sequence[int],
        fields: Mapping[str, object],
        *,
        logprobs: int | None = None,
        seed: int | None = None,
    ) -> Generator[ServerAnswer, None, None]:
        """Yield the pieces of a continuation, the last with the usage; see `complete`."""
        body = self._completion_body(prompt, fields, logprobs, seed)
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        url, started_s = self.config.base + "/completions", time.monotonic()
        events = self.connection.events(url, body)
        try:
            for event in events:
                yield read_answer(event, time.monotonic() - started_s)
        except BrokenReply as error:
            raise ServerUnavailable(f"{url} sends an event with {error}") from error
        finally:
            events.close()

    def _fields(self, fields: Mapping[str, object], seed: int | None) -> dict[str, object]:
        found: dict[str, object] = {"model": self.config.model, **fields}
        return found if seed is None else {**found, "seed": seed & SEED_MASK}

    def _completion_body(
        self,
        prompt: str | Sequence[int],
        fields: Mapping[str, object],
        logprobs: int | None,
        seed: int | None,
    ) -> dict[str, object]:
        body = {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            **self._fields(fields, seed),
        }
        return body if logprobs is None else {**body, "logprobs": logprobs}

    def _answer(
        self, path: str, body: Mapping[str, object], check: Callable[[ServerAnswer], None]
    ) -> ServerAnswer:
        started_s = time.monotonic()

        def read(found: object) -> ServerAnswer:
            answer = read_answer(found, time.monotonic() - started_s)
            check(answer)
            return answer

        return self.connection.post(self.config.base + path, body, read)
