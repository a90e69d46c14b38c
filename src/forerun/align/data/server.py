"""Responses from an OpenAI-compatible server, with retries and limits."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import httpx

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.response_store import Response, ResponseStore
from forerun.align.data.responses import seed_of
from forerun.align.data.server_protocol import (
    ID_FLAGS,
    BrokenReply,
    check_params,
    request_body,
    response_of,
)
from forerun.align.progress import OnProgress
from forerun.bounded_documents import parse_json
from forerun.bounded_read import ReadLimits, collected
from forerun.errors import InvalidRequest, ServerUnavailable, UnreadableInput
from forerun.models.tokenizers import Tokenizer
from forerun.sampling.config import SamplingParams
from forerun.terminal_text import printable

__all__ = ["ResponseServer", "ResponseServerConfig", "write_responses_from"]

logger = logging.getLogger("forerun.align")

CHAT = "/chat/completions"
COMPLETIONS = "/completions"
API_KEY = "OPENAI_API_KEY"
REFUSED = (400, 422)
BUSY = (408, 409, 425, 429)
SEED_MASK = (1 << 31) - 1
"""Seeds every server takes."""


MAX_BODY_BYTES = 1 << 26
"""Of one answer, unpacked: 30,000 tokens with 20 log-probabilities each take half of it."""
ENCODINGS = ("identity", "gzip", "deflate")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An HTTP answer that was read whole.

    Attributes:
        status_code: of HTTP.
        retry_after: header of that name; None without one.
        content: the body, unpacked.
    """

    status_code: int
    retry_after: str | None
    content: bytes

    @property
    def is_success(self) -> bool:
        """Whether the status is 200 to 299."""
        return 200 <= self.status_code < 300

    @property
    def start(self) -> str:
        """The beginning of the body, safe for a terminal."""
        return printable(self.content[:600].decode(errors="replace"), max_length=300)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseServerConfig:
    """Address of an OpenAI-compatible server, and how often and how long it is tried.

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
        """The address that requests are sent to."""
        base = self.url.rstrip("/")
        if base.endswith(COMPLETIONS):
            return base
        return base + ("" if base.endswith("/v1") else "/v1") + COMPLETIONS

    @property
    def chat(self) -> bool:
        """Whether conversations are sent, not token ids."""
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
        tells_ids: whether it may be asked for token ids; False once it has refused to be.
    """

    config: ResponseServerConfig
    tokenizer: Tokenizer
    client: httpx.Client
    closing: Event = field(default_factory=Event)
    returns_ids: bool = field(default=True, init=False)

    @classmethod
    def connect(cls, config: ResponseServerConfig, tokenizer: Tokenizer) -> ResponseServer:
        """Create the client of a server; nothing is sent yet."""
        key = os.environ.get(API_KEY)
        authorization = {"Authorization": f"Bearer {key}"} if key else {}
        client = httpx.Client(
            timeout=config.timeout_s,
            headers={"Accept-Encoding": "gzip"} | authorization,
            limits=httpx.Limits(max_connections=config.max_concurrent),
        )
        return cls(config=config, tokenizer=tokenizer, client=client)

    def respond(self, prompt: PromptRecord, index: int, params: SamplingParams) -> Response:
        """Ask for one response, with retries.

        Raises:
            InvalidRequest: the server refuses the request, or has another tokenizer.
            ServerUnavailable: it did not come after as many tries as were allowed.
        """
        body = request_body(
            prompt, params, chat=self.config.chat, num_logprobs=self.config.num_logprobs
        )
        seed = seed_of(prompt.prompt_hash, index, params.seed or 0) & SEED_MASK
        body |= {"model": self.config.model, "seed": seed}
        problem = ""
        for attempt in range(self.config.num_tries):
            wait_s = min(self.config.first_wait_s * 2.0**attempt, self.config.max_wait_s)
            try:
                reply = self._post(body)
                if reply.is_success:
                    found = parsed(reply)
                    return response_of(found, prompt.prompt_hash, index, params, self.tokenizer)
                problem = self._problem(reply, prompt)
                wait_s = min(asked_wait_s(reply, wait_s), self.config.max_wait_s)
            except UnreadableInput as error:  # it would be as large the next time
                raise ServerUnavailable(printable(error)) from error
            except (httpx.TransportError, BrokenReply) as error:
                problem = printable(error) or type(error).__name__
            if attempt + 1 < self.config.num_tries:
                logger.info("%s: %s; again in %.0f s", self.config.endpoint, problem, wait_s)
                if self.closing.wait(wait_s):
                    break
        raise ServerUnavailable(
            f"{self.config.endpoint} gave no response in {self.config.num_tries} tries: {problem}"
        )

    def _post(self, body: dict[str, object]) -> Reply:
        """Send a request; without the flags that ask for ids if the server refuses them."""
        flags = ID_FLAGS if self.returns_ids else {}
        reply = self._sent({**body, **flags})
        if reply.status_code in REFUSED and flags:
            plain = self._sent(body)
            self.returns_ids = not plain.is_success
            return plain
        return reply

    def _sent(self, body: dict[str, object]) -> Reply:
        """The answer to a request, read within limits on bytes and seconds.

        Raises:
            UnreadableInput: it is over a limit, or compressed in a way that has no limit.
        """
        endpoint = self.config.endpoint
        limits = ReadLimits(max_bytes=MAX_BODY_BYTES, max_seconds=self.config.timeout_s)
        with self.client.stream("POST", endpoint, json=body) as reply:
            encoding = reply.headers.get("content-encoding", "identity").strip().lower()
            if encoding not in ENCODINGS:  # httpx unpacks others, and several at once, unlimited
                raise UnreadableInput(f"{endpoint} sends a body of content encoding {encoding!r}")
            content = collected(reply.iter_bytes(), endpoint, limits)
            return Reply(
                status_code=reply.status_code,
                retry_after=reply.headers.get("retry-after"),
                content=content,
            )

    def _problem(self, reply: Reply, prompt: PromptRecord) -> str:
        """Return what is wrong with an answer if a retry may help.

        Raises:
            InvalidRequest: it will not.
        """
        problem = f"status {reply.status_code}: {reply.start}"
        if reply.status_code >= 500 or reply.status_code in BUSY:
            return problem
        raise InvalidRequest(f"{prompt.where}: {self.config.endpoint} refuses it with {problem}")


def parsed(reply: Reply) -> Any:
    """Parse the body of an answer as JSON.

    Raises:
        BrokenReply: it is not JSON, or nests too deeply.
    """
    try:
        return parse_json(reply.content, "the answer")
    except UnreadableInput as error:
        raise BrokenReply(f"{error}; it begins with {reply.start}") from error


def asked_wait_s(reply: Reply, otherwise: float) -> float:
    """Return the seconds in the Retry-After header if it is a number, else `otherwise`."""
    try:
        asked_s = float(otherwise if reply.retry_after is None else reply.retry_after)
    except ValueError:  # a date
        return otherwise
    return asked_s if asked_s >= 0.0 else otherwise


def write_responses_from(
    server: ResponseServer,
    prompts: Sequence[PromptRecord],
    store: ResponseStore,
    *,
    samples_per_prompt: int = 1,
    on_progress: OnProgress = lambda num_done, num_all: None,
) -> None:
    """Ask the server for the responses that the store lacks.

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
    check_params(params)
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
    """Store the responses that had arrived when another request failed."""
    for response in asked:
        if response.done() and not response.cancelled() and response.exception() is None:
            store.add(response.result())
