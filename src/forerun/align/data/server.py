"""Responses from an OpenAI-compatible server, with retries and limits."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.response_store import Response, ResponseStore
from forerun.align.data.responses import seed_of
from forerun.align.data.server_protocol import request_body, response_of
from forerun.align.progress import OnProgress
from forerun.engine.endpoint import Endpoint, client_for, sampling_fields
from forerun.errors import InvalidRequest, ServerUnavailable
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams

__all__ = ["ResponseServer", "ResponseServerConfig", "write_responses_from"]

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
        max_concurrent: requests at once.
        num_tries: of a request, before the server counts as broken.
        first_wait_s: before the second try; doubled for every further one.
        max_wait_s: most seconds between two tries, also if the server asks for more.
        timeout_s: seconds to wait for an answer.
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
        config: which server.
        tokenizer: of the target.
        client: what carries the requests.
        closing: set when the answers are not needed any more; all waiting then ends.
        endpoint: where requests are posted.
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
        """Request one response from the server, with retries.

        Raises:
            InvalidRequest: the server refuses the request, or has another tokenizer.
            ServerUnavailable: it did not come after as many tries as were allowed.
        """
        body = request_body(
            prompt, params, chat=self.config.chat, num_logprobs=self.config.num_logprobs
        )
        seed = seed_of(prompt.prompt_hash, index, params.seed or 0) & SEED_MASK
        body |= {"model": self.config.model, "seed": seed}

        def read(found: Any) -> Response:
            return response_of(found, prompt.prompt_hash, index, params, self.tokenizer)

        return self.endpoint.ask(body, read, prompt.where)


def write_responses_from(
    server: ResponseServer,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    *,
    samples_per_prompt: int = 1,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    """Request the responses that the store lacks from the server.

    Args:
        server: with the store's maker behind it; of no use afterwards.
        prompts: to respond to.
        store: gains the responses one by one, as they come.
        samples_per_prompt: responses per prompt.
        on_progress: progress.

    Raises:
        InvalidRequest: the parameters, a prompt or the server's tokenizer do not do.
        ServerUnavailable: the server is broken; what came before is kept, and goes on another time.
        CacheTooLarge: the disk is full; what was written is kept.
    """
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
        add_finished(asked, store)
        kept = f"{len(store)} responses are kept in {store.path}: run again to go on"
        if isinstance(error, KeyboardInterrupt):
            raise
        raise type(error)(f"{error}; {kept}") from error
    finally:
        server.closing.set()
        executor.shutdown(wait=False, cancel_futures=True)


def add_finished(asked: Sequence[Future[Response]], store: ResponseStore) -> None:
    """Store the responses that were complete when another request failed."""
    for response in asked:
        if response.done() and not response.cancelled() and response.exception() is None:
            store.add(response.result())
