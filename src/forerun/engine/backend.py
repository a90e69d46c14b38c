"""Interface of generation backends: an engine, or the client of a server."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.engine.results import RequestOutput, StreamChunk
from forerun.sampling.config import SamplingParams

__all__ = ["Backend", "BackendStats", "Capabilities"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendStats:
    """Counts of a backend since it was created.

    Attributes:
        num_running: sequences that are being decoded.
        num_waiting: sequences that wait for a place.
        num_steps: target passes.
        num_drafted: draft nodes that were verified.
        num_accepted: of these, accepted.
        num_emitted: output tokens.
    """

    num_running: int
    num_waiting: int
    num_steps: int
    num_drafted: int
    num_accepted: int
    num_emitted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Features and limits of a backend.

    Attributes:
        max_context: prompt plus output tokens of one sequence.
        max_batch: sequences decoded at once.
        methods: names of its drafters; empty where it decodes plainly.
        token_prompts: whether a prompt may be a list of token ids.
        logprobs: whether log-probabilities can be had.
        seeds: whether the text is a function of the seed.
    """

    max_context: int
    max_batch: int
    methods: tuple[str, ...] = ()
    token_prompts: bool = True
    logprobs: bool = True
    seeds: bool = True


@runtime_checkable
class Backend(Protocol):
    """Interface for text generation by an `Engine` or by an OpenAI-compatible server's client."""

    def generate(
        self,
        prompts: str | Seq[str | Seq[int]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for all prompts and return one output per prompt, in order."""

    def stream(
        self, prompt: str | Seq[int], params: SamplingParams | None = None
    ) -> Iterator[StreamChunk]:
        """Yield the chunks of one prompt; closing the iterator aborts the request."""

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request and return its output so far; None where the id is unknown."""

    def stats(self) -> BackendStats:
        """Return counts since the backend was created."""

    def capabilities(self) -> Capabilities:
        """Return the features and limits of the backend."""
