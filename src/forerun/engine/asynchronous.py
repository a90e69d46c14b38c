"""Engine for asyncio: requests are asynchronous iterators, and the engine has its own thread.

A reader that is slower than the engine does not slow it: its chunks wait in the request's ticket,
which holds at most one context of them, and the rows of the request are free as soon as it is
decoded. What limits the load is the queue: beyond `max_waiting` sequences a request is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from forerun.engine.config import RequestTerms
from forerun.engine.intake import Prompt
from forerun.engine.results import BackendStats, Capabilities, StreamChunk
from forerun.engine.thread import EngineThread, Ticket
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import TokenMask


class AsyncEngine(EngineThread):
    """Runs an engine on its own thread, with an interface for callers in an event loop.

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
    ) -> AsyncIterator[StreamChunk]:
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

    def stats(self) -> BackendStats:
        """Return counts since the engine was created; concurrent calls may mix two steps."""
        return self.engine.stats()

    def capabilities(self) -> Capabilities:
        """Return what the engine supports."""
        return self.engine.capabilities()


def _abort_unused(queueing: asyncio.Future[Ticket]) -> None:
    if not queueing.cancelled() and queueing.exception() is None:
        queueing.result().abort()
