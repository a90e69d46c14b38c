"""Runs an engine on its own thread; other threads submit requests and read queues of results.

One thread owns the engine and steps it. Others leave calls in an inbox, which it empties between
two steps, never within one: a call waits for the step that is going on, and no step ever waits for
a lock. What a step yields goes into the queue of its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeVar

from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.intake import Conversation, Prompt
from forerun.engine.results import BackendStats, Capabilities, RequestOutput, StreamChunk
from forerun.engine.sequence import Sequence
from forerun.errors import (
    EngineStopped,
    ForerunError,
    InvalidRequest,
    NumericalError,
)
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import TokenMask

Call = Callable[[], None]
ResultT = TypeVar("ResultT")
CALL_CHECK_S = 1.0
"""Seconds after which one who waits for a call looks whether the engine still runs."""


class Ticket:
    """Handle of a submitted request; every method may be called from any thread.

    Iterate for the chunks as they are decided, also with `async for`; `result` waits for the end.
    A chunk is given once: a second iteration begins where the first one stopped.

    Attributes:
        num_tokens: tokens of all samples that were decided so far.
    """

    def __init__(
        self, request_id: str, num_samples: int, num_prompt_tokens: int, abort: Callable[[], None]
    ) -> None:
        self.request_id = request_id
        self.num_samples = num_samples
        self.num_prompt_tokens = num_prompt_tokens
        self.num_tokens = 0
        self._num_left = num_samples
        self._abort = abort
        self._chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        self._wake: Callable[[], None] | None = None
        self._wake_at_end: Callable[[], None] | None = None
        self._ended = threading.Event()
        self._output: RequestOutput | None = None
        self._error: ForerunError | None = None

    def __iter__(self) -> Iterator[StreamChunk]:
        """Yield chunks until the request ends; raises the same errors as `result`."""
        while (chunk := self._chunks.get()) is not None:
            yield chunk
        self._chunks.put(None)  # for a second iteration
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Yield chunks until the request ends, without blocking the event loop."""
        ready = asyncio.Event()
        self._wake = _waker(ready)
        while True:
            ready.clear()  # before the queue is emptied: what comes later sets it again
            with contextlib.suppress(Empty):
                while (chunk := self._chunks.get_nowait()) is not None:
                    yield chunk
                self._chunks.put(None)  # for a second iteration
                if self._error is not None:
                    raise self._error
                return
            await ready.wait()

    async def wait(self) -> RequestOutput:
        """Return the same as `result` without blocking the event loop; no chunk is consumed.

        Raises:
            NumericalError: the target returned NaN for the request.
            EngineStopped: the engine ended before the request did.
        """
        ready = asyncio.Event()
        self._wake_at_end = _waker(ready)
        if not self._ended.is_set():
            await ready.wait()
        return self.result()

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """Wait for the request to end and return its output, which is partial after an abort.

        Raises:
            TimeoutError: it has not ended after `timeout_s` seconds.
            NumericalError: the target returned NaN for it.
            EngineStopped: the engine ended before it did.
        """
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"request {self.request_id!r} goes on after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._output is not None
        return self._output

    def abort(self) -> None:
        """End the request after the current step; without effect if it has ended."""
        if not self._ended.is_set():
            self._abort()

    def put(self, chunk: StreamChunk) -> bool:
        """Queue a chunk; returns whether it was the last one of the request."""
        self.num_tokens += len(chunk.token_ids)
        self._chunks.put(chunk)
        if self._wake is not None:
            self._wake()
        self._num_left -= chunk.finish_reason is not None
        return self._num_left == 0

    def end(self, outcome: RequestOutput | ForerunError) -> None:
        """Set the result or the error of the request and wake its readers."""
        if isinstance(outcome, ForerunError):
            self._error = outcome
        else:
            self._output = outcome
        self._ended.set()
        self._chunks.put(None)
        for wake in (self._wake, self._wake_at_end):
            if wake is not None:
                wake()


