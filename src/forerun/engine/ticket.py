"""What a caller holds of a request that another thread works on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue

from forerun.engine.results import RequestOutput, StreamChunk
from forerun.errors import ForerunError

__all__ = ["Ticket"]


class Ticket:
    """What a caller holds of a request; every method may be called from any thread.

    Iterate for the chunks as they are decided, also with `async for`; `result` waits for the end.
    A chunk is given once: a second iteration begins where the first one stopped.

    Args:
        request_id: of the request.
        num_samples: of it.
        abort: asks the owner of the engine to end it.
    """

    def __init__(self, request_id: str, num_samples: int, abort: Callable[[], None]) -> None:
        self.request_id = request_id
        self.num_samples = num_samples
        self._num_left = num_samples
        self._abort = abort
        self._chunks: SimpleQueue[StreamChunk | None] = SimpleQueue()
        self._ended = threading.Event()
        self._output: RequestOutput | None = None
        self._error: ForerunError | None = None

    def __iter__(self) -> Iterator[StreamChunk]:
        """Chunks until the request ends; raises what `result` would raise."""
        while (chunk := self._chunks.get()) is not None:
            yield chunk
        self._chunks.put(None)  # for whoever iterates again
        if self._error is not None:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[StreamChunk]:
        """Chunks until the request ends; the event loop is not blocked meanwhile."""
        chunks = iter(self)
        while (chunk := await asyncio.to_thread(next, chunks, None)) is not None:
            yield chunk

    def result(self, timeout_s: float | None = None) -> RequestOutput:
        """The finished request; of an aborted one what there was.

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
        """End the request after the step that is going on; no effect once it has ended."""
        if not self._ended.is_set():
            self._abort()

    def put(self, chunk: StreamChunk) -> bool:
        """Pass a chunk on; says whether it was the request's last."""
        self._chunks.put(chunk)
        self._num_left -= chunk.finish_reason is not None
        return self._num_left == 0

    def end(self, outcome: RequestOutput | ForerunError) -> None:
        """Let everybody go who waits for the request."""
        if isinstance(outcome, ForerunError):
            self._error = outcome
        else:
            self._output = outcome
        self._ended.set()
        self._chunks.put(None)
