"""The HTTP application: routes over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

import forerun
from forerun.engine.config import RequestTerms
from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.thread import AsyncEngine, Ticket
from forerun.errors import ForerunError, InvalidRequest
from forerun.server.answers import Answer
from forerun.server.bodies import PacedExecutor, read_body
from forerun.server.config import ServerConfig
from forerun.server.errors import (
    ModelNotServed,
    error_body,
    response_for,
    status_of,
)
from forerun.server.guard import ApiKey, protect
from forerun.server.live import LiveView
from forerun.server.live_page import Diagnose, page_router
from forerun.server.metrics import CONTENT_TYPE, ServerMetrics
from forerun.server.protocol import (
    AnswersRequest,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    TokenizeRequest,
)
from forerun.server.responses import ResponsesAnswer, ResponsesChat
from forerun.server.tool_calls import ToolFormat, chosen_format, forced


@runtime_checkable
class Collector(Protocol):
    """Keeps texts of requests that may be trained on; it is called from several threads."""

    def put(self, request_id: str, tenant: str, output: RequestOutput) -> None:
        """Note a finished request, without waiting."""

    def delete(self, request_id: str, tenant: str) -> int:
        """Delete what was kept of a request; returns how many texts there were."""


END = None
"""Queued after the last chunk of a ticket."""


class Generation:
    """The prompts of one HTTP request in the engine, from queueing to their outputs.

    The choices of the response are numbered prompt by prompt: sample i of prompt p is choice p * n
    + i. `finished` has the outputs of the prompts, once they have all ended.
    """

    def __init__(self, tickets: Sequence[Ticket], num_samples: int) -> None:
        self.tickets = tickets
        self.num_samples = num_samples
        self.finished: list[RequestOutput] = []

    @property
    def is_over(self) -> bool:
        return len(self.finished) == len(self.tickets)

    @classmethod
    async def begin(
        cls, submit: Callable[[], Sequence[Ticket]], num_samples: int, executor: Executor | None
    ) -> Generation:
        """Queue the prompts away from the event loop; a client that leaves meanwhile aborts them.

        `submit` checks the request and queues its prompts. It is called on `executor`, or on that
        of short work.
        """
        loop = asyncio.get_running_loop()
        queueing = loop.run_in_executor(executor, submit)
        try:
            return cls(await asyncio.shield(queueing), num_samples)
        except asyncio.CancelledError:
            queueing.add_done_callback(_abort_unused)
            raise

    async def chunks(self) -> AsyncIterator[tuple[int, StreamChunk]]:
        """Yield every chunk with the index of its choice, as chunks are decoded."""
        if len(self.tickets) == 1:
            async for chunk in self.tickets[0]:
                yield chunk.index, chunk
        else:
            async for at, chunk in merged(self.tickets):
                yield at * self.num_samples + chunk.index, chunk

    async def outputs(self) -> list[RequestOutput]:
        """Wait until all prompts have ended and return their outputs, in order."""
        self.finished = [await ticket.wait() for ticket in self.tickets]
        return self.finished

    def figures(self) -> dict[str, int]:
        """Return the counts for the line of the log; those of steps only where all have ended."""
        found = {
            "prompt_tokens": sum(ticket.num_prompt_tokens for ticket in self.tickets),
            "tokens": sum(ticket.num_tokens for ticket in self.tickets),
        }
        if self.is_over:
            counts = [each.acceptance for one in self.finished for each in one.completions]
            found["drafted"] = sum(each.drafting.num_drafted for each in counts)
            found["accepted"] = sum(each.drafting.num_accepted for each in counts)
        return found

    def close(self) -> None:
        """Abort the unfinished prompts, which frees their slots after the current step."""
        for ticket in self.tickets:
            ticket.abort()


def _abort_unused(queueing: asyncio.Future[Sequence[Ticket]]) -> None:
    if not queueing.cancelled() and queueing.exception() is None:
        for ticket in queueing.result():
            ticket.abort()


async def merged(tickets: Sequence[Ticket]) -> AsyncIterator[tuple[int, StreamChunk]]:
    """Yield the chunks of several tickets in order of arrival, each with its ticket's index."""
    chunks: asyncio.Queue[tuple[int, StreamChunk | ForerunError | None]] = asyncio.Queue()

    async def pass_on(at: int, ticket: Ticket) -> None:
        try:
            async for chunk in ticket:
                chunks.put_nowait((at, chunk))
            chunks.put_nowait((at, END))
        except ForerunError as error:
            chunks.put_nowait((at, error))

    tasks = [asyncio.ensure_future(pass_on(*each)) for each in enumerate(tickets)]
    try:
        num_left = len(tasks)
        while num_left:
            at, chunk = await chunks.get()
            if isinstance(chunk, ForerunError):
                raise chunk
            if chunk is END:
                num_left -= 1
            else:
                yield at, chunk
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


