"""Runs a server, bounds the log of its output, and ends all of its processes.

`forerun.tune.process` starts this file as a program, `python -I -S supervisor.py LOG GRACE_S
COMMAND...`, so it imports the standard library alone. Its standard input is a pipe whose other end
only forerun has: when forerun ends, in whatever way, the pipe ends, and the server is terminated.
Standard output receives one line when the command ends by itself: its exit status (negative: the
signal), or why it could not be started.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

KILL_S = 10.0
"""From the first SIGKILL until processes that the kernel does not end are given up."""
HEAD_BYTES = TAIL_BYTES = 1 << 20
_SET_PARENT_DEATH_SIGNAL, _SET_CHILD_SUBREAPER = 1, 36  # of <linux/prctl.h>
_IS_LINUX = sys.platform == "linux"
_STOPPING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PARENT_CHECK_S = 1.0


class BoundedLog:
    """A file with the first megabyte and the last one to two megabytes of what is written to it."""

    def __init__(self, path: str) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115 (open as long as the process)
        os.fchmod(self._file.fileno(), 0o600)  # servers print keys
        self._num_left_out = 0

    def write(self, output: bytes) -> None:
        """Append output; what a full disk refuses is left out."""
        with contextlib.suppress(OSError):
            self._file.write(output)
            size = self._file.tell()
            if size <= HEAD_BYTES + 2 * TAIL_BYTES:
                return
            self._file.seek(size - TAIL_BYTES)
            tail = self._file.read(TAIL_BYTES)
            self._num_left_out += size - HEAD_BYTES - TAIL_BYTES
            self._file.seek(HEAD_BYTES)
            self._file.write(b"\n[%d bytes left out]\n" % self._num_left_out + tail)
            self._file.truncate()


def call_prctl(option: int, value: int) -> None:
    """Set an attribute of this process by its number in <linux/prctl.h>; only on Linux."""
    if _IS_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def list_descendants() -> list[int]:
    """Return the ids of all processes below this one, those with other sessions included.

    Only on Linux; elsewhere the list is empty.
    """
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if _IS_LINUX else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
                children.setdefault(parent, []).append(int(name))
    descendants = list(children.get(os.getpid(), ()))
    for pid in descendants:  # which grows
        descendants += children.get(pid, ())
    return descendants


class Supervisor:
    """Starts a command and ends with it, or ends it when the parent process is gone.

    Args:
        grace_s: seconds from SIGTERM to SIGKILL.

    Attributes:
        status: of the command, once it has ended; negative for a signal.
        is_stopping: whether a signal, or the end of the parent process, asks for the end.
    """

    def __init__(self, command: list[str], log: BoundedLog, grace_s: float) -> None:
        self.status: int | None = None
        self.is_stopping = False
        self._log = log
        self._grace_s = grace_s
        self._parent = os.getppid()
        self._has_children = True
        self._wakeup, wakeup_end = os.pipe()
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakeup_end, False)
        signal.set_wakeup_fd(wakeup_end, warn_on_full_buffer=False)
        for number in (signal.SIGCHLD, *_STOPPING):
            signal.signal(number, lambda *_: None)  # the number arrives in the pipe
        call_prctl(_SET_CHILD_SUBREAPER, 1)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # Should this process be killed, its command at least is killed with it.
            preexec_fn=lambda: call_prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL),
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        os.set_blocking(self._output, False)
        self._sources = [self._output, self._wakeup, 0]

    def run(self) -> None:
        """Wait for the end of the command or of the parent, then end all processes."""
        try:
            while self.status is None and not self.is_stopping:
                self._wait(_PARENT_CHECK_S)
            if self.status is not None:
                self._copy_output()
                report(self.status)
        finally:
            self._end_processes()

    def _wait(self, timeout_s: float) -> None:
        """Copy output until something happens or the time is over, and note what happened."""
        ready = select.select(self._sources, [], [], timeout_s)[0]
        if self._output in ready:
            self._copy_output()
        if self._wakeup in ready:
            self.is_stopping |= not set(_STOPPING).isdisjoint(os.read(self._wakeup, 4096))
        if 0 in ready:  # nothing is ever written there: it is the end
            self._sources.remove(0)
            self.is_stopping = True
        self.is_stopping |= os.getppid() != self._parent
        self._collect_ended()

    def _copy_output(self) -> None:
        """Move what the server has printed, a megabyte at most, to the log."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(16):
                output = os.read(self._output, 1 << 16)
                if not output:
                    if self._output in self._sources:
                        self._sources.remove(self._output)
                    return
                self._log.write(output)

    def _collect_ended(self) -> None:
        """Take the exit status of every child that has ended, adopted ones included."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._process.pid:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            self._has_children = False

    def _end_processes(self) -> None:
        """Terminate all processes, and kill those that are left after a while."""
        self._send_signal(signal.SIGTERM)
        self._send_signal(signal.SIGCONT)  # paused ones as well
        ends_s = time.monotonic() + self._grace_s
        while self._has_children and time.monotonic() < ends_s:
            self._wait(0.1)
        ends_s = time.monotonic() + KILL_S
        self._send_signal(signal.SIGKILL)
        while self._has_children and time.monotonic() < ends_s:
            self._wait(0.05)
            self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: int) -> None:
        """Send a signal to the command's process group and to all processes below this one."""
        if self.status is None or not _IS_LINUX:  # later its id may be that of another group
            with contextlib.suppress(OSError):
                os.killpg(self._process.pid, number)
        for pid in list_descendants():
            with contextlib.suppress(OSError):
                os.kill(pid, number)


def report(line: object) -> None:
    """Write a line for forerun, if it still runs."""
    with contextlib.suppress(OSError):
        os.write(1, f"{line}\n".encode())


def supervise_command(log: str, grace_s: str, *command: str) -> None:
    """Run a command until it ends, or until it is to end."""
    try:
        supervisor = Supervisor([*command], BoundedLog(log), float(grace_s))
    except OSError as error:
        report(f"it cannot be started: {error.strerror}: {error.filename}")
    else:
        supervisor.run()


if __name__ == "__main__":
    supervise_command(*sys.argv[1:])
