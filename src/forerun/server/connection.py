"""Responses that end early when the client disconnects: streams of events and single answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Response
from starlette.types import Receive, Scope, Send

__all__ = ["Disconnected", "EventStream", "while_connected"]

ResultT = TypeVar("ResultT")


class Disconnected(Exception):
    """The client disconnected, or did not read the response for too long."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """Await a coroutine, which is cancelled when the client disconnects.

    Raises:
        Disconnected: the client went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(until_disconnected(receive))
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


async def until_disconnected(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A response of server-sent events that ends when the client disconnects.

    Args:
        events: encoded events, each with its blank line.
        close: called once the response is over, however it ended.
        write_timeout_s: seconds after which a client that reads nothing is given up.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], close: Callable[[], None], write_timeout_s: float
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
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