ResultT = TypeVar("ResultT")


class Disconnected(Exception):
    """The client disconnected, or did not read the response for too long."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await a coroutine, which is cancelled when the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_wait_until_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise Disconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _wait_until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events, each with its blank line, until the client disconnects.

    `close` is called once the response is over, however it ended. A client that reads nothing for
    `write_timeout_s` seconds is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        write_timeout_s: float,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        fixed = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(headers=fixed | dict(headers))
        del self.headers["content-length"]
        self.events = events
        self.close = close
        self.write_timeout_s = write_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until they end or the client disconnects."""
        try:
            await while_connected(receive, self._send(send))
        except Disconnected:
            scope.setdefault("state", {})["has_left"] = True
        except asyncio.CancelledError:  # by the server, whose time to end has passed
            event = b"data: " + error_body("the server is stopping", 503) + b"\n\n"
            await self._write(send, {"body": event, "more_body": True})
            raise
        finally:
            self.close()

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self.events:
            await self._write(send, {"body": event, "more_body": True})
        await self._write(send, {"body": b"", "more_body": False})

    async def _write(self, send: Send, message: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.write_timeout_s):
                await send({"type": "http.response.body", **message})
        except TimeoutError as error:
            raise Disconnected from error


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
    view: LiveView
    started_at_s: float
    collector: Collector | None = None
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
        body.take_defaults(engine.intake.defaults)
        params = body.sampling(call)
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
        tickets = self.engine.submit_all(body.prompts_for(engine.intake), params, terms=terms)
        self.view.add_message([ticket.request_id for ticket in tickets], body.last_message)
        return tickets


def create_app(
    engine: AsyncEngine,
    model: str,
    config: ServerConfig | None = None,
    keys: Sequence[ApiKey] = (),
    diagnose: Diagnose | None = None,
    collector: Collector | None = None,
) -> FastAPI:
    """Return the application over an engine, which is started and closed with it.

    `model` is the name that requests use for the target. Without `keys` none is needed. The page
    has a diagnosis where `diagnose` makes one of its metrics. `collector` receives the texts of
    requests that consent to it.
    """
    config = config or ServerConfig()
    template = engine.engine.tokenizer.definition.chat_template
    tool_format = chosen_format(config.tool_format, template)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with engine:
            yield
        server.close()

    app = FastAPI(title="forerun", lifespan=lifespan, openapi_url=None)
    metrics = ServerMetrics(engine.engine, model)
    # One tenant must not read the texts of another.
    shows_texts = len({key.tenant for key in keys}) < 2
    view = LiveView(metrics, shows_texts=shows_texts, diagnose=diagnose)
    engine.engine.observers.append(view)
    server = app.state.server = ServerState(
        engine=engine,
        model=model,
        config=config,
        tool_format=tool_format,
        metrics=metrics,
        view=view,
        started_at_s=time.time(),
        collector=collector,
    )
    protect(app, config, keys, server.metrics.responded)
    for kind in (ForerunError, HTTPException):
        app.add_exception_handler(kind, response_for)
    _add_generation(app)
    _add_status(app)
    app.include_router(page_router(view))
    if diagnose is not None:
        _add_questions(app, view)
    if collector is not None:
        _add_deletion(app, collector)
    return app


