"""Stores responses on disk, one line each, written as they finish so that none is lost."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from forerun.align.data.prompts import PromptRecord
from forerun.align.data.sample import Sample, Source, TopLogprobs
from forerun.align.workspace import exclusive_access, lock_for
from forerun.cache import hash_of
from forerun.errors import CacheTooLarge, InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.theory.record import Json

__all__ = ["Response", "ResponseOrigin", "ResponseStore"]

logger = logging.getLogger("forerun.align")

FORMAT = 2
FREE = ("n", "logprobs")
"""Parameters that decide nothing: every response is a single sample."""
DEFAULTS = SamplingParams()
"""Left out of an origin, so that a new parameter does not make an old origin another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseOrigin:
    """All settings that influence responses; responses made with other settings are not reused.

    Attributes:
        source: target or draft.
        model: content hash of its weights, or address and name where a server has it.
        tokenizer_hash: of the tokenizer.
        params: sampling parameters of the responses.
    """

    source: Source
    model: str
    tokenizer_hash: str
    params: SamplingParams

    def to_dict(self) -> dict[str, Json]:
        """Return the origin as JSON values."""
        params = {
            field.name: value
            for field in fields(self.params)
            if field.name not in FREE
            and (value := getattr(self.params, field.name)) != getattr(DEFAULTS, field.name)
            and value != {}  # a logit_bias that names no token changes nothing
        }
        plain: dict[str, Json] = json.loads(
            json.dumps(
                {
                    "format": FORMAT,
                    "source": self.source,
                    "model": self.model,
                    "tokenizer_hash": self.tokenizer_hash,
                    "params": params,
                },
                default=dict,
            )
        )
        return plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """One response to a prompt.

    Attributes:
        prompt_hash: of the prompt.
        index: which of the prompt's samples.
        token_ids: of the response, the token that ended it included.
        finish_reason: as the engine or the server gave it.
        top_logprobs: of every token, where a server offers them.
    """

    prompt_hash: str
    index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    top_logprobs: TopLogprobs | None = None

    @property
    def key(self) -> tuple[str, int]:
        """Prompt hash and sample index, which identify a response in the store."""
        return self.prompt_hash, self.index


class ResponseStore:
    """File of the responses of one origin, named by the hash of that origin.

    Lines are written whole, so a killed process loses at most the one it was writing;
    what is left of that is removed by the next. One process at a time writes, see `writing`.

    Args:
        folder: of responses, made if need be.
        origin: of the responses.

    Raises:
        InvalidRequest: the file is of another origin, cannot be read, or has to be written
            while another process writes it.
    """

    def __init__(self, folder: Path, origin: ResponseOrigin) -> None:
        header = json.dumps(origin.to_dict(), sort_keys=True)
        self.origin = origin
        self.path = folder / f"{origin.source}-{hash_of(header.encode())}.jsonl"
        self._header = header
        self._responses: dict[tuple[str, int], Response] = {}
        self._lock = lock_for(self.path)
        self._load()

    def __len__(self) -> int:
        return len(self._responses)

    def missing(
        self, prompts: Iterable[PromptRecord], samples_per_prompt: int
    ) -> list[tuple[PromptRecord, int]]:
        """Return the prompts and sample indices without a response, lowest sample indices first."""
        return [
            (prompt, index)
            for index in range(samples_per_prompt)
            for prompt in prompts
            if (prompt.prompt_hash, index) not in self._responses
        ]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the file's lock during the block, after reading the responses of other processes.

        Raises:
            InvalidRequest: another process writes.
        """
        with exclusive_access(self._lock, self.path):
            self._load()
            yield

    def add(self, response: Response) -> None:
        """Write a response, unless the store has one with the same key.

        Raises:
            CacheTooLarge: it cannot be written, as on a full disk; those before are safe.
        """
        if response.key in self._responses:
            return
        try:
            self._append(json.dumps(asdict(response), separators=(",", ":")))
        except OSError as error:
            raise CacheTooLarge(
                f"{self.path} cannot be written: {error.strerror or error}; {len(self)} responses "
                "are kept: make room and run again to go on"
            ) from error
        self._responses[response.key] = response

    def samples(self, prompts: Iterable[PromptRecord], samples_per_prompt: int) -> list[Sample]:
        """Return prompts with their responses as samples; empty responses are left out."""
        found = (
            (prompt, self._responses.get((prompt.prompt_hash, index)))
            for prompt in prompts
            for index in range(samples_per_prompt)
        )
        return [
            sample_of(prompt, response, self.origin.source)
            for prompt, response in found
            if response is not None and response.token_ids
        ]

    def response(self, prompt_hash: str, index: int) -> Response | None:
        """Return one response, None where it is missing."""
        return self._responses.get((prompt_hash, index))

    def _append(self, line: str) -> None:
        """Append a line; if that fails, restore the length of the file."""
        with self.path.open("ab", buffering=0) as file:
            end = file.tell()
            remaining = memoryview(line.encode() + b"\n")
            try:
                while remaining:  # a file that is nearly full takes a part, and refuses the next
                    remaining = remaining[file.write(remaining) or 0 :]
            except OSError:
                os.truncate(self.path, end)
                raise

    def _load(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            whole = self._whole()
        except OSError as error:
            raise InvalidRequest(f"responses cannot be kept in {self.path}: {error}") from error
        first, *lines = whole.splitlines()
        if first.decode(errors="replace") != self._header:
            raise InvalidRequest(
                f"{self.path} holds responses of another model or of other parameters; move it away"
            )
        for number, line in enumerate(lines, start=2):
            self._take(line, number)

    def _whole(self) -> bytes:
        """Return the lines of the file after repairing an incomplete last line or header."""
        content = self._content()
        if content.endswith(b"\n"):
            return content
        with exclusive_access(self._lock, self.path):
            content = self._content()  # the process that wrote it has ended
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(self.path, len(whole))
            if not whole:
                self._append(self._header)
            return whole or self._content()

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _take(self, line: bytes, number: int) -> None:
        try:
            response = response_of(json.loads(line))
        except (KeyError, TypeError, ValueError, RecursionError):
            logger.warning("%s:%d is damaged; that response is made again", self.path, number)
            return
        self._responses.setdefault(response.key, response)


def response_of(row: Any) -> Response:
    """Parse the response of one line.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    top = row["top_logprobs"]
    if top is not None and len(top) != len(row["token_ids"]):
        raise ValueError("log-probabilities")
    token_ids = tuple(row["token_ids"])
    if not all(type(token) is int and token >= 0 for token in token_ids):
        raise ValueError("token ids")
    return Response(
        prompt_hash=str(row["prompt_hash"]),
        index=int(row["index"]),
        token_ids=token_ids,
        finish_reason=str(row["finish_reason"]),
        top_logprobs=None
        if top is None
        else tuple(tuple((int(i), float(p)) for i, p in place) for place in top),
    )


def sample_of(prompt: PromptRecord, response: Response, source: Source) -> Sample:
    """Combine a prompt and its response into a training sample."""
    length = len(prompt.prompt_ids)
    return Sample(
        prompt_hash=prompt.prompt_hash,
        token_ids=prompt.prompt_ids + response.token_ids,
        spans=((length, length + len(response.token_ids)),),
        tag=prompt.tag,
        source=source,
        top_logprobs=response.top_logprobs,
    )
