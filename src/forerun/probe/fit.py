"""From measured cells to cost tables: what a drafted token adds, what a cycle takes anyway."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from forerun.probe.cells import Cell, Quantity, sizes
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine, Reading, interpolate
from forerun.theory.intervals import Interval
from forerun.theory.reading_cost import ReadingCost

__all__ = ["cost_table", "reading_cost", "straight_line"]

Estimates = Mapping[Cell, Interval]


def cost_table(found: Estimates, *, sampled: bool) -> CostTable:
    """The table of greedy or of sampled decoding.

    A plain step is measured whole at the shortest context; at others it grows as its pass does. Of
    a speculative step, what is beyond its passes measured alone (the engine's own work, and passes
    that are slower among it) follows a straight line over K. Its slope and that of the draft's
    chains are what a drafted token adds, the two intercepts what a cycle takes whatever its K.

    Args:
        found: estimates of every cell.
        sampled: at T=1 instead of T=0; every drafted token is then a draft pass of its own.
    """
    places = {(c.batch, c.context) for c in found if c.quantity is Quantity.TARGET_PASS}
    return CostTable(
        lines=tuple(cost_line(found, *place, sampled=sampled) for place in sorted(places))
    )


def cost_line(found: Estimates, batch: int, context: int, *, sampled: bool) -> CostLine:
    """One batch size and context."""
    quantity = Quantity.SAMPLED_STEP if sampled else Quantity.GREEDY_STEP
    (shortest,) = {cell.context for cell in found if cell.quantity is quantity}
    steps = readings(found, quantity, batch, shortest)
    passes = readings(found, Quantity.TARGET_PASS, batch, context)
    short_passes = readings(found, Quantity.TARGET_PASS, batch, shortest)
    plain = steps.pop(0)
    if context != shortest:
        plain = total(plain, passes[1], less(short_passes[1]))
    chain = drafting(found, batch, shortest, steps, sampled=sampled)
    beyond = {
        k: total(step, less(chain[k]), less(at_size(short_passes, k + 1)))
        for k, step in steps.items()
    }
    starts, slopes = zip(
        straight_line(drafting(found, batch, context, steps, sampled=sampled)),
        straight_line(beyond),
        strict=True,
    )
    draft, overhead = total(*slopes), total(*starts)
    return CostLine(
        batch=batch,
        context=context,
        rows=tuple(passes),
        verify_s=tuple(reading.s for reading in passes.values()),
        verify_error_s=tuple(reading.error_s for reading in passes.values()),
        plain_s=plain.s,
        plain_error_s=plain.error_s,
        draft_s=draft.s,
        draft_error_s=draft.error_s,
        overhead_s=overhead.s,
        overhead_error_s=overhead.error_s,
    )


def reading_cost(found: Estimates) -> ReadingCost | None:
    """What reading costs; None where it was measured at fewer than two sizes of both models."""
    target, draft = (
        {cell.size: interval.estimate for cell, interval in found.items() if cell.quantity is kind}
        for kind in (Quantity.TARGET_READ, Quantity.DRAFT_READ)
    )
    common = sorted(target.keys() & draft.keys())
    if len(common) < 2:
        return None
    return ReadingCost(
        tokens=tuple(common),
        target_s=tuple(target[size] for size in common),
        draft_s=tuple(draft[size] for size in common),
    )


def drafting(
    found: Estimates, batch: int, context: int, ks: Iterable[int], *, sampled: bool
) -> dict[int, Reading]:
    """Draft passes of a cycle by K, measured alone."""
    if sampled:
        one = readings(found, Quantity.DRAFT_PASS, batch, context)[1]
        return {k: one.times(k) for k in ks}
    chains = readings(found, Quantity.DRAFT_CHAIN, batch, context)
    return {k: chains[k] for k in ks}


def at_size(points: Mapping[int, Reading], size: int) -> Reading:
    """Between measured sizes on a straight line."""
    return interpolate(list(points), list(points.values()), size)


def readings(found: Estimates, quantity: Quantity, batch: int, context: int) -> dict[int, Reading]:
    """Estimates of one kind by size, ascending."""
    result = {}
    for size in sizes(found, quantity, batch, context):
        interval = found[Cell(quantity=quantity, batch=batch, context=context, size=size)]
        result[size] = Reading(interval.estimate, (interval.high - interval.low) / 2)
    return result


def total(*times: Reading) -> Reading:
    """Sum of independent times."""
    return Reading(
        s=math.fsum(reading.s for reading in times),
        error_s=math.hypot(*(reading.error_s for reading in times)),
    )


def less(time: Reading) -> Reading:
    """To be taken away; as uncertain as it was."""
    return Reading(-time.s, time.error_s)


def straight_line(points: Mapping[int, Reading]) -> tuple[Reading, Reading]:
    """Least squares through times by size; neither part is negative.

    A single point, or a line that would start below 0, goes through the origin; a falling one is
    flat. Where even the mean is below 0 there is nothing at all.

    Returns:
        What is there at size 0, and what each unit of size adds.
    """
    xs, times = list(points), list(points.values())
    if sum(reading.s for reading in times) < 0:
        return Reading(0.0, times[0].error_s), Reading(0.0)
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
