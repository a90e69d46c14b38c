"""A trace file: JSON lines, header first, then steps as they happen, requests as they end."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TextIO

from forerun.errors import InvalidRequest
from forerun.models.content_hash import tokenizer_hash
from forerun.models.load import model_folder
from forerun.provenance import content_hash, version_of
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json, RequestRecord, StepRecord, TraceHeader

__all__ = ["TraceFile", "header_for", "open_trace", "parameters_of"]

PACKAGES = ("forerun", "torch", "transformers")


class TraceFile:
    """Writes one JSON object per line; "record" says which kind it is."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def header(self, header: TraceHeader) -> None:
        """What was run; the first line."""
        self._write("header", header.to_dict())

    def step(self, record: StepRecord) -> None:
        """One step of one request."""
        self._write("step", record.to_dict())

    def request(self, record: RequestRecord) -> None:
        """A finished request."""
        self._write("request", record.to_dict())

    def _write(self, kind: str, content: dict[str, Json]) -> None:
        self.file.write(json.dumps({"record": kind, **content}) + "\n")


@contextmanager
def open_trace(path: Path) -> Iterator[TraceFile]:
    """Open a trace for writing.

    Raises:
        InvalidRequest: the file cannot be written.
    """
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"the trace {path} cannot be written: {error.strerror}") from error
    with file:
        yield TraceFile(file)


def header_for(target: str, draft: str | None, device: str) -> TraceHeader:
    """Header of a trace; reads the weight files once to hash them."""
    return TraceHeader(
        target=target,
        target_hash=content_hash(target),
        draft=draft,
        draft_hash=content_hash(draft) if draft is not None else None,
        tokenizer_hash=tokenizer_hash(model_folder(target)),
        device=device,
        versions={
            "python": platform.python_version(),
            **{name: version_of(name) for name in PACKAGES},
        },
    )


def parameters_of(params: SamplingParams) -> dict[str, Json]:
    """Sampling parameters as JSON wants them."""
    values = {item.name: getattr(params, item.name) for item in fields(SamplingParams)}
    return values | {"logit_bias": dict(params.logit_bias or {})}
