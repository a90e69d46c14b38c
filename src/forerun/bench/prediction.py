"""What a cost table says an arm should gain, beside what it gained.

The table is measured apart from the comparison, so the two can disagree: then either the table does
not hold here, or something besides drafting and verifying costs time.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from forerun.bench.summary import ArmSummary
from forerun.plan.costs import DraftCosts
from forerun.theory.intervals import Interval

__all__ = ["BenchPrediction", "predict"]


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPrediction:
    """What the cost table and the measured acceptance imply.

    Attributes:
        cycle_cost: kappa by the table, at the arm's K, batch and mean context.
        reading_cost: the draft's reading of the prompt, in plain steps per cycle; 0 where it is not
            known. It comes after the first token, so decoding pays for it.
        decode_speedup: measured tau over the two together; the interval is the table's alone.
    """

    cycle_cost: Interval
    reading_cost: float
    decode_speedup: Interval

    def to_dict(self) -> dict[str, object]:
        """As JSON wants it."""
        return asdict(self)


def predict(
    summary: ArmSummary, costs: DraftCosts, *, temperature: float, batch: int
) -> BenchPrediction | None:
    """Speedup of an arm from how much was accepted and what its cycles should cost.

    None where the table is too rough to bound kappa from below, and so the speedup from above.
    """
    table, context = costs.at(temperature), round(summary.mean_context)
    kappa = table.cycle_cost_interval(summary.arm.num_speculative_tokens, context, batch)
    if kappa.low <= 0:
        return None
    read_s = (
        0.0 if costs.reading is None else costs.reading.draft_more_s(round(summary.mean_prompt))
    )
    # Of a batch all prompts are read, and all its requests wait for that.
    per_cycle = batch * read_s / summary.decode_steps / table.plain_step_s(context, batch)
    tau = summary.acceptance_length
    return BenchPrediction(
        cycle_cost=kappa,
        reading_cost=per_cycle,
        decode_speedup=Interval(
            estimate=tau / (kappa.estimate + per_cycle),
            low=tau / (kappa.high + per_cycle),
            high=tau / (kappa.low + per_cycle),
        ),
    )
