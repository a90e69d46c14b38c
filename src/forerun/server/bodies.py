"""Reading of request bodies: parsed and checked away from the event loop where they are large."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from fastapi import Request
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from forerun.server.errors import InvalidBody
from forerun.server.protocol import Body
from forerun.server.request_log import CLIENT_LEFT

INLINE_BYTES = 16 << 10
"""A body of this size is parsed in about the time that another thread takes to start."""
MAX_VALUES = 1 << 17
MAX_DEPTH = 100
MAX_SHOWN = 200
MAX_PROBLEMS = 5

BodyT = TypeVar("BodyT", bound=Body)


class PacedExecutor(ThreadPoolExecutor):
    """One thread that rests after each task as long as the task took.

    What it runs keeps other threads from running Python for much of its time, so that without a
    rest a client that always sends large bodies would slow all others.
    """

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="large")

    def submit(self, task: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        """Run a task after those before it and their rests."""
        took_s = 0.0

        def run() -> Any:
            nonlocal took_s
            started_s = time.monotonic()
            try:
                return task(*given, **named)
            finally:
                took_s = time.monotonic() - started_s

        running = super().submit(run)
        super().submit(lambda: time.sleep(took_s))
        return running


async def read_body(
    request: Request, read: Callable[[Any], BodyT], executor: Executor
) -> tuple[BodyT, Executor | None]:
    """Read the body of a request, a large one on `executor`; `read` checks its parsed JSON.

    Returns also where further work on it belongs: None, the executor of short work, or `executor`.
    Raises InvalidBody, and HTTPException where the media type is not JSON.
    """
    given = request.headers.get("content-type", "")
    if given.partition(";")[0].strip().lower() != "application/json":
        # Browsers let pages of other sites send other content types without a CORS preflight.
        raise HTTPException(
            415, f"the Content-Type is {given[:MAX_SHOWN]!r}; send Content-Type: application/json"
        )
    try:
        data = await request.body()
    except ClientDisconnect:
        raise HTTPException(CLIENT_LEFT, "the client left before its body was complete") from None

    def check() -> BodyT:
        try:
            return read(parsed(data))
        except ValidationError as error:
            raise invalid_body(error) from None

    if len(data) <= INLINE_BYTES:
        return check(), None
    return await asyncio.get_running_loop().run_in_executor(executor, check), executor


def parsed(data: bytes) -> Any:
    """Parse the JSON of a body, once its values and their depth are known to be limited.

    The parser does not let other threads run, so it must not take long.
    """
    num_values, depth = _measure_extent(data)
    for found, most, name in ((num_values, MAX_VALUES, "values"), (depth, MAX_DEPTH, "levels")):
        if found > most:
            raise InvalidBody(f"the body has {found} {name}; at most {most} are read")
    try:
        return json.loads(data.decode())
    except ValueError as error:
        raise InvalidBody(f"the body is no JSON: {error!s:.200}") from None


def _measure_extent(data: bytes) -> tuple[int, int]:
    """Return how many values a JSON text has, and how deep they are nested, at most."""
    num_opens, num_commas = data.count(b"[") + data.count(b"{"), data.count(b",")
    if num_opens <= MAX_DEPTH and num_opens + num_commas <= MAX_VALUES:
        return num_opens + num_commas, num_opens
    if b"\\" in data:
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    marks = np.frombuffer(data, dtype=np.uint8)
    is_outside = np.bitwise_xor.accumulate(marks == ord('"')) == 0  # of strings
    braces = marks | 0x20  # makes [ and ] the same as { and }
    opens, closes = (braces == ord("{")) & is_outside, (braces == ord("}")) & is_outside
    num_values = np.count_nonzero((marks == ord(",")) & is_outside) + np.count_nonzero(opens)
    depths = np.cumsum(opens.astype(np.int8) - closes.astype(np.int8), dtype=np.int32)
    return int(num_values), int(depths.max(initial=0))


def invalid_body(error: ValidationError) -> InvalidBody:
    """Return an error that names the first fields that are wrong in a body."""
    problems: dict[str, str] = {}
    for problem in error.errors(include_url=False, include_context=False):
        path = ".".join(str(part) for part in problem["loc"])
        if problem["type"] in ("not_supported", "too_many"):
            said = problem["msg"]
        elif problem["type"] == "extra_forbidden":
            said = "is not a known field"
        else:
            said = f"{problem['msg']} (given: {_show(problem.get('input'))})"
        problems.setdefault(path, said)
    shown = [f"{path or 'the body'}: {said}" for path, said in problems.items()][:MAX_PROBLEMS]
    return InvalidBody("; ".join(shown), next(iter(problems), "") or None)


def _show(value: object) -> str:
    """Return the beginning of a value as text; a large one is not written out for it."""
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)} entries"
    return str(value[:MAX_SHOWN] if isinstance(value, str) else value)[:MAX_SHOWN]
