"""Decoding of one HTTP request: one ticket per prompt, and a response that ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Executor
from types import MappingProxyType
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

from forerun.engine.results import RequestOutput, StreamChunk
from forerun.engine.thread import Ticket
from forerun.errors import ForerunError
from forerun.server.errors import error_body

END = None
"""Put into a queue of chunks where one ticket has no more."""


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
    leaving = asyncio.ensure_future(_until_disconnected(receive))
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


async def _until_disconnected(receive: Receive) -> None:
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
            return
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
