"""Guards an engine against other threads, forks, and interrupts in the middle of a step."""

from __future__ import annotations

# `signal` converts to enumerations on every call, which costs a step 20 us.
import _signal  # type: ignore[import-not-found]  # typeshed does not describe it
import os
import signal
import threading
from types import FrameType, TracebackType

from forerun.errors import EngineBusy

SIGINT = int(signal.SIGINT)


class EngineGuard:
    """Context manager for every change of an engine's state; it can be nested.

    It raises EngineBusy in a second thread and in a forked process. An interrupt from the keyboard
    (SIGINT with Python's own handler) is raised when the outermost block ends, so that a step is
    taken as a whole; a second interrupt is raised at once, for a step that does not end.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._main_thread = threading.main_thread().ident
        self._depth = 0
        self._defers = False
        self._interrupted = False

    def __enter__(self) -> None:
        if os.getpid() != self._process:
            raise EngineBusy(
                "the engine was made in another process, and its threads and device memory do not "
                "survive a fork: load it in the process that uses it"
            )
        # An interrupt behind the lock but ahead of the handler would leave the lock taken.
        self._begin_deferring()
        if not self._lock.acquire(blocking=False):
            self._end_deferring(None)
            raise EngineBusy(
                "another thread is using the engine: call it from one thread, or put it into an "
                "EngineThread, which takes requests from any"
            )
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._depth -= 1
        is_outermost = self._depth == 0
        self._lock.release()
        if is_outermost:
            self._end_deferring(error)

    def _begin_deferring(self) -> None:
        """Replace Python's interrupt handler, unless a custom handler is installed."""
        if self._defers or threading.get_ident() != self._main_thread:
            return
        if _signal.getsignal(SIGINT) is signal.default_int_handler:
            self._interrupted = False
            _signal.signal(SIGINT, self._note)
            self._defers = True

    def _end_deferring(self, error: BaseException | None) -> None:
        """Restore Python's interrupt handler, and raise an interrupt that was deferred."""
        if not self._defers or threading.get_ident() != self._main_thread:
            return
        self._defers = False
        _signal.signal(SIGINT, signal.default_int_handler)
        interrupted, self._interrupted = self._interrupted, False
        if interrupted:
            raise KeyboardInterrupt from error

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._interrupted:
            signal.default_int_handler(number, frame)
        self._interrupted = True
