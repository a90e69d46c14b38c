"""Servers that tune starts: they are started, waited for, paused, measured and stopped as a whole.

A supervisor process (`forerun.tune.supervisor`) stands between forerun and each server, and ends
the server's whole process tree when forerun ends, whatever ended it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import RLock
from urllib.parse import urlsplit

import psutil

from forerun.bounded_read import parse_json
from forerun.client.door import KEY_HINT, UNAUTHORIZED, Door, answer_deadline, authorization
from forerun.client.urls import hide_printed_keys, hide_urls
from forerun.errors import ServerUnavailable, UnreadableInput
from forerun.terminal_text import printable
from forerun.tune import supervisor
from forerun.tune.arms import Arm

LOOPBACK = "127.0.0.1"
_POLL_S = 0.25
_ANSWER_S = 5.0
_OTHER_PORTS_S = 5.0
"""Between two looks at the ports that a server listens on instead of its own."""
GRACE_S = 10.0
"""From SIGTERM to SIGKILL."""
_TAIL_BYTES = 1 << 16
_MAX_LIST_BYTES = 1 << 22
_LONGEST_LINE = 200

_CAUSES = (
    (
        r"out of memory(?! killer)|OutOfMemoryError|ErrorMemoryAllocation|ErrorOutOfDeviceMemory"
        r"|No available memory for the cache blocks|less than desired GPU memory utilization"
        r"|(failed|unable) to allocate",
        "not enough memory",
    ),
    (r"address already in use|EADDRINUSE|couldn't bind", "its port is in use"),
    (
        r"unrecogni[sz]ed (argument|option)|unknown (argument|option)|invalid argument:"
        r"|unexpected argument|no such option|error while handling argument",
        "it refuses an argument",
    ),
    (r"(ModuleNotFound|Import)Error|cannot open shared object", "a package is missing"),
    (
        r"Repository ?Not ?Found|not a valid model identifier|not appear to have a file named"
        r"|No such file or directory|FileNotFoundError|HFValidationError|failed to open",
        "a file is missing",
    ),
)
"""What the last lines of servers say (vLLM, SGLang, llama.cpp, Python), and the cause it names.

