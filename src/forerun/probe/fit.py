"""From measured cells to cost tables: what a drafted token adds, what a cycle takes anyway."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from forerun.probe.cells import Cell, Quantity, sizes
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine, Reading
from forerun.theory.intervals import Interval

__all__ = ["cost_table", "straight_line"]

Estimates = Mapping[Cell, Interval]


def cost_table(found: Estimates, *, sampled: bool) -> CostTable:
    """The table of greedy or of sampled decoding.

    A plain step is a target pass of one row and the overhead of a plain step. A drafted token adds
    the slope of the draft's chains over their length (sampled: one draft pass) and the slope of the
    speculative overhead over K; the two intercepts are what a cycle takes whatever its K.

    Args:
        found: estimates of every cell.
        sampled: at T=1 instead of T=0.
    """
    passes = [cell for cell in found if cell.quantity is Quantity.TARGET_PASS]
    places = sorted({(cell.batch, cell.context) for cell in passes})
    return CostTable(lines=tuple(cost_line(found, *place, sampled=sampled) for place in places))


def cost_line(found: Estimates, batch: int, context: int, *, sampled: bool) -> CostLine:
    """One batch size and context."""
    quantity = Quantity.SAMPLED_OVERHEAD if sampled else Quantity.GREEDY_OVERHEAD
    # The engine's own work hardly depends on the context; it is measured at one.
    (steps_context,) = {c.context for c in found if c.quantity is quantity}
    by_k = readings(found, quantity, batch, steps_context)
    by_rows = readings(found, Quantity.TARGET_PASS, batch, context)
    plain = total(by_rows[1], by_k.pop(0))
    if sampled:
        chain_start, chain_token = (
            Reading(0.0),
            readings(found, Quantity.DRAFT_PASS, batch, context)[1],
        )
    else:
        chain_start, chain_token = straight_line(
            readings(found, Quantity.DRAFT_CHAIN, batch, context)
        )
    around_start, around_token = straight_line(by_k)
    draft, overhead = total(chain_token, around_token), total(chain_start, around_start)
    return CostLine(
        batch=batch,
        context=context,
        rows=tuple(by_rows),
        verify_s=tuple(reading.s for reading in by_rows.values()),
        verify_error_s=tuple(reading.error_s for reading in by_rows.values()),
        plain_s=plain.s,
        plain_error_s=plain.error_s,
        draft_s=draft.s,
        draft_error_s=draft.error_s,
        overhead_s=overhead.s,
        overhead_error_s=overhead.error_s,
    )


def readings(found: Estimates, quantity: Quantity, batch: int, context: int) -> dict[int, Reading]:
    """Estimates of one kind by size, ascending."""
    result = {}
    for size in sizes(found, quantity, batch, context):
        interval = found[Cell(quantity=quantity, batch=batch, context=context, size=size)]
        result[size] = Reading(interval.estimate, (interval.high - interval.low) / 2)
    return result


def total(one: Reading, other: Reading) -> Reading:
    """Sum of two independent times."""
    return Reading(one.s + other.s, math.hypot(one.error_s, other.error_s))


def straight_line(points: Mapping[int, Reading]) -> tuple[Reading, Reading]:
    """Least squares through times by size; neither part is negative.

    A single point, or a line that would start below 0, goes through the origin; a falling one is
    flat.

    Returns:
        What is there at size 0, and what each unit of size adds.
    """
    xs, times = list(points), list(points.values())
    middle = sum(xs) / len(xs)
    spread = sum((x - middle) ** 2 for x in xs)
    if not spread:
        return through_origin(xs, times)
    slope_weights = [(x - middle) / spread for x in xs]
    start_weights = [1 / len(xs) - middle * weight for weight in slope_weights]
    slope, start = combined(slope_weights, times), combined(start_weights, times)
    if slope.s < 0:
        return combined([1 / len(xs)] * len(xs), times), Reading(0.0, slope.error_s)
    if start.s < 0:
        return through_origin(xs, times)
    return start, slope


def through_origin(xs: Sequence[int], times: Sequence[Reading]) -> tuple[Reading, Reading]:
    """The line without a start."""
    square = sum(x * x for x in xs)
    return Reading(0.0), combined([x / square for x in xs], times)


def combined(weights: Sequence[float], times: Sequence[Reading]) -> Reading:
    """A weighted sum of independent times."""
    return Reading(
        s=math.fsum(w * reading.s for w, reading in zip(weights, times, strict=True)),
        error_s=math.hypot(*(w * r.error_s for w, r in zip(weights, times, strict=True))),
    )
