"""What a demonstration found, ready for JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from forerun.bench.config import DemoConfig
from forerun.bench.exactness import ExactnessReport
from forerun.bench.summary import ArmSummary
from forerun.bench.verdict import verdict
from forerun.provenance import Provenance

__all__ = ["DemoReport"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoReport:
    """What the demonstration found.

    Attributes:
        rows: arms at T=0; the first is plain decoding.
        sampled_rows: plain and domain draft at T=1, empty where time ran out.
        exactness: None where the run was interrupted before.
        provenance: of every figure.
        config: what was compared.
        num_calibration: prompts that chose K.
    """

    rows: tuple[ArmSummary, ...]
    sampled_rows: tuple[ArmSummary, ...]
    exactness: ExactnessReport | None
    provenance: Provenance
    config: DemoConfig
    num_calibration: int

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        return {
            "rows": [as_row(summary) for summary in self.rows],
            "sampled_rows": [as_row(summary) for summary in self.sampled_rows],
            "exactness": self.exactness.to_dict() if self.exactness else None,
            "provenance": self.provenance.to_dict(),
            "config": asdict(self.config) | {"num_calibrated": self.num_calibration},
        }


def as_row(summary: ArmSummary) -> dict[str, object]:
    """One row of the table as JSON wants it."""
    return summary.to_dict() | {"verdict": verdict(summary)}