def _add_generation(app: FastAPI) -> None:
    """Add the routes that generate text, and the one that counts its tokens."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """Continue one or more prompts."""
        return await _generate(request, CompletionRequest.model_validate, Answer)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        return await _generate(request, ChatRequest.model_validate, Answer)

    @app.post("/v1/responses")
    async def responses(request: Request) -> Response:
        """Answer a conversation, in the form of OpenAI's Responses API."""
        return await _generate(request, ResponsesChat.read, ResponsesAnswer)

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """Return the ids of a prompt or of a conversation."""
        server: ServerState = request.app.state.server
        body, slow = await read_body(request, TokenizeRequest.model_validate, server.large)
        server.check_model(body.model)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(slow, _tokenize, server, body)
        return Response(found, media_type="application/json")


def _add_questions(app: FastAPI, view: LiveView) -> None:
    """Add the route of the questions that the Diagnosis tab asks."""

    @app.post("/live/answers")
    async def answers(request: Request) -> Response:
        """Return the next question, and the diagnosis with the answers so far."""
        server: ServerState = request.app.state.server
        body, _ = await read_body(request, AnswersRequest.model_validate, server.large)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(server.large, view.ask, body.answers)
        return Response(found, media_type="application/json", headers={"Cache-Control": "no-store"})


def _add_deletion(app: FastAPI, collector: Collector) -> None:
    """Add the route that deletes stored texts, as OpenAI's API has it."""
    one_thread = ThreadPoolExecutor(1, "delete")  # which nothing else waits for

    @app.delete("/v1/responses/{name}")
    @app.delete("/v1/completions/{name}")
    @app.delete("/v1/chat/completions/{name}")
    async def delete(name: str, request: Request) -> dict[str, Any]:
        """Delete the texts of a response of the same tenant."""
        own_id, tenant = name.replace("_", "-").rpartition("-")[2], request.state.key.tenant
        loop = asyncio.get_running_loop()
        if not await loop.run_in_executor(one_thread, collector.delete, own_id, tenant):
            raise HTTPException(404, f"no text of a response {name!r:.200} is stored")
        return {"id": name, "deleted": True}


async def _generate(
    request: Request,
    read: Callable[[Any], GenerationRequest],
    answer_kind: type[Answer | ResponsesAnswer],
) -> Response:
    """Generate text for a request, and return it at once or as a stream."""
    server: ServerState = request.app.state.server
    body, slow = await read_body(request, read, server.large)
    server.check_model(body.model)
    key: ApiKey = request.state.key
    generation = await Generation.begin(
        partial(server.submit, body, key), body.n, server.grammars if body.has_grammar else slow
    )
    response_id = uuid.uuid4().hex
    answer = answer_kind(
        response_id,
        server.model,
        body,
        server.engine.engine.tokenizer,
        server.tool_format,
        [ticket.num_prompt_tokens for ticket in generation.tickets],
    )
    collector = server.collector if body.may_be_stored(key.collect) else None
    if body.store is not None and server.collector is None:
        body.ignored = tuple(sorted((*body.ignored, "store")))
    ignored = {"x-forerun-ignored": ", ".join(body.ignored)} if body.ignored else {}

    def close() -> None:
        request.state.figures = generation.figures()
        if body.ignored:
            request.state.figures["ignored"] = ",".join(body.ignored)
        if not generation.is_over:
            server.metrics.aborted(len(generation.tickets) * body.n)
        for output in generation.finished:
            server.metrics.finished(output)
            if collector is not None:
                collector.put(response_id, key.tenant, output)
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


def _tokenize(server: ServerState, body: TokenizeRequest) -> bytes:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give a prompt or messages, and not both")
    intake = server.engine.engine.intake
    if body.prompt is None:
        tokens = intake.render([message.for_template() for message in body.messages or ()])
    else:
        intake.check_length(body.prompt)
        tokens = intake.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens)
    found = {"count": len(tokens), "max_model_len": intake.max_context, "tokens": tokens}
    return msgspec.json.encode(found)


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

    @app.get("/ready")
    async def ready(request: Request) -> dict[str, str]:
        """Answer 503 while the server starts or ends, and while it would refuse a request."""
        engine: AsyncEngine = request.app.state.server.engine
        engine.check_running()
        if getattr(request.app.state, "is_draining", False):
            raise HTTPException(503, "the server ends and takes no further requests")
        if engine.is_full:
            raise HTTPException(503, "the queue is full")
        return {"status": "ready"}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return metrics in Prometheus's text format."""
        server: ServerState = request.app.state.server
        return Response(server.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Return the version of forerun."""
        return {"version": forerun.__version__}
