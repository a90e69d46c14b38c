"""Results of the enumeration, as values and as a table."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from rich.table import Table
from rich.text import Text

__all__ = ["BIAS_CAUGHT", "TOLERANCE", "ExactReport", "PlantedResult", "VerifierResult", "render"]

TOLERANCE = 1e-12
"""Largest total variation an exact verifier may show in fp64."""
BIAS_CAUGHT = 1e-6
"""Total variation from which a planted bug counts as caught: far above rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierResult:
    """Result of the enumeration for one verifier of the engine.

    Attributes:
        name: which.
        num_pairs: pairs of target and draft distributions enumerated.
        num_histories: possible histories summed over, all pairs together; steps for `coupled`.
        worst_tv: largest total variation to the target's joint distribution; for `coupled`, the
            share of steps that differ from plain decoding.
        detail: the property found missing, if one was.
    """

    name: str
    num_pairs: int
    num_histories: int
    worst_tv: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the verifier is exact."""
        return self.worst_tv <= TOLERANCE


@dataclass(frozen=True, slots=True, kw_only=True)
class PlantedResult:
    """Result of the enumeration for one deliberate bug.

    Attributes:
        name: which.
        num_pairs: pairs of distributions it was tried on.
        worst_tv: largest total variation it caused.
    """

    name: str
    num_pairs: int
    worst_tv: float

    @property
    def caught(self) -> bool:
        """Whether the enumeration detects the bug."""
        return self.worst_tv > BIAS_CAUGHT


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactReport:
    """Results of `run_enumeration`.

    Attributes:
        seed: of the random pairs.
        verifiers: results for the engine's own verifiers.
        planted: results for planted bugs.
    """

    seed: int
    verifiers: tuple[VerifierResult, ...]
    planted: tuple[PlantedResult, ...]

    @property
    def ok(self) -> bool:
        """Whether every verifier is exact and every deliberate bug was detected."""
        return all(v.ok for v in self.verifiers) and all(p.caught for p in self.planted)

    def to_dict(self) -> dict[str, object]:
        """Return the report as JSON-compatible values."""
        return {
            "seed": self.seed,
            "tolerance": TOLERANCE,
            "ok": self.ok,
            "verifiers": [asdict(v) | {"ok": v.ok} for v in self.verifiers],
            "planted": [asdict(p) | {"caught": p.caught} for p in self.planted],
        }


def render(report: ExactReport) -> Table:
    """Render the report as a table for a terminal."""
    table = Table(title="Total variation between emitted text and the target, two steps, fp64")
    table.add_column("verifier or planted bug")
    for heading in ("pairs", "histories", "worst TV"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for found in report.verifiers:
        verdict = "exact" if found.ok else f"NOT EXACT {found.detail}".rstrip()
        table.add_row(
            found.name,
            f"{found.num_pairs:,}",
            f"{found.num_histories:,}",
            f"{found.worst_tv:.1e}",
            Text(verdict, style="green" if found.ok else "bold red"),
        )
    table.add_section()
    for bug in report.planted:
        table.add_row(
            f"planted: {bug.name}",
            f"{bug.num_pairs:,}",
            "",
            f"{bug.worst_tv:.1e}",
            Text("caught" if bug.caught else "MISSED", style="green" if bug.caught else "bold red"),
        )
    return table
