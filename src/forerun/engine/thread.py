"""An engine on a thread of its own: requests from any thread, results through queues.

One thread owns the engine and steps it. Others leave calls in an inbox, which it empties between
two steps, never within one: a call waits for the step that is going on, and no step ever waits for
a lock. What a step yields goes into the queue of its request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue

from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.intake import Prompt
from forerun.engine.results import RequestOutput
from forerun.engine.sequence import Sequence
from forerun.engine.ticket import Ticket
from forerun.errors import EngineStopped, ForerunError, InvalidRequest, NumericalError
from forerun.sampling.config import SamplingParams
from forerun.sampling.mask import TokenMask

__all__ = ["EngineThread"]

Call = Callable[[], None]


class EngineThread:
    """Owns an engine from `start` to `close`; nobody else may call it meanwhile.

    Example:
        with EngineThread(engine) as running:
            ticket = running.submit("def add(a, b):")
            for chunk in ticket:
                print(chunk.text, end="")

    Args:
        engine: with nothing unfinished in it; its observers are called on the owner's thread.
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
        self._cause: BaseException | None = None

    def __enter__(self) -> EngineThread:
        """Start."""
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        self.close()

    def start(self) -> None:
        """Begin to step; once."""
        self._is_open = True
        self._owner.start()

    def close(self) -> None:
        """Abort what goes on and wait for the thread to end; tickets raise EngineStopped."""
        with self._lock:
            self._is_open = False
        self._inbox.put(None)
        self._owner.join()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        terms: RequestTerms | None = None,
        mask: TokenMask | None = None,
    ) -> Ticket:
        """`Engine.add_request` from any thread; reading and checking happens on the caller's.

        Raises:
            InvalidRequest: as `Engine.add_request`.
            QueueFull: as many sequences wait as may.
            EngineStopped: the engine was closed, or an error ended it.
        """
        params = params or SamplingParams()
        intake = self.engine.intake
        ids = intake.check(prompt, params, mask)
        with self._lock:
            self._check_running()
            intake.check_open(params.n, self._num_unfinished)
            request_id = request_id or self._unused_id()
            if request_id in self._tickets:
                raise InvalidRequest(f"request id {request_id!r} is already in use")
            abort = partial(self._inbox.put, partial(self._abort, request_id))
            ticket = self._tickets[request_id] = Ticket(request_id, params.n, abort)
            self._num_unfinished += params.n
        samples = intake.sequences(request_id, ids, params, terms or RequestTerms(), mask)
        self._inbox.put(partial(self._enlist, ticket, samples))
        return ticket

    def _check_running(self) -> None:
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
        except BaseException as error:  # noqa: BLE001 - whoever waits must hear of it
            self._cause = error
        self._stop()

    def _take_calls(self) -> bool:
        """Do what others have asked for, waiting where there is nothing else to do."""
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
        """End every ticket; after an error the engine is left as it is."""
        with self._lock:
            self._is_open = False
            tickets = list(self._tickets.values())
        for ticket in tickets:
            if self._cause is None:
                self.engine.abort(ticket.request_id)
            stopped = EngineStopped(self._why_stopped())
            stopped.__cause__ = self._cause
            self._end(ticket, stopped)
