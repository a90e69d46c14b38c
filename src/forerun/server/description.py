"""The parts of the OpenAPI description that FastAPI cannot derive: errors, streams, metrics."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

__all__ = ["ERRORS", "STREAMS", "TEXT", "DescribedApp"]


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
    421: "The Host header names another server",
    429: "A queue or a limit is full; see Retry-After",
    500: "An error of the server",
    503: "The engine has ended",
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
    """A FastAPI application whose OpenAPI description lists the status codes of all responses."""

    def openapi(self) -> dict[str, Any]:
        """Return the description, with 400 as the status of an invalid body instead of 422."""
        found = super().openapi()
        for path in found["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        return found
