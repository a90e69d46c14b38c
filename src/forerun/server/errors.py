"""Errors in the form of the OpenAI API: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from forerun.errors import (
    EngineStopped,
    ForerunError,
    InvalidRequest,
    MaskError,
    PromptTooLong,
    QueueFull,
    UnreadableInput,
)

logger = logging.getLogger("forerun.server")

MAX_CHARACTERS = 2000
"""Most characters of a message, which may quote a request."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class InvalidBody(InvalidRequest):
    """A body does not have the declared form; `param` is the first field that is wrong."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ModelNotServed(InvalidRequest):
    """A request names a model that this server does not have."""


class LimitReached(InvalidRequest):
    """A tenant, or the server, has reached a limit; the request may be sent again later."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


KINDS: tuple[tuple[type[Exception], int, str | None, str | None], ...] = (
    (ModelNotServed, 404, "model", "model_not_found"),
    (PromptTooLong, 400, "prompt", "context_length_exceeded"),
    (LimitReached, 429, None, "rate_limit_exceeded"),
    (QueueFull, 429, None, "queue_full"),
    (InvalidRequest, 400, None, None),
    (UnreadableInput, 400, None, None),
    (MaskError, 400, None, None),  # here it is a grammar that its parser gives up
    (EngineStopped, 503, None, None),
    (Exception, 500, None, None),
)
"""Status, field and code of every kind of error; the first that matches counts."""


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error; an unexpected error has status 500."""
    return next(status for kind, status, *_ in KINDS if isinstance(error, kind))


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """Return the JSON of an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    shown, field = (text and readable(text[:MAX_CHARACTERS]) for text in (message, param))
    return msgspec.json.encode(
        {"error": {"message": shown, "type": kind, "param": field, "code": code}}
    )


def readable(text: str) -> str:
    """Replace lone surrogates, which JSON can contain, in a text that quotes a request."""
    return text.encode("utf-8", "backslashreplace").decode()


def error_response(
    message: str,
    status: int,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """Return a response with an error."""
    return Response(
        error_body(message, status, param=param, code=code),
        status_code=status,
        media_type="application/json",
        headers=headers,
    )


async def response_for(request: Request, error: Exception) -> Response:
    """Return the response for an exception; an unexpected exception is logged and not shown."""
    if isinstance(error, HTTPException):
        return error_response(str(error.detail), error.status_code, headers=error.headers)
    _, status, param, code = next(row for row in KINDS if isinstance(error, row[0]))
    if not isinstance(error, ForerunError):
        logger.error("unexpected %s", type(error).__name__, exc_info=error)
        return error_response("an error that the server did not foresee; see its log", status)
    if isinstance(error, InvalidBody):
        param = error.param
    headers = None
    if isinstance(error, QueueFull | LimitReached):
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
    return error_response(str(error), status, param=param, code=code, headers=headers)
