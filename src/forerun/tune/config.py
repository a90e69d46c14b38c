"""Settings of `forerun tune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from forerun.doctor.audit.config import AuditConfig
from forerun.errors import Range, check_ranges
from forerun.tune.arms import Load

RANGES = (
    Range("max_tokens", 16, 4096, integer=True),
    Range("minutes", 0, above_low=True),
    Range("audit_tokens", 0, integer=True),
    Range("ready_s", 1),
    Range("hang_s", 1),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneConfig:
    """Settings of one run.

    Attributes:
        loads: each has a fastest setting of its own.
        max_tokens: longest answer of a measured request.
        minutes: of the run, servers' starts, confirmation and audit included.
        audit_tokens: output tokens of the audit of every setting that would be recommended; 0
            recommends without one, and says so.
        one_at_a_time: whether at most one server runs; None decides by the memory of the first.
        ready_s: seconds after which a server that answers nothing is given up.
        hang_s: seconds without an event after which a server counts as hung; fewer near the end.
        prompts: file or folder of prompts; None takes the shipped ones.
        acceptance_length: tokens per step that drafts have by chance; None: as they are accepted.
            With it texts are wrong, and nothing is recommended.

    Raises:
        InvalidRequest: a value is out of range, or the tokens of the audit can never suffice.
    """

    loads: tuple[Load, ...] = (Load(),)
    max_tokens: int = 128
    minutes: float = 30.0
    audit_tokens: int = 4000
    one_at_a_time: bool | None = None
    ready_s: float = 600.0
    hang_s: float = 120.0
    prompts: Path | None = None
    acceptance_length: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, *RANGES)
        if self.audit_tokens:
            AuditConfig(max_tokens=self.audit_tokens).check_enough("--audit-tokens")
        if self.acceptance_length is not None:
            Range("acceptance_length", 1, 100).check(self.acceptance_length)
