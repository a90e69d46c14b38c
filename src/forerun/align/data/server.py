"""Responses from an OpenAI-compatible server, with retries and limits.

Tokens are exact where the answer has their ids: vLLM sends them on request (`return_token_ids`,
`return_tokens_as_token_ids`), llama.cpp beside log-probabilities. Any other server sends text,
which the target's tokenizer turns into tokens; its log-probabilities are not used, because several
tokens may have the same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.responses import Response, ResponseStore, seed_of
from forerun.align.progress import OnProgress
from forerun.engine.endpoint import BrokenReply, Endpoint, client_for, sampling_fields
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import printable

ID_PREFIX = "token_id:"
FINISH_REASONS = ("stop", "length")
MAX_TOKEN_CHARACTERS = 1024
"""Of one token, generously: the longest in use are runs of some hundred spaces."""


def _request_body(
    prompt: PromptRecord, params: SamplingParams, *, chat: bool, num_logprobs: int
) -> dict[str, object]:
    """Return the body of a request without model and seed."""
    if chat and not prompt.messages:
        raise InvalidRequest(
            f"{prompt.where} is no conversation; /chat/completions takes nothing else: give the "
            "server's address without it"
        )
    body: dict[str, object] = (
        {"messages": [dict(message) for message in prompt.messages]}
        if chat
        else {"prompt": list(prompt.prompt_ids)}
    )
    body |= sampling_fields(params)
    if num_logprobs:
        body |= {"logprobs": True, "top_logprobs": num_logprobs} if chat else {}
        body |= {} if chat else {"logprobs": num_logprobs}
    return body


def _response_of(
    reply: Any, prompt_hash: str, index: int, params: SamplingParams, tokenizer: Tokenizer
) -> Response:
    """Read the response from a server's answer."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        finish_reason = choice["finish_reason"]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise BrokenReply(f"no response in {reply!r:.200}") from error
    if not isinstance(text, str) or finish_reason not in FINISH_REASONS:
        raise BrokenReply(f"a response of {text!r:.60} that ended by {finish_reason!r:.60}")
    places = _places_of(choice.get("logprobs"))
    known_ids = ids_of(choice, places)
    check_lengths(text, known_ids, params)
    check_ids(known_ids, places, tokenizer)
    if known_ids is None:
        known_ids = encoded(text, choice, params, tokenizer)
        places = None
    # Servers differ in how they write spaces at the ends and characters that are cut off, and a
    # stop string may have been removed.
    elif not _squeezed(tokenizer.decode(known_ids)).startswith(_squeezed(text)):
        raise InvalidRequest(
            f"the server's tokens {known_ids[:8]} are not this tokenizer's way to write "
            f"{printable(text, max_length=40)!r}: it serves a model with another tokenizer"
        )
    tops = tuple(top for _, top in places or ())
    return Response(
        prompt_hash=prompt_hash,
        index=index,
        token_ids=tuple(known_ids),
        finish_reason=finish_reason,
        top_logprobs=tops if places and len(tops) == len(known_ids) and all(tops) else None,
    )


def check_lengths(text: str, ids: Sequence[int] | None, params: SamplingParams) -> None:
    """Refuse a response that is too long for its `max_tokens` (BrokenReply)."""
    most = params.max_tokens or 0
    if len(text) > MAX_TOKEN_CHARACTERS * (most + 1) or (
        ids is not None and len(ids) > 2 * most + 16
    ):
        raise BrokenReply(
            f"a response of {len(text)} characters and {'unknown' if ids is None else len(ids)} "
            f"tokens, where {most} tokens were asked for"
        )


def check_ids(
    ids: Sequence[int] | None, places: Sequence[Place] | None, tokenizer: Tokenizer
) -> None:
    """Refuse token ids that are outside the tokenizer's vocabulary (InvalidRequest)."""
    named = [token for _, top in places or () for token, _ in top]
    for token in (*(ids or ()), *named):
        if token not in tokenizer.vocabulary:
            raise InvalidRequest(
                f"the server names the token {printable(token, max_length=40)}, which is not in "
                "the target's vocabulary: it serves a model with another tokenizer"
            )


Place = tuple[int, tuple[tuple[int, float], ...]]
"""A token and the most likely ones there."""


def _places_of(logprobs: Any) -> list[Place] | None:
    """Return token id and top log-probabilities of every position; None where ids are missing."""
    try:
        if logprobs.get("content") is not None:
            return [
                (_id_of(entry), ranked((_id_of(t), t["logprob"]) for t in entry["top_logprobs"]))
                for entry in logprobs["content"]
            ]
        tops = logprobs["top_logprobs"] or [{} for _ in logprobs["tokens"]]
        return [
            (_named_id(token), ranked((_named_id(t), value) for t, value in top.items()))
            for token, top in zip(logprobs["tokens"], tops, strict=True)
        ]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def ranked(pairs: Any) -> tuple[tuple[int, float], ...]:
    """Return unique token ids with log-probabilities, the most likely first."""
    found = {token: float(value) for token, value in pairs}
    if any(math.isnan(value) for value in found.values()):
        raise ValueError("a log-probability is not a number")
    return tuple(sorted(found.items(), key=lambda pair: -pair[1]))


