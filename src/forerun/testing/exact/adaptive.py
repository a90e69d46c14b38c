"""Two enumerated steps with a real controller, which decides the K of the second."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.control.base import Capacity, RequestState
from forerun.control.goodput import GoodputController
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine
from forerun.theory.record import StepRecord

__all__ = ["goodput_k"]

MAX_K = 3
STATE = RequestState(request_id="r", num_committed=3, max_new=9, temperature=1.0)
CAPACITY = Capacity(max_rows=64)


@dataclass(frozen=True, slots=True)
class Cheap:
    """Cost tables for which neither the smallest nor the largest K is best."""

    def at(self, temperature: float) -> CostTable:
        """Return a table in which a row and a draft token cost a quarter of a step."""
        line = CostLine(rows=(1, 4), verify_s=(1.0, 1.3), plain_s=1.0, draft_s=0.15)
        return CostTable(lines=(line,))


def goodput_k(num_drafts: int, num_accepted: int) -> int:
    """Return the K a controller plans after a first step, at least 1."""
    controller = GoodputController({"draft_model": Cheap()}, MAX_K)
    controller.decide([STATE], CAPACITY)
    controller.observe([outcome(num_drafts, num_accepted)])
    (plan,) = controller.decide([STATE], CAPACITY)
    return max(1, plan.num_speculative_tokens)


def outcome(num_drafts: int, num_accepted: int) -> StepRecord:
    """Return the record of the first step."""
    return StepRecord(
        cycle_id=0,
        t_s=0.0,
        request_id=STATE.request_id,
        step=0,
        method="draft_model",
        k_budget=num_drafts,
        num_drafted=num_drafts,
        depth_drafted=num_drafts,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1,
        draft_s=0.15 * num_drafts,
        verify_s=1.0 + 0.1 * num_drafts,
        other_s=0.0,
        batch_rows=num_drafts + 1,
        num_prefill_rows=0,
        context_tokens=STATE.num_committed,
        last_token_source="bonus" if num_accepted == num_drafts else "recovered",
        expected_accepted=0.0,
    )
