"""What a cost table says an arm should gain, beside what it gained.

The table is measured apart from the comparison, so the two can disagree: then either the table does
not hold here, or something besides drafting and verifying costs time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from forerun.bench.summary import ArmSummary
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval

__all__ = ["Prediction", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What the cost table and the measured acceptance imply.

    Attributes:
        cycle_cost: kappa by the table, at the arm's K, batch and mean context.
        decode_speedup: measured tau over that kappa; the interval is the table's alone.
    """

    cycle_cost: Interval
    decode_speedup: Interval

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        return asdict(self)


def predict(summary: ArmSummary, table: CostTable, batch: int) -> Prediction | None:
    """Speedup of an arm from how much was accepted and what its cycles should cost.

    None where the table is too rough to bound kappa from below, and so the speedup from above.
    """
    kappa = table.cycle_cost_interval(
        summary.arm.num_speculative_tokens, round(summary.mean_context), batch
    )
    if kappa.low <= 0:
        return None
    tau = summary.acceptance_length
    return Prediction(
        cycle_cost=kappa,
        decode_speedup=Interval(
            estimate=tau / kappa.estimate, low=tau / kappa.high, high=tau / kappa.low
        ),
    )
