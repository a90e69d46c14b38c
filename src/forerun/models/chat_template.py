"""Rendering of chat templates in a process of its own, limited in time, memory and output.

A chat template is a program in a model's files. Jinja's sandbox keeps it from files and from the
interpreter, but not from looping for ever or filling the memory; limits of a process do. The child
process runs this very file and imports no more than Jinja, so it starts in a tenth of a second.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["TemplateRefused", "render_template"]

MAX_SECONDS = 5
MAX_BYTES = 1 << 30
MAX_CHARACTERS = 8 << 20


class TemplateRefused(ValueError):
    """A chat template raised an error or exceeded a limit."""


def render_template(
    template: str, variables: Mapping[str, Any], max_seconds: int = MAX_SECONDS
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
    request = {
        "template": template,
        "variables": dict(variables),
        "max_seconds": max_seconds,
        "path": [folder for folder in sys.path if folder],
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", str(Path(__file__).resolve())],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=False,
            timeout=4 * max_seconds + 10,  # on a busy machine a second of work takes several
        )
        found = json.loads(done.stdout) if done.returncode == 0 else {}
    except (subprocess.TimeoutExpired, ValueError):
        found = {}
    if "text" in found:
        return str(found["text"])
    limit = f"it took more than {max_seconds} s, or its process was killed"
    raise TemplateRefused(str(found.get("error", limit)))


def serve() -> None:
    """Render the template in the request on stdin and write the result to stdout, as JSON."""
    import resource

    request = json.load(sys.stdin)
    seconds = request["max_seconds"]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    sys.path[:] = request["path"]
    try:
        answer = {"text": rendered(request["template"], request["variables"])}
    except MemoryError:
        answer = {"error": f"it took more than {MAX_BYTES >> 20} MiB of memory"}
    except Exception as error:  # noqa: BLE001 (a template may raise anything)
        answer = {"error": f"{type(error).__name__}: {error!s:.500}"}
    json.dump(answer, sys.stdout)


def rendered(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in the environment that transformers defines for chat templates."""
    from datetime import datetime

    import jinja2
    from jinja2 import ext, nodes, sandbox

    class Generation(ext.Extension):
        """Accepts {% generation %}, which marks what an assistant wrote."""

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


def without_none(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages without fields that are None, which transformers leaves out too."""
    return [{k: v for k, v in message.items() if v is not None} for message in messages]


if __name__ == "__main__":
    serve()
