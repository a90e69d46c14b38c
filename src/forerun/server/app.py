"""The HTTP application: routes over one engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import forerun
from forerun.engine.asynchronous import AsyncEngine
from forerun.engine.config import RequestTerms
from forerun.engine.thread import Ticket
from forerun.errors import ForerunError, InvalidRequest, PromptTooLong
from forerun.server.answers import Answer
from forerun.server.bodies import INLINE_BYTES, PacedExecutor, read_body
from forerun.server.config import ServerConfig
from forerun.server.errors import (
    ERRORS,
    STREAMS,
    TEXT,
    DescribedApp,
    ModelNotServed,
    response_for,
    status_of,
)
from forerun.server.generation import Disconnected, EventStream, Generation, while_connected
from forerun.server.guard import Guard
from forerun.server.keys import ApiKey, Keyring
from forerun.server.live import LiveView
from forerun.server.live_page import page_router
from forerun.server.metrics import CONTENT_TYPE, ServerMetrics
from forerun.server.protocol import (
    Body,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    rendered,
)
from forerun.server.responses import ResponsesAnswer, ResponsesRequest
from forerun.server.tool_calls import ToolFormat, chosen_format, forced

logger = logging.getLogger("forerun.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Objects that all routes use; they are stored in `request.app.state.server`.

    Attributes:
        started_at_s: seconds since 1970.
        large: parses and tokenises large bodies, one after the other, so that the memory they take
            is limited and short requests do not wait for them.
    """

    engine: AsyncEngine
    model: str
    config: ServerConfig
    tool_format: ToolFormat | None
    metrics: ServerMetrics
    started_at_s: float
    large: Executor = field(default_factory=PacedExecutor)
    grammars: Executor = field(default_factory=partial(ThreadPoolExecutor, 1, "grammar"))

    def close(self) -> None:
        for executor in (self.large, self.grammars):
            executor.shutdown(wait=False, cancel_futures=True)

    def check_model(self, name: str | None) -> None:
        """Refuse a request that names another model."""
        if name is not None and name != self.model:
            raise ModelNotServed(f"the model {name!r:.200} is not served; there is {self.model!r}")

    def submit(self, body: GenerationRequest, key: ApiKey) -> list[Ticket]:
        """Check a request and queue its prompts, or none of them; it may take long.

        Raises InvalidRequest, also where the key's limits are exceeded, and QueueFull.
        """
        engine = self.engine.engine
        if body.stream_options is not None and not body.stream:
            raise InvalidRequest("stream_options needs stream to be true")
        call = None
        if body.forced_tools:
            added = {text: token for token, (text, _) in engine.tokenizer.added.items()}
            call = forced(body.forced_tools, self.tool_format, added)
        params = body.sampling(self.config.max_logprobs, call)
        plan = body.plan(self.engine.capabilities(), engine.config)
        num_prompts, most = body.num_prompts, engine.intake.max_unfinished
        if num_prompts * params.n > most:
            raise InvalidRequest(
                f"{num_prompts} prompts with n = {params.n} are {num_prompts * params.n} "
                f"sequences; this server runs and queues {most}: send them in several requests"
            )
        key.check(body.priority, num_prompts * params.n, params.max_tokens)
        terms = RequestTerms(
            priority=body.priority, deadline_s=body.deadline_s, tenant=key.tenant, plan=plan
        )
        return self.engine.submit_all(body.prompts_for(engine.intake), params, terms=terms)


BODIES: Mapping[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def create_app(
    engine: AsyncEngine,
    model: str,
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
) -> FastAPI:
    """Return the application over an engine, which is started and closed with it.

    `model` is the name that requests use for the target. Without `keys` none is needed.
    """
    config = config or ServerConfig()
    template = engine.engine.tokenizer.definition.chat_template
    tool_format = chosen_format(config.tool_format, template)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield
        server.close()

    app = DescribedApp(
        title="forerun",
        version=forerun.__version__,
        lifespan=lifespan,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )
    server = app.state.server = ServerState(
        engine=engine,
        model=model,
        config=config,
        tool_format=tool_format,
        metrics=ServerMetrics(engine.engine, model),
        started_at_s=time.time(),
    )
    keyring = Keyring(keys, config.max_requests)
    app.add_middleware(Guard, config=config, keyring=keyring, count=server.metrics.responded)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-forerun-ignored"],
        )
    app.bodies = BODIES
    for kind in (ForerunError, HTTPException, Exception):
        app.add_exception_handler(kind, response_for)
    _add_generation(app)
    _add_tokens(app)
    _add_status(app)
    _add_page(app, server, len({key.tenant for key in keys}))
    return app


def _add_page(app: FastAPI, server: ServerState, num_tenants: int) -> None:
    """Add the live page; one tenant must not read the texts of another."""
    view = LiveView(
        server.engine.engine,
        target=server.model,
        metrics=server.metrics,
        shows_texts=num_tenants < 2,
    )
    server.engine.engine.observers.append(view)
    app.include_router(page_router(view))


