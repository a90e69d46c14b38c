"""The HTTP application: routes over one engine."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

import forerun
from forerun.engine.asynchronous import AsyncEngine
from forerun.engine.config import RequestTerms
from forerun.engine.intake import Prompt
from forerun.errors import ForerunError, InvalidRequest
from forerun.server.answers import DONE, Answer
from forerun.server.config import ServerConfig
from forerun.server.errors import (
    ERRORS,
    STREAMS,
    TEXT,
    DescribedApp,
    ModelNotServed,
    error_body,
    response_for,
    status_of,
)
from forerun.server.generation import Disconnected, EventStream, Generation, while_connected
from forerun.server.grammar import Grammars
from forerun.server.guard import Guard
from forerun.server.keys import ApiKey, Keyring
from forerun.server.live import LiveView
from forerun.server.live_page import page_router
from forerun.server.metrics import CONTENT_TYPE, ServerMetrics
from forerun.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from forerun.server.tool_calls import ToolFormat, chosen_format

logger = logging.getLogger("forerun.server")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Objects that all routes use; they are stored in `request.app.state.server`.

    Attributes:
        engine: runs while the application does.
        model: the name that requests use for the target.
        config: settings of the server.
        grammars: compile the constraints of requests.
        tool_format: form of the tool calls in the model's text; None where it is not known.
        metrics: for Prometheus.
        started_at_s: seconds since 1970.
    """

    engine: AsyncEngine
    model: str
    config: ServerConfig
    grammars: Grammars
    tool_format: ToolFormat | None
    metrics: ServerMetrics
    started_at_s: float

    def check_model(self, name: str | None) -> None:
        """Refuse a request that names another model."""
        if name is not None and name != self.model:
            raise ModelNotServed(f"the model {name!r:.200} is not served; there is {self.model!r}")


def create_app(
    engine: AsyncEngine,
    model: str,
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
) -> FastAPI:
    """Return the application over an engine, which is started and closed with it.

    Args:
        engine: not started yet.
        model: the name that requests use for the target.
        config: settings of the server.
        keys: that requests need; without any, none is needed.
    """
    config = config or ServerConfig()
    target, tokenizer = engine.engine.target, engine.engine.tokenizer
    tool_format = chosen_format(config.tool_format, tokenizer.definition.chat_template)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield

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
        grammars=Grammars(tokenizer, target.vocab_size, engine.engine.eos_token_ids, tool_format),
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
    for kind in (ForerunError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, response_for)
    _add_generation(app)
    add_tokens(app)
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
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or more prompts."""
        return await answered(body, body.prompts, request)

    @app.post("/v1/chat/completions", responses=STREAMS, response_class=Response)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        server: ServerState = request.app.state.server
        tokenizer = server.engine.engine.tokenizer
        messages = [message.for_template() for message in body.messages]

        def prompt() -> list[int]:
            text = tokenizer.render_chat(messages, variables=body.template_variables)
            server.engine.engine.intake.check_length(text)
            return tokenizer.encode(text, add_special_tokens=False)

        server.check_model(body.model)  # before the template is rendered
        return await answered(body, [await asyncio.to_thread(prompt)], request)


async def answered(
    body: GenerationRequest, prompts: Sequence[Prompt], request: Request
) -> Response:
    """Generate text for a request, and return it at once or as a stream."""
    server: ServerState = request.app.state.server
    server.check_model(body.model)
    engine = server.engine
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true")
    params = body.sampling(server.config.max_logprobs)
    most = engine.engine.intake.max_unfinished
    if len(prompts) * params.n > most:
        raise InvalidRequest(
            f"{len(prompts)} prompts with n = {params.n} are {len(prompts) * params.n} sequences; "
            f"this server runs and queues {most}: send them in several requests"
        )
    plan = body.plan(engine.capabilities(), engine.engine.config)
    key: ApiKey = request.state.key
    key.check(body.priority, len(prompts) * params.n, params.max_tokens)
    terms = RequestTerms(
        priority=body.priority, deadline_s=body.deadline_s, tenant=key.tenant, plan=plan
    )
    mask = None
    if body.has_grammar:
        loop, grammars = asyncio.get_running_loop(), server.grammars
        mask = await loop.run_in_executor(grammars.pool, grammars.mask_of, body)
    generation = await Generation.begin(engine, prompts, params, terms, mask)
    answer = Answer(
        uuid.uuid4().hex, server.model, body, engine.engine.tokenizer, server.tool_format
    )

    ignored = {"x-forerun-ignored": ", ".join(body.ignored)} if body.ignored else {}
    if ignored:
        logger.debug("fields without an effect here: %s", ignored["x-forerun-ignored"])

    def close() -> None:
        if not generation.is_over:
            server.metrics.aborted(len(prompts) * params.n)
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
    return Response(answer.whole(outputs), media_type="application/json", headers=ignored)


async def _stream_of(generation: Generation, answer: Answer) -> AsyncIterator[bytes]:
    """Yield the events of a stream; an error is sent as the last event."""
    options = answer.body.stream_options
    try:
        if first := answer.first(len(generation.tickets) * generation.num_samples):
            yield first
        async for at, chunk in generation.chunks():
            if data := answer.chunk(at, chunk):
                yield data
        outputs = await generation.outputs()
        if options is not None and options.include_usage:
            yield answer.usage(outputs)
    except ForerunError as error:
        yield b"data: " + error_body(str(error), status_of(error)) + b"\n\n"
    yield DONE


def add_tokens(app: FastAPI) -> None:
    """Add the routes that convert between text and tokens."""

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
        """Return the ids of a prompt or of a conversation."""
        server: ServerState = request.app.state.server
        server.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give a prompt or messages, and not both")
        tokenizer = server.engine.engine.tokenizer

        def encoded() -> list[int]:
            intake = server.engine.engine.intake
            if body.prompt is not None:
                intake.check_length(body.prompt)
                return tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
            messages = [message.for_template() for message in body.messages or ()]
            text = tokenizer.render_chat(messages)
            intake.check_length(text)
            return tokenizer.encode(text, add_special_tokens=False)

        tokens = await asyncio.to_thread(encoded)
        found = {"count": len(tokens), "max_model_len": server.engine.engine.max_context}
        if body.return_token_strs:
            return {**found, "tokens": tokens, "token_strs": [tokenizer.piece(t) for t in tokens]}
        return {**found, "tokens": tokens}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, str]:
        """Return the text of some ids, special tokens left out."""
        server: ServerState = request.app.state.server
        server.check_model(body.model)
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
