"""The servers of a run: started once each, paused while others are measured, always stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from forerun.tune.arms import Arm
from forerun.tune.process import ServerProcess

_SPARE_SHARE = 0.8
"""Share of the free memory that one more server may take."""
_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
"""Files that a system with a GPU of NVIDIA or AMD has."""

Notify = Callable[[str], None]


class Fleet:
    """Starts the servers of arms when they are used, and keeps them if memory allows.

    Arms that are addresses of running servers are used as they are.

    Args:
        one_at_a_time: whether a server is stopped when another is used; None decides by the
            memory that the first one takes. Servers on a GPU reserve its memory, so that with one
            present they run one at a time unless this is False.
        ready_s: seconds that a server may take to start.
        on_start: called with the arm of every server that has just started.

    Attributes:
        ready_s: seconds that the next server may take to start.
        memory_bytes: resident memory of every server at its last use.
        start_s: seconds that its last start took.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        logs: Path,
        *,
        one_at_a_time: bool | None,
        ready_s: float,
        on_start: Callable[[Arm], None],
        notify: Notify,
    ) -> None:
        self.arms = {arm.name: arm for arm in arms}
        self.one_at_a_time = one_at_a_time
        self.memory_bytes: dict[str, int] = {}
        self.start_s: dict[str, float] = {}
        self._logs, self.ready_s = logs, ready_s
        self._on_start, self._notify = on_start, notify
        self._running: dict[str, ServerProcess] = {}

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._running):
            self.stop(name)

    @contextmanager
    def use(self, *names: str) -> Iterator[Mapping[str, Arm]]:
        """Run the servers of these arms, and pause or stop the others.

        Raises:
            ServerFailed: a server cannot be started, or ended while it started.
        """
        self._make_room(names)
        for name in names:
            self._resume_or_start(name)
        try:
            yield {name: self.arms[name] for name in names}
        finally:
            for name in names:
                if (server := self._running.get(name)) is not None:
                    self.memory_bytes[name] = server.memory_bytes()
                    server.pause()

    def find_failure(self, name: str) -> str | None:
        """Return why the server of an arm ended by itself; None if it runs or is a URL."""
        server = self._running.get(name)
        return None if server is None else server.failure()

    def stop(self, name: str) -> None:
        """Stop the server of an arm, if it runs."""
        if (server := self._running.pop(name, None)) is not None:
            server.stop()

    def _resume_or_start(self, name: str) -> None:
        arm = self.arms[name]
        if not arm.command:
            return
        if (server := self._running.get(name)) is not None:
            server.resume()
            return
        server = self._running[name] = ServerProcess(arm, self._logs / self._name_log(name))
        try:
            started_s = time.monotonic()
            server.start()
            server.wait_ready(self.ready_s, lambda s: self._notify(f"{name}: starting, {s:.0f} s"))
            self.start_s[name] = time.monotonic() - started_s
            self._on_start(arm)
        except BaseException:
            self.stop(name)
            raise

    def _name_log(self, name: str) -> str:
        """Return a file name of its own for every arm."""
        plain = "".join(c if c.isalnum() or c in "-=." else "_" for c in name)
        return f"{list(self.arms).index(name)}-{plain[:100]}.log"

    def _make_room(self, needed: Sequence[str]) -> None:
        """Stop servers that are not needed where one more would not fit beside them."""
        starts = any(self.arms[name].command and name not in self._running for name in needed)
        if self.one_at_a_time is None and starts:
            largest = max(self.memory_bytes.values(), default=0)
            is_short = largest > _SPARE_SHARE * psutil.virtual_memory().available
            if is_short or any(path.exists() for path in _GPU_DEVICES):
                self.one_at_a_time = True
        if self.one_at_a_time:
            for name in set(self._running) - set(needed):
                self.stop(name)