def _add_generation(app: FastAPI) -> None:
    """Add the routes that generate text."""

    @app.post("/v1/completions", responses=STREAMS, response_class=Response)
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        return await _generated(request, CompletionRequest, Answer)

    @app.post("/v1/chat/completions", responses=STREAMS, response_class=Response)
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _generated(request, ChatRequest, Answer)

    @app.post("/v1/responses", responses=STREAMS, response_class=Response)
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        return await _generated(request, ResponsesRequest, ResponsesAnswer)


async def _generated(
    request: Request, kind: type[GenerationRequest], answer_kind: type[Answer | ResponsesAnswer]
) -> Response:
    """Generate text for a request, and return it at once or as a stream."""
    server: ServerState = request.app.state.server
    body = await read_body(request, kind, server.large)
    server.check_model(body.model)
    is_large = len(await request.body()) > INLINE_BYTES
    slow = server.large if is_large else None
    key: ApiKey = request.state.key
    generation = await Generation.begin(
        partial(server.submit, body, key), body.n, server.grammars if body.has_grammar else slow
    )
    answer = answer_kind(
        uuid.uuid4().hex, server.model, body, server.engine.engine.tokenizer, server.tool_format
    )
    ignored = {"x-forerun-ignored": ", ".join(body.ignored)} if body.ignored else {}
    if ignored:
        logger.debug("fields without an effect here: %s", ignored["x-forerun-ignored"])

    def close() -> None:
        if not generation.is_over:
            server.metrics.aborted(len(generation.tickets) * body.n)
        for output in generation.finished:
            server.metrics.finished(output)
        generation.close()

    if body.stream:
        events = _stream_of(generation, answer)
        return EventStream(events, close, server.config.write_timeout_s, ignored)
    try:
        outputs = await while_connected(request.receive, generation.outputs())
    except Disconnected:
        return Response(status_code=499)
    finally:
        close()
    content = await asyncio.to_thread(answer.whole, outputs)
    return Response(content, media_type="application/json", headers=ignored)


async def _stream_of(
    generation: Generation, answer: Answer | ResponsesAnswer
) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error is sent as the last event."""
    try:
        if first := answer.first(len(generation.tickets) * generation.num_samples):
            yield first
        async for at, chunk in generation.chunks():
            if data := answer.chunk(at, chunk):
                yield data
        yield answer.last(await generation.outputs())
    except ForerunError as error:
        yield answer.failed(str(error), status_of(error))


def _add_tokens(app: FastAPI) -> None:
    """Add the routes that convert between text and tokens."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Return the ids of a prompt or of a conversation."""
        return await _converted(request, TokenizeRequest, _tokenized)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """Return the text of some ids, special tokens left out."""
        return await _converted(request, DetokenizeRequest, _detokenized)


ConvertedT = TypeVar("ConvertedT", TokenizeRequest, DetokenizeRequest)


async def _converted(
    request: Request,
    kind: type[ConvertedT],
    convert: Callable[[ServerState, ConvertedT], dict[str, Any]],
) -> Response:
    """Return the JSON of a conversion, which runs away from the event loop."""
    server: ServerState = request.app.state.server
    body = await read_body(request, kind, server.large)
    server.check_model(body.model)
    executor = server.large if len(await request.body()) > INLINE_BYTES else None

    def content() -> bytes:
        return msgspec.json.encode(convert(server, body))

    found = await asyncio.get_running_loop().run_in_executor(executor, content)
    return Response(found, media_type="application/json")


def _tokenized(server: ServerState, body: TokenizeRequest) -> dict[str, Any]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give a prompt or messages, and not both")
    intake = server.engine.engine.intake
    if body.prompt is None:
        tokens = rendered(body.messages or [], intake)
    else:
        intake.check_length(body.prompt)
        tokens = intake.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    found = {"count": len(tokens), "max_model_len": intake.max_context, "tokens": tokens}
    if body.return_token_strs:
        found["token_strs"] = [intake.tokenizer.piece(token) for token in tokens]
    return found


def _detokenized(server: ServerState, body: DetokenizeRequest) -> dict[str, Any]:
    most = server.engine.engine.max_context
    if len(body.tokens) > most:
        raise PromptTooLong(f"there are {len(body.tokens)} tokens; the context holds {most}")
    vocab_size = server.engine.engine.target.vocab_size
    outside = next((token for token in body.tokens if not 0 <= token < vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"token {outside} is outside 0..{vocab_size - 1}")
    return {"prompt": server.engine.engine.tokenizer.decode(body.tokens)}


def _add_status(app: FastAPI) -> None:
    """Add the routes that describe the server."""

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """Return the one model that is served."""
        return {"object": "list", "data": [model_of(request)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        """Return the model that is served, if it has this name."""
        request.app.state.server.check_model(name)
        return model_of(request)

    def model_of(request: Request) -> dict[str, Any]:
        server: ServerState = request.app.state.server
        return {
            "id": server.model,
            "object": "model",
            "created": int(server.started_at_s),
            "owned_by": "forerun",
            "max_model_len": server.engine.engine.max_context,
            "drafters": server.engine.capabilities().methods,
        }

    @app.get("/health")
    async def health(request: Request) -> dict[str, str]:
        server: ServerState = request.app.state.server
        server.engine.check_running()
        return {"status": "ok"}

    @app.get("/metrics", responses=TEXT, response_class=Response)
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus's text format."""
        server: ServerState = request.app.state.server
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of forerun."""
        return {"version": forerun.__version__}
