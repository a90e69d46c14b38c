"""Settings of an engine; torch-free, so that the command line can read them cheaply."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.errors import InvalidRequest
from forerun.models.runner.config import RUNNERS, Runner

__all__ = ["EngineConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs; what a request wants is in SamplingParams.

    Attributes:
        num_speculative_tokens: K, most tokens drafted per step (0: plain decoding).
        max_batch: sequences decoded at once; more wait.
        max_context: prompt plus output tokens a sequence may have, cut to what the model allows; KV
            memory grows with max_batch x max_context.
        prefill_chunk: most prompt tokens of one sequence fed in one pass.
        max_step_rows: most rows of one target pass over all sequences.
        runner: what carries the passes of target and draft; "auto" for the fastest there is.
        num_threads: of the native CPU runner, whose threads all models of a process share; None: as
            many as torch uses. torch itself is set to one thread beside it.
    """

    num_speculative_tokens: int = 4
    max_batch: int = 8
    max_context: int = 4096
    prefill_chunk: int = 256
    max_step_rows: int = 1024
    runner: Runner = "auto"
    num_threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse values that cannot work, by name."""
        if self.num_speculative_tokens < 0:
            raise InvalidRequest(
                f"num_speculative_tokens is {self.num_speculative_tokens}; it must be 0 or more"
            )
        for name in ("max_batch", "prefill_chunk", "max_step_rows"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.runner not in RUNNERS:
            raise InvalidRequest(f"runner {self.runner!r} is unknown; use {', '.join(RUNNERS)}")
        if self.num_threads is not None and self.num_threads < 1:
            raise InvalidRequest(f"num_threads is {self.num_threads}; it must be at least 1")
        if self.max_context < 2:
            raise InvalidRequest(f"max_context is {self.max_context}; it must be at least 2")
        if self.max_step_rows < self.max_batch * (self.num_speculative_tokens + 1):
            raise InvalidRequest(
                f"max_step_rows is {self.max_step_rows}, below max_batch x (K + 1) = "
                f"{self.max_batch * (self.num_speculative_tokens + 1)}; raise it or lower K"
            )
