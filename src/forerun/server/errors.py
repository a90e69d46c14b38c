"""Errors in the form of the OpenAI API: `{"error": {message, type, param, code}}`.

FastAPI cannot derive the description of errors, streams and metrics, so it is written here.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
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
from forerun.server.bodies import InvalidBody
from forerun.server.protocol import Body

logger = logging.getLogger("forerun.server")

MAX_CHARACTERS = 2000
"""Most characters of a message, which may quote a request."""
TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ModelNotServed(InvalidRequest):
    """A request names a model that this server does not have."""


def status_of(error: Exception) -> int:
    """Return the HTTP status of an error; an unexpected error has status 500."""
    if isinstance(error, HTTPException):
        return error.status_code
    statuses: tuple[tuple[type[Exception], int], ...] = (
        (ModelNotServed, 404),
        (InvalidRequest, 400),
        (UnreadableInput, 400),
        (MaskError, 400),  # here it is a grammar that its parser gives up
        (QueueFull, 429),
        (EngineStopped, 503),
    )
    return next((status for kind, status in statuses if isinstance(error, kind)), 500)


def error_body(
    message: str, status: int, *, param: str | None = None, code: str | None = None
) -> bytes:
    """Return the JSON of an error."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    found = {
        "message": readable(message[:MAX_CHARACTERS]),
        "type": kind,
        "param": param,
        "code": code,
    }
    if param is not None:
        found["param"] = readable(param[:MAX_CHARACTERS])
    return msgspec.json.encode({"error": found})


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
    status = status_of(error)
    if isinstance(error, HTTPException):
        return error_response(str(error.detail), status, headers=error.headers)
    if isinstance(error, QueueFull):
        after = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return error_response(str(error), status, code="queue_full", headers=after)
    if isinstance(error, ForerunError):
        if isinstance(error, PromptTooLong):
            return error_response(
                str(error), status, param="prompt", code="context_length_exceeded"
            )
        if isinstance(error, ModelNotServed):
            return error_response(str(error), status, param="model", code="model_not_found")
        param = error.param if isinstance(error, InvalidBody) else None
        return error_response(str(error), status, param=param)
    logger.error("unexpected %s", type(error).__name__, exc_info=error)
    return error_response("an error that the server did not foresee; see its log", status)


class ErrorDetail(BaseModel):
    """Description of an error: message, type, field and machine-readable code."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every error."""

    error: ErrorDetail


REASONS = {
    400: "The body or a value of it cannot be used",
    401: "A valid API key is needed",
    404: "No such model",
    408: "The body did not come in time",
    413: "The body is too long",
    415: "The body is not declared to be JSON",
    421: "The Host header names another server",
    429: "A queue or a limit is full; see Retry-After",
    500: "An error of the server",
    503: "The engine has ended, or the server is not ready",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": reason} for status, reason in REASONS.items()
}
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, or with `stream` its parts as server-sent events",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}
TEXT: dict[int | str, dict[str, Any]] = {
    200: {"description": "Metrics for Prometheus", "content": {"text/plain": {}}}
}


class DescribedApp(FastAPI):
    """A FastAPI application whose OpenAPI description has the bodies that its routes read."""

    bodies: Mapping[str, type[Body]] = MappingProxyType({})

    def openapi(self) -> dict[str, Any]:
        """Return the description, with 400 as the status of an invalid body instead of 422."""
        if self.openapi_schema is not None:
            return self.openapi_schema
        found = super().openapi()
        schemas = found["components"]["schemas"]
        for path, operations in found["paths"].items():
            for operation in operations.values():
                operation["responses"].pop("422", None)
            if (kind := self.bodies.get(path)) is not None:
                schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= schema.pop("$defs", {})
                content = {"application/json": {"schema": schema}}
                operations["post"]["requestBody"] = {"content": content, "required": True}
        return found
