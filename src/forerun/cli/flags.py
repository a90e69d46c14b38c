"""Flags several commands share, generated from the dataclasses the library itself uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import UseAppendAction

from forerun.cli.paths import check_writable
from forerun.control.config import ControllerName
from forerun.engine.config import EngineConfig
from forerun.errors import InvalidRequest
from forerun.models.runner.config import Runner
from forerun.models.zoo.catalog import PREFIX
from forerun.sampling.config import SamplingParams, Verification

if TYPE_CHECKING:
    from forerun.trace.writer import TraceWriter

__all__ = [
    "ModelFlags",
    "OutputFlags",
    "PairFlags",
    "SamplingFlags",
    "TargetFlags",
    "TraceFlags",
]

ZOO_DRAFT = PREFIX + "code-2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingFlags(SamplingParams):
    """How tokens are chosen. Names and meanings are those of the OpenAI API and vLLM."""

    # Help comes from SamplingParams; types are narrowed here to what a shell can say.

    stop: UseAppendAction[tuple[str, ...]] = ()
    logit_bias: UseAppendAction[Mapping[int, float]] = field(default_factory=dict)
    verification: Verification = "auto"
    """Verifier; every one keeps the target's law. "auto": coupled with a seed, else block."""

    @property
    def params(self) -> SamplingParams:
        """The parameters these flags ask for."""
        values = {item.name: getattr(self, item.name) for item in fields(SamplingParams)}
        return SamplingParams(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFlags:
    """Which target, and how models run."""

    target: str = "zoo:code-11m"
    """Folder, hub name or zoo: name of the model whose text is wanted."""
    dtype: str = "auto"
    """auto (as stored), bfloat16, float16 or float32."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    runner: Runner = EngineConfig().runner
    """What carries the passes: native (CPU kernels), graphs (torch), eager (transformers); auto."""
    threads: int | None = None
    """Threads that carry the passes; by default as many as torch takes."""

    def meant(self, draft: str) -> str | None:
        """The draft that a name means; None for plain decoding."""
        if draft == "auto":
            return ZOO_DRAFT if self.target.startswith(PREFIX) else None
        return None if draft == "none" else draft


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlags(TargetFlags):
    """Which pair of models, and how they run."""

    draft: str = "auto"
    """Draft model; "auto" takes the shipped draft for a shipped target, "none" is none."""

    @property
    def draft_name(self) -> str | None:
        """The draft that is meant; None for none."""
        return self.meant(self.draft)


@dataclass(frozen=True, slots=True, kw_only=True)
class PairFlags(TargetFlags):
    """Which models, how they run, and how far one drafts for the other."""

    draft: UseAppendAction[tuple[str, ...]] = ()
    """Draft model: folder, hub name or zoo: name; or "suffix", which copies from the text itself;
    "self:N", the target's first N layers; "none", which decodes plainly.
    Default: the shipped draft for a shipped target.
    Given several times, the controller chooses between them, step by step."""
    k: int = EngineConfig().num_speculative_tokens
    """Most tokens drafted per step; 0 decodes plainly."""
    controller: ControllerName = "auto"
    """Who chooses how many. fixed: always K; heuristic and confidence: as transformers does;
    goodput: most expected tokens per second, needs --profile; bandit: by trial;
    auto: with --profile goodput, kept from being slower than plain decoding; without it fixed."""
    profile: UseAppendAction[tuple[Path, ...]] = ()
    """What drafting and verifying cost here, from `forerun profile`; one per draft model.
    "suffix" needs none: its drafts count as free."""

    @property
    def draft_names(self) -> tuple[str, ...]:
        """The drafts that are meant; none for plain decoding.

        Raises:
            InvalidRequest: one is given twice, there is none among several, or nobody would choose
                between them.
        """
        names = [self.meant(draft) for draft in self.draft or ("auto",)]
        found = tuple(name for name in names if name is not None)
        for name in found:
            if found.count(name) > 1:
                raise InvalidRequest(f"--draft {name} is given twice")
        if len(names) > 1:
            if len(found) < len(names):
                raise InvalidRequest("--draft none decodes plainly; leave the other drafts out")
            self._check_choice()
        return found

    def _check_choice(self) -> None:
        """Of several drafts, all but the first would silently do nothing under most controllers."""
        chooses = self.controller in ("goodput", "bandit")
        if not chooses and not (self.controller == "auto" and self.profile):
            raise InvalidRequest(
                f"several drafts need a controller that chooses between them, and {self.controller}"
                " takes the first; give --profile of every draft model, or --controller bandit"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputFlags:
    """What is shown, and where."""

    color: bool = False
    """Colour every token by where it came from; a legend goes to stderr."""
    json: bool = False
    """Print one JSON object (text, token_ids, finish_reason, figures) instead of streaming."""
    quiet: bool = False
    """No line of figures on stderr."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFlags:
    """Whether every step is kept, and where."""

    trace: Path | None = None
    """Write every step to FILE.jsonl, or into FILE.parquet, a folder of Parquet files."""
    trace_tokens: bool = False
    """Put token ids into the trace; without it a trace holds no text."""

    def check(self) -> None:
        """Refuse what would silently do nothing, and a file that cannot be written.

        Raises:
            InvalidRequest: tokens are wanted in no trace, or there can be none.
        """
        if self.trace_tokens and self.trace is None:
            raise InvalidRequest("--trace-tokens needs --trace FILE")
        if self.trace is None:
            return
        from forerun.trace.files import check_suffix

        check_suffix(self.trace)
        if self.trace.suffix == ".jsonl":
            check_writable("--trace", self.trace)

    @contextmanager
    def opened(self) -> Iterator[TraceWriter | None]:
        """The trace asked for, open for writing; None where none is."""
        if self.trace is None:
            yield None
            return
        from forerun.trace.files import open_trace

        with open_trace(self.trace) as writer:
            yield writer
