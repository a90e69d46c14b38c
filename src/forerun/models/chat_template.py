"""Rendering of chat templates in a separate process, limited in time, memory and output.

A chat template is a program in a model's files. Jinja's sandbox keeps it from files and from the
interpreter, but not from looping for ever or filling the memory; limits of a process do. The child
process runs this very file and imports no more than Jinja, so it starts in a tenth of a second.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_SECONDS = 5
MAX_START_SECONDS = 20
MAX_BYTES = 1 << 29
MAX_CHARACTERS = 8 << 20


class TemplateRefused(ValueError):
    """A chat template raised an error or exceeded a limit."""


class TemplateProcess:
    """A child process that renders chat templates; it starts at the first call and is reused.

    A template that exceeds a limit ends the child, and the next one starts another. Any thread may
    call it; calls wait for each other. The child ends with this object or with this process.
    """

    script = Path(__file__).resolve()

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = 0

    def render(
        self, template: str, variables: Mapping[str, Any], max_seconds: int = MAX_SECONDS
    ) -> str:
        """Render a chat template as transformers does.

        Args:
            template: Jinja source.
            variables: JSON values the template may use, such as `messages`.
            max_seconds: of processor time.

        Raises:
            TemplateRefused: the template is malformed, raises, or takes more than `max_seconds`,
                `MAX_BYTES` of memory or `MAX_CHARACTERS` of output.
        """
        request = {"template": template, "variables": dict(variables), "max_seconds": max_seconds}
        with self._lock:
            # On a busy machine a second of work takes several.
            answer = self._ask(json.dumps(request).encode() + b"\n", 4 * max_seconds)
        if "text" in answer:
            return str(answer["text"])
        limit = f"it took more than {max_seconds} s, or its process was killed"
        raise TemplateRefused(str(answer.get("error", limit)))

    def _ask(self, line: bytes, max_wall_s: float) -> dict[str, Any]:
        """Return the reply of the child process; it is empty if the child was killed."""
        start_s = 0 if self.is_running else MAX_START_SECONDS
        child = self._ensure_running()
        assert child.stdin is not None
        assert child.stdout is not None
        alarm = threading.Timer(max_wall_s + start_s, child.kill)
        alarm.start()
        try:
            child.stdin.write(line)
            child.stdin.flush()
            answer: dict[str, Any] = json.loads(child.stdout.readline())
        except (OSError, ValueError):
            end(child)
            return {}
        finally:
            alarm.cancel()
        if answer.get("error"):  # what the template left in memory is gone with the process
            end(child)
        return answer

    @property
    def is_running(self) -> bool:
        """Whether there is a child process of this process."""
        child = self._child
        return child is not None and self._owner == os.getpid() and child.poll() is None

    def _ensure_running(self) -> subprocess.Popen[bytes]:
        """Return the running child process; a forked process starts a child of its own."""
        if not self.is_running:
            self._owner = os.getpid()
            self._child = subprocess.Popen(
                [sys.executable, "-I", str(self.script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            weakref.finalize(self, end, self._child)
            path = [folder for folder in sys.path if folder]
            assert self._child.stdin is not None
            self._child.stdin.write(json.dumps(path).encode() + b"\n")
        assert self._child is not None
        return self._child


def end(child: subprocess.Popen[bytes]) -> None:
    """End a child process, unless it has already ended."""
    child.kill()
    with contextlib.suppress(OSError):  # closing flushes what it did not read
        child.communicate()


def serve() -> None:
    """Read a JSON request per line from stdin and write the rendered template as JSON to stdout."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    sys.path[:] = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        used_s = math.ceil(used.ru_utime + used.ru_stime)
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (used_s + request["max_seconds"], hard))
        try:
            answer = {"text": rendered(request["template"], request["variables"])}
        except MemoryError:
            answer = {"error": f"it took more than {MAX_BYTES >> 20} MiB of memory"}
        except Exception as error:  # noqa: BLE001 (a template may raise anything)
            answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
        print(json.dumps(answer), flush=True)


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in the environment that transformers defines for chat templates."""
    from datetime import datetime

    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Jinja extension that accepts {% generation %}, the mark around an assistant's text."""

        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> nodes.Node | list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(
                ("name:endgeneration",), drop_needle=True
            )
            return body

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, **options: Any) -> str:
        return json.dumps(value, **({"ensure_ascii": False} | options))

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    parts: list[str] = []
    num_characters = 0
    for part in environment.from_string(template).generate(**variables):
        parts.append(part)
        num_characters += len(part)
        if num_characters > MAX_CHARACTERS:
            raise TemplateRefused(f"its output exceeds {MAX_CHARACTERS} characters")
    return "".join(parts)


def drop_none(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


if __name__ == "__main__":
    serve()