The first cause that some line names is taken: a lack of memory makes other errors follow.
"""
_ERROR = re.compile(r"error|exception|fatal|failed|panic|abort", re.IGNORECASE)
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_STAMP = re.compile(
    r"^(\([^()]*pid=\d+\) ?)?((ERROR|WARNING|INFO) [-\d]+ [:.\d]+ (\[[^\]]*\] )?)?"
    r"|^\d+(\.\d+){3} [A-Z] "
)
"""Beginnings of lines of vLLM (process, level, time, place) and of llama.cpp (time, level)."""
_POINTERS = re.compile("For further information visit|exiting due to")
"""Lines of pydantic and of llama.cpp below an error."""


class ServerFailed(ServerUnavailable):
    """A server did not start, was not ready in time or ended; the message is one line."""


def free_ports() -> Iterator[int]:
    """Yield ports of this machine, each once, that nothing listened on a moment ago."""
    used: set[int] = set()
    while True:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            port = int(listener.getsockname()[1])
        if port not in used:
            used.add(port)
            yield port


class ServerProcess:
    """A server that is started with the command of an arm; as a context manager it is stopped.

    Several may run at once. One thread uses an object, and any other may stop it.

    Attributes:
        arm: its command listens on the port of its URL.
        log: file that the output is written to, the first megabyte and the last ones.
    """

    def __init__(self, arm: Arm, log: Path) -> None:
        self.arm = arm
        self.log = log
        self.port = urlsplit(arm.url).port or 80
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._failure: str | None = None
        self._lock = RLock()

    def __enter__(self) -> ServerProcess:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the server; it may be started again after it was stopped.

        Raises:
            ServerFailed: its port is in use, or its program or log cannot be opened.
        """
        environment = {**os.environ, **self.arm.environment}
        beside = os.path.dirname(sys.executable)  # forerun's environment may not be activated
        environment["PATH"] = f"{environment.get('PATH') or os.defpath}{os.pathsep}{beside}"
        self._failure = None
        if shutil.which(self.arm.command[0], path=environment["PATH"]) is None:
            name = printable(self.arm.command[0])
            raise ServerFailed(f"there is no program {name!r}: install it, or give its path")
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((LOOPBACK, self.port))
            except OSError as error:
                raise ServerFailed(f"port {self.port} is in use: {error.strerror}") from error
        try:
            self.log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            program = [sys.executable, "-I", "-S", supervisor.__file__]
            self._supervisor = subprocess.Popen(
                [*program, self.log, str(GRACE_S), *self.arm.command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # Ctrl-C reaches forerun alone
            )
        except OSError as error:
            raise ServerFailed(f"it cannot be started: {error}") from error

    def wait_ready(self, timeout_s: float, report: Callable[[float], None]) -> None:
        """Wait until the server lists its models.

        Args:
            timeout_s: seconds after which it is given up.
            report: receives the seconds since the beginning, several times a second.

        Raises:
            InvalidRequest: the API key cannot be sent.
            ServerFailed: the server ended, was stopped, is not ready in time, listens on another
                port, or answers as no server with the OpenAI API does.
        """
        started_s = time.monotonic()
        next_ports_s = _OTHER_PORTS_S
        with Door(_ANSWER_S, authorization(None), uses_environment=False) as door:
            while (elapsed_s := time.monotonic() - started_s) < timeout_s:
                report(elapsed_s)
                self._check_running()
                if self._is_ready(door):
                    self._check_running()
                    return
                if elapsed_s >= next_ports_s:
                    next_ports_s = elapsed_s + _OTHER_PORTS_S
                    self._check_ports()
                time.sleep(min(_POLL_S, timeout_s - elapsed_s))
        self._check_running()
        ports, problem = self._list_other_ports(), f"not ready after {timeout_s:g} s"
        if ports:
            problem = f"{problem}, {self._explain_ports(ports)}"
        raise ServerFailed(f"{problem}; last line: {_clean_lines(self._read_tail())[-1]}")

    def failure(self) -> str | None:
        """Return why the server ended by itself; None while it runs, and after it was stopped."""
        with self._lock:
            if self._failure is None and self._supervisor is not None:
                self._failure = self._read_failure(self._supervisor)
            return self._failure

    def pause(self) -> None:
        """Stop all processes of the server (SIGSTOP), until `resume`."""
        paused: set[psutil.Process] = set()
        while new := set(self._list_processes()) - paused:  # one may have started another meanwhile
            for process in new:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            paused |= new

    def resume(self) -> None:
        """Continue after `pause`; without effect on a server that runs."""
        for process in self._list_processes():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def stop(self) -> None:
        """End all processes of the server: SIGTERM, and SIGKILL to those left 10 s later."""
        with self._lock:  # who comes second waits as well
            self.failure()
            server, processes = self._supervisor, self._list_processes()
            self._supervisor = None
            if server is not None:
                _end_supervisor(server)
            for process in processes:  # those that left the process group, where not on Linux
                with contextlib.suppress(psutil.Error):
                    process.kill()

    def memory_bytes(self) -> int:
        """Return the main memory of all processes of the server, in bytes.

        Memory that processes share counts once where the system says how much it is (Linux).
        """
        return sum(map(_measure_memory, self._list_processes()))

    def _list_processes(self) -> list[psutil.Process]:
        """Return all processes of the server, without the supervisor."""
        if self._supervisor is None:
            return []
        try:
            return psutil.Process(self._supervisor.pid).children(recursive=True)
        except psutil.Error:
            return []

    def _check_running(self) -> None:
        if (reason := self.failure()) is not None:
            raise ServerFailed(reason)
        if self._supervisor is None:
            raise ServerFailed("it was stopped before it was ready")

    def _is_ready(self, door: Door) -> bool:
        """Whether the server lists models; raises ServerFailed where something else answers."""
        url = self.arm.url.rstrip("/") + "/models"
        deadline = answer_deadline(_ANSWER_S, url)
        try:
            reply = door.send("GET", url, deadline)
            body = reply.body(deadline, _MAX_LIST_BYTES)
        except (ServerUnavailable, UnreadableInput):
            return False
        if self._list_other_ports():
            raise ServerFailed(f"another program answers on port {self.port}")
        if reply.status in UNAUTHORIZED:
            raise ServerFailed(f"it refuses the API key (status {reply.status}){KEY_HINT}")
        if reply.status != 200:  # llama.cpp answers 503 while it loads
            return False
        try:
            return bool(parse_json(body, "the list")["data"][0]["id"])
        except (UnreadableInput, LookupError, TypeError):
            start = printable(body[:80].decode(errors="replace"), max_length=80)
            raise ServerFailed(f"it lists no models: {url} is {start!r}") from None

    def _check_ports(self) -> None:
        """Raise ServerFailed where the log says that the server listens on another port.

        The port itself is not tried: it may be one that the server's processes meet at.
        """
        ports, log = self._list_other_ports(), self._read_tail()
        if any(re.search(rf" on https?://\S*:{port}\b", log) for port in ports):
            raise ServerFailed(f"{self._explain_ports(ports)}: is --port in its command?")

    def _explain_ports(self, ports: set[int]) -> str:
        others = ", ".join(map(str, sorted(ports)))
        return f"never listened on port {self.port} (listens on {others})"

    def _list_other_ports(self) -> set[int]:
        """Return the ports the server's processes listen on; none if its own is among them."""
        ports = set[int]()
        for process in self._list_processes():
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections("tcp"):
                    if connection.status == psutil.CONN_LISTEN:
                        ports.add(int(connection.laddr.port))
        return set() if self.port in ports else ports

    def _read_failure(self, server: subprocess.Popen[bytes]) -> str | None:
        """Return why the command has ended; None while it runs."""
        assert server.stdout is not None
        if not select.select([server.stdout], [], [], 0.0)[0]:
            return None
        return explain_report(server.stdout.readline(), self._read_tail())

    def _read_tail(self) -> str:
        """Return the end of the log, without secrets; empty where it cannot be read."""
        try:
            return hide_printed_keys(read_tail(self.log), self.arm.words)
        except OSError:
            return ""


def _end_supervisor(server: subprocess.Popen[bytes]) -> None:
    """Make a supervisor end its server, and wait until it has."""
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.close()
    server.terminate()  # a process forked from this one may have the pipe open
    try:
        server.wait(GRACE_S + supervisor.KILL_S + 5.0)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    finally:
        server.stdout.close()


def _measure_memory(process: psutil.Process) -> int:
    try:
        if sys.platform == "linux":
            with contextlib.suppress(psutil.AccessDenied):
                return int(process.memory_full_info().pss)
        return int(process.memory_info().rss)
    except psutil.Error:  # it has ended
        return 0


def _clean_lines(log: str) -> list[str]:
    """Return the lines of a log for messages, without colours, time stamps, secrets and blanks."""
    plain = (_STAMP.sub("", _COLOUR.sub("", line)).strip() for line in log.splitlines())
    lines = [printable(hide_urls(line), max_length=_LONGEST_LINE) for line in plain if line]
    return lines or ["none was printed"]


def read_tail(log: Path) -> str:
    """Return the end of what a command printed; raises OSError."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode(errors="replace")


def explain_report(report: bytes, printed: str) -> str:
    """Return why a command ended, from the line of its supervisor and what it printed last."""
    line = report.decode(errors="replace").strip()
    try:
        return explain_end(int(line), printed)
    except ValueError:
        return printable(line, max_length=_LONGEST_LINE) or "its supervisor was killed"


def explain_end(status: int, log: str) -> str:
    """Return in one line why a server ended.

    Args:
        status: its exit status; negative: the number of the signal.
        log: the last lines it printed.
    """
    lines = _clean_lines(log)
    number = -status if status < 0 else status - 128  # a shell adds 128
    if number == signal.SIGKILL:
        return "it was killed (SIGKILL), probably by the system for lack of main memory"
    for pattern, cause in _CAUSES:
        for line in reversed(lines):
            if re.search(pattern, line, re.IGNORECASE):
                return f"{cause}: {line}"
    names = {one.value: one.name for one in signal.Signals}
    ended = f"it was ended by {names[number]}" if number in names else f"exit status {status}"
    errors = [line for line in lines if _ERROR.search(line) and not _POINTERS.search(line)]
    return f"{ended}: {(errors or lines)[-1]}"