def _waker(ready: asyncio.Event) -> Callable[[], None]:
    """Return a function that sets an event of the running event loop from any thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed, so nothing waits
            loop.call_soon_threadsafe(ready.set)

    return wake


def _answer(answer: Future[ResultT], action: Callable[[Engine], ResultT], engine: Engine) -> None:
    try:
        answer.set_result(action(engine))
    except Exception as error:  # noqa: BLE001 - the caller raises it
        answer.set_exception(error)


class EngineThread:
    """Runs an engine on its own thread; the engine must not be used directly meanwhile.

    The engine must have nothing unfinished in it; its observers are called on the owner's thread.

    Example:
        with EngineThread(engine) as running:
            ticket = running.submit("def add(a, b):")
            for chunk in ticket:
                print(chunk.text, end="")
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._inbox: SimpleQueue[Call | None] = SimpleQueue()
        self._owner = threading.Thread(target=self._own, name="forerun-engine", daemon=True)
        self._lock = threading.Lock()
        self._tickets: dict[str, Ticket] = {}
        self._num_submitted = 0
        self._num_unfinished = 0
        self._is_open = False
        self._was_started = False
        self._is_closed = False
        self._process = os.getpid()
        self._cause: BaseException | None = None

    def __enter__(self) -> EngineThread:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Close the engine's thread."""
        self.close()

    def start(self) -> None:
        """Start the thread; raises EngineStopped if it was started or closed before."""
        with self._lock:
            if self._was_started or self._is_closed:
                raise EngineStopped("an EngineThread runs once: make another one for the engine")
            self._was_started = self._is_open = True
        self._owner.start()

    def close(self) -> None:
        """Abort unfinished requests and wait for the thread to end; tickets raise EngineStopped.

        To close it before it was started, or more than once, does nothing further. In a forked
        process there is no thread to wait for.
        """
        with self._lock:
            self._is_open, self._is_closed = False, True
        if not self._was_started or os.getpid() != self._process:
            return
        self._inbox.put(None)
        if threading.current_thread() is not self._owner:
            self._owner.join()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> Ticket:
        """Queue a request from any thread; its prompt is checked on the calling thread.

        Raises:
            InvalidRequest: as `Engine.add_request`.
            QueueFull: as many sequences wait as may.
            EngineStopped: the engine was closed, or an error ended it.
        """
        return self.submit_all([prompt], params, [request_id], terms, mask)[0]

    def submit_all(
        self,
        prompts: Seq[Prompt],
        params: SamplingParams | None = None,
        request_ids: Seq[str | None] | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> list[Ticket]:
        """Queue a request per prompt as `submit` does, or none of them if one is refused."""
        self._check_process()
        intake = self.engine.intake
        params = params or intake.default_params
        checked = [intake.check(prompt, params, mask) for prompt in prompts]
        intake.check_answer(list(map(len, checked)), params)
        terms = intake.check_terms(terms)
        tickets: list[Ticket] = []
        with self._lock:
            self.check_running()
            intake.check_open(params.n * len(prompts), self._num_unfinished)
            for request_id, ids in zip(request_ids or [None] * len(prompts), checked, strict=True):
                request_id = request_id or self._unused_id()
                if request_id in self._tickets:
                    raise InvalidRequest(f"request id {request_id!r} is already in use")
                abort = partial(self._inbox.put, partial(self._abort, request_id))
                ticket = Ticket(request_id, params.n, len(ids), abort)
                self._tickets[request_id] = ticket
                tickets.append(ticket)
                self._num_unfinished += params.n
        try:
            samples = [
                intake.sequences(ticket.request_id, ids, params, terms, mask)
                for ticket, ids in zip(tickets, checked, strict=True)
            ]
        except BaseException as error:  # a mask that cannot be forked, for example
            for ticket in tickets:
                self._end(ticket, EngineStopped(f"the request could not be queued: {error!r}"))
            raise
        for ticket, its_samples in zip(tickets, samples, strict=True):
            self._inbox.put(partial(self._enlist, ticket, its_samples))
        return tickets

    def call(self, action: Callable[[Engine], ResultT]) -> ResultT:
        """Call a function with the engine between two steps, and return what it returns.

        Requests wait meanwhile. What the function raises is raised here, and the engine goes on.

        Raises:
            EngineStopped: the engine is closed, was not started, or an error ended it.
        """
        self._check_process()
        self.check_running()
        answer = Future[ResultT]()
        self._inbox.put(partial(_answer, answer, action, self.engine))
        while True:
            try:
                return answer.result(CALL_CHECK_S)
            except TimeoutError:
                if answer.done():  # just now, or the function raised it
                    return answer.result()
                self.check_running()

    @property
    def is_full(self) -> bool:
        """Whether one more sequence would be refused."""
        return self._num_unfinished >= self.engine.intake.max_unfinished

    def _check_process(self) -> None:
        # Before any lock: one that was held during the fork is never released here.
        if os.getpid() != self._process:
            raise EngineStopped(
                "this process was forked from the one whose thread runs the engine: load an engine "
                "in this process, or fork before the engine is loaded"
            )

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the engine's thread; None if there was none."""
        return self._cause

    @property
    def is_running(self) -> bool:
        """Whether the engine was started and has not ended."""
        return self._is_open

    def check_running(self) -> None:
        """Raise EngineStopped if the engine was closed, not started, or ended by an error."""
        if not self._is_open:
            raise EngineStopped(self._why_stopped()) from self._cause

    def _why_stopped(self) -> str:
        if self._cause is None:
            return "the engine is closed, or was never started"
        return f"the engine ended by an error: {self._cause}"

    def _unused_id(self) -> str:
        while (request_id := f"request-{self._num_submitted}") in self._tickets:
            self._num_submitted += 1
        self._num_submitted += 1
        return request_id

    # ------------------------------------------------------------------ on the owner's thread alone

    def _own(self) -> None:
        try:
            while self._take_calls():
                if self.engine.has_unfinished:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - waiting callers must be told
            self._cause = error
        self._stop()

    def _take_calls(self) -> bool:
        """Run calls that other threads have queued; wait for one if no request is unfinished."""
        try:
            call = self._inbox.get(block=not self.engine.has_unfinished)
            while call is not None:
                call()
                call = self._inbox.get(block=False)
        except Empty:
            return True
        return False

    def _enlist(self, ticket: Ticket, samples: list[Sequence]) -> None:
        try:
            self.engine.enlist(samples)
        except InvalidRequest as error:
            self._end(ticket, error)

    def _abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None and request_id in self._tickets:
            self._end(self._tickets[request_id], output)

    def _step(self) -> None:
        try:
            chunks = self.engine.step()
        except NumericalError as error:
            if error.request_id is None:
                raise
            self.engine.abort(error.request_id)
            self._end(self._tickets[error.request_id], error)
            return
        for chunk in chunks:
            ticket = self._tickets[chunk.request_id]
            if ticket.put(chunk):
                self._end(ticket, self.engine.take_output(chunk.request_id))

    def _end(self, ticket: Ticket, outcome: RequestOutput | ForerunError) -> None:
        with self._lock:
            del self._tickets[ticket.request_id]
            self._num_unfinished -= ticket.num_samples
        ticket.end(outcome)

    def _stop(self) -> None:
        """End every ticket; requests are aborted unless the engine failed."""
        with self._lock:
            self._is_open = False
            tickets = list(self._tickets.values())
        for ticket in tickets:
            if self._cause is None:
                self._abort_quietly(ticket.request_id)
            stopped = EngineStopped(self._why_stopped())
            stopped.__cause__ = self._cause
            self._end(ticket, stopped)

    def _abort_quietly(self, request_id: str) -> None:
        """Abort a request and ignore errors, so that other tickets still end."""
        try:
            self.engine.abort(request_id)
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends the engine
            self._cause = error


class AsyncEngine(EngineThread):
    """Runs an engine on its own thread, with an interface for callers in an event loop.

    A reader that is slower than the engine does not slow it: its chunks wait in the request's
    ticket, at most one context of them. What limits the load is the queue: beyond `max_waiting`
    sequences a request is refused.

    Example:
        async with AsyncEngine(engine) as running:
            async for chunk in running.generate("def add(a, b):"):
                print(chunk.text, end="")
    """

    async def __aenter__(self) -> AsyncEngine:
        """Start the engine's thread."""
        self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the engine's thread without blocking the event loop."""
        await asyncio.to_thread(self.close)

    async def enqueue(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> Ticket:
        """Queue a request as `submit` does, and tokenise its prompt outside of the event loop.

        Raises:
            InvalidRequest: the prompt or a parameter cannot be honoured.
            QueueFull: as many sequences wait as may.
            EngineStopped: the engine was closed, or an error ended it.
        """
        queueing = asyncio.ensure_future(
            asyncio.to_thread(self.submit, prompt, params, None, terms, mask)
        )
        try:
            return await asyncio.shield(queueing)
        except asyncio.CancelledError:
            queueing.add_done_callback(_abort_unused)
            raise

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of one prompt; closing or cancelling the iterator aborts the request.

        Raises:
            NumericalError: the target returned NaN for the request.
            EngineStopped: the engine ended before the request did.
            ForerunError: as `enqueue`.
        """
        ticket = await self.enqueue(prompt, params, terms, mask)
        try:
            async for chunk in ticket:
                yield chunk
        finally:
            ticket.abort()

    async def chat(
        self,
        messages: Conversation,
        params: SamplingParams | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> AsyncGenerator[StreamChunk]:
        """Yield the chunks of the answer to one conversation, given as for `Engine.chat`.

        Raises:
            InvalidRequest: the tokenizer has no chat template, or it refuses the messages.
            ForerunError: as `generate`.
        """
        ids = await asyncio.to_thread(self.engine.intake.render, messages)
        async with contextlib.aclosing(self.generate(ids, params, terms, mask)) as chunks:
            async for chunk in chunks:
                yield chunk

    def stats(self) -> BackendStats:
        """Return counts since the engine was created; concurrent calls may mix two steps."""
        return self.engine.stats()

    def capabilities(self) -> Capabilities:
        return self.engine.capabilities()


def _abort_unused(queueing: asyncio.Future[Ticket]) -> None:
    if not queueing.cancelled() and queueing.exception() is None:
        queueing.result().abort()