def _id_of(entry: Mapping[str, Any]) -> int:
    return int(entry["id"]) if "id" in entry else _named_id(entry["token"])


def _named_id(name: str) -> int:
    if not name.startswith(ID_PREFIX):
        raise ValueError(name)
    return int(name.removeprefix(ID_PREFIX))


def ids_of(choice: Mapping[str, Any], places: Sequence[Place] | None) -> list[int] | None:
    """Return the response's token ids if the answer has them."""
    given = choice.get("token_ids")
    if isinstance(given, list) and all(type(token) is int for token in given):
        return given
    return None if places is None else [token for token, _ in places]


def encoded(
    text: str, choice: Mapping[str, Any], params: SamplingParams, tokenizer: Tokenizer
) -> list[int]:
    """Tokenise a text, and append the end token if the text must have ended with it."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    by_itself = choice["finish_reason"] == "stop" and choice.get("stop_reason") is None
    if by_itself and not params.stop and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return ids


def _squeezed(text: str) -> str:
    return "".join(text.replace("\N{REPLACEMENT CHARACTER}", "").split())


CHAT = "/chat/completions"
COMPLETIONS = "/completions"
SEED_MASK = (1 << 31) - 1
"""Seeds every server takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseServerConfig:
    """Address of an OpenAI-compatible server, with its retry and timeout settings.

    Attributes:
        url: such as http://localhost:8000/v1, asked for completions of tokens; one that ends in
            /chat/completions is asked to answer conversations, through its own template.
        model: name of the target on the server.
        num_logprobs: most likely tokens to report with every token, 0 for none.
        num_tries: of a request, before the server counts as broken.
        first_wait_s: before the second try; doubled for every further one.
        max_wait_s: most seconds between two tries, also if the server asks for more.
    """

    url: str
    model: str
    num_logprobs: int = 0
    max_concurrent: int = 16
    num_tries: int = 7
    first_wait_s: float = 1.0
    max_wait_s: float = 60.0
    timeout_s: float = 600.0

    @property
    def endpoint(self) -> str:
        """URL that requests are sent to."""
        base = self.url.rstrip("/")
        if base.endswith(COMPLETIONS):
            return base
        return base + ("" if base.endswith("/v1") else "/v1") + COMPLETIONS

    @property
    def chat(self) -> bool:
        """Whether conversations are sent to the chat endpoint instead of token ids."""
        return self.endpoint.endswith(CHAT)


@dataclass(slots=True, kw_only=True, eq=False)
class ResponseServer:
    """Client of one server; several threads may use it at once.

    The environment's OPENAI_API_KEY is sent where it is set.

    Attributes:
        closing: set when the answers are not needed any more; all waiting then ends.
    """

    config: ResponseServerConfig
    tokenizer: Tokenizer
    client: httpx.Client
    closing: Event = field(default_factory=Event)
    endpoint: Endpoint = field(init=False)

    def __post_init__(self) -> None:
        """Create the HTTP endpoint from the configuration."""
        config = self.config
        self.endpoint = Endpoint(
            url=config.endpoint,
            client=self.client,
            num_tries=config.num_tries,
            first_wait_s=config.first_wait_s,
            max_wait_s=config.max_wait_s,
            timeout_s=config.timeout_s,
            closing=self.closing,
        )

    @classmethod
    def connect(cls, config: ResponseServerConfig, tokenizer: Tokenizer) -> ResponseServer:
        """Create the client of a server without sending a request."""
        client = client_for(config.timeout_s, config.max_concurrent)
        return cls(config=config, tokenizer=tokenizer, client=client)

    def respond(self, prompt: PromptRecord, index: int, params: SamplingParams) -> Response:
        """Request one response from the server, with retries."""
        body = _request_body(
            prompt, params, chat=self.config.chat, num_logprobs=self.config.num_logprobs
        )
        seed = seed_of(prompt.prompt_hash, index, params.seed or 0) & SEED_MASK
        body |= {"model": self.config.model, "seed": seed}

        def read(found: Any) -> Response:
            return _response_of(found, prompt.prompt_hash, index, params, self.tokenizer)

        return self.endpoint.ask(body, read, prompt.where)


def write_responses_from(
    server: ResponseServer,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    *,
    samples_per_prompt: int = 1,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    """Request the responses that the store lacks from the server."""
    params = store.origin.params
    sampling_fields(params)  # refuses what no server takes, before any is asked
    missing = store.missing(prompts, samples_per_prompt)
    num_all = len(prompts) * samples_per_prompt
    num_done = num_all - len(missing)
    on_progress(num_done, num_all)
    executor = ThreadPoolExecutor(server.config.max_concurrent)
    asked = [executor.submit(server.respond, *job, params) for job in missing]
    try:
        for response in as_completed(asked):
            store.add(response.result())
            num_done += 1
            on_progress(num_done, num_all)
    except (InvalidRequest, ServerUnavailable, KeyboardInterrupt) as error:
        for finished in asked:
            if finished.done() and not finished.cancelled() and finished.exception() is None:
                store.add(finished.result())
        kept = f"{len(store)} responses are kept in {store.path}: run again to go on"
        if isinstance(error, KeyboardInterrupt):
            raise
        raise type(error)(f"{error}; {kept}") from error
    finally:
        server.closing.set()
        executor.shutdown(wait=False, cancel_futures=True)
