"""Correction of a profile's times by the times recorded in a trace.

A profile consists of short measurements, while a server runs for hours beside other work of its
machine and with real texts. The two can differ by more than two K do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from forerun.errors import InvalidTrace
from forerun.plan.costs import DraftCosts
from forerun.plan.simulation.times import Times
from forerun.theory.cost import CostTable
from forerun.theory.cost_line import CostLine
from forerun.theory.reading_cost import ReadingCost
from forerun.theory.record import StepRecord
from forerun.trace.schema import Item

PLAIN, CYCLE, READING = "plain", "cycle", "reading"


@dataclass(frozen=True, slots=True, kw_only=True)
class CostCorrection:
    """Factors that multiply the times of a profile.

    Attributes:
        plain: factor of plain steps.
        cycle: factor of speculative cycles and all their parts.
        reading: factor of passes over prompts.
    """

    plain: float = 1.0
    cycle: float = 1.0
    reading: float = 1.0


def correction_of(
    items: Iterable[Item], costs: DraftCosts, temperature: float, where: str
) -> CostCorrection:
    """Return the ratio of recorded to profiled time, over all cycles of each kind.

    Only cycles that do nothing but decode, or nothing but read prompts, are counted. A kind without
    a cycle gets the factor of all others together.

    Args:
        items: records of the trace.
        costs: costs of the profile.
        temperature: temperature at which the costs are read.
        where: name of the trace, for messages.

    Raises:
        InvalidTrace: there is no cycle that could be compared.
    """
    times = Times(costs.at(temperature), costs.reading)
    recorded = dict.fromkeys((PLAIN, CYCLE, READING), 0.0)
    expected = dict.fromkeys((PLAIN, CYCLE, READING), 0.0)
    found = cycles(items)
    for number, cycle in found.items():
        compared = comparison(cycle, found.get(number + 1, ()), times)
        if compared is not None:
            kind, expected_s, recorded_s = compared
            expected[kind] += expected_s
            recorded[kind] += recorded_s
    in_all = sum(expected.values())
    if not in_all:
        raise InvalidTrace(f"the trace {where} has no step whose time could be compared")
    overall = sum(recorded.values()) / in_all
    return CostCorrection(
        **{name: recorded[name] / s if s else overall for name, s in expected.items()}
    )


def cycles(items: Iterable[Item]) -> Mapping[int, list[StepRecord]]:
    """Group the records of a trace by cycle."""
    found: dict[int, list[StepRecord]] = {}
    for item in items:
        if isinstance(item, StepRecord):
            found.setdefault(item.cycle_id, []).append(item)
    return found


def comparison(
    cycle: Sequence[StepRecord], following: Sequence[StepRecord], times: Times
) -> tuple[str, float, float] | None:
    """Return a cycle's kind, expected time and recorded time; None if it is not comparable.

    A cycle that only decodes lasts until the next one begins, which it does at once where a request
    is in both.
    """
    one = cycle[0]
    decoding = [record for record in cycle if record.step > 1]
    if not decoding:
        return READING, times.reading.target_pass_s(one.num_prefill_rows), one.verify_s
    stays = {record.request_id for record in cycle} & {r.request_id for r in following}
    if one.num_prefill_rows or not stays:
        return None
    recorded_s = following[0].t_s - one.t_s
    place = times.at(len(decoding), sum(record.context_tokens for record in decoding))
    depths = [record.depth_drafted for record in decoding]
    if not any(depths):
        return PLAIN, place.plain_s, recorded_s
    if any(record.step == 2 for record in decoding):  # the draft reads the prompt
        return None
    levels = [sum(depth > level for depth in depths) for level in range(max(depths))]
    draft_s = sum(place.draft_s[num_drafting] for num_drafting in levels)
    return CYCLE, draft_s + place.pass_s(one.batch_rows) + place.overhead_s(max(depths)), recorded_s


def corrected(costs: DraftCosts, correction: CostCorrection) -> DraftCosts:
    """Return the costs with corrected times."""
    reading = costs.reading
    return DraftCosts(
        greedy=_scaled_table(costs.greedy, correction),
        sampled=_scaled_table(costs.sampled, correction),
        reading=None if reading is None else _scaled_reading(reading, correction.reading),
    )


def _scaled_table(table: CostTable, correction: CostCorrection) -> CostTable:
    return CostTable(lines=tuple(_scaled_line(line, correction) for line in table.lines))


def _scaled_line(line: CostLine, correction: CostCorrection) -> CostLine:
    """Return a line with corrected times; errors keep their relative size."""
    plain, cycle = correction.plain, correction.cycle
    return replace(
        line,
        verify_s=tuple(cycle * seconds for seconds in line.verify_s),
        verify_error_s=tuple(cycle * seconds for seconds in line.verify_error_s),
        plain_s=plain * line.plain_s,
        plain_error_s=plain * line.plain_error_s,
        draft_s=cycle * line.draft_s,
        draft_error_s=cycle * line.draft_error_s,
        overhead_s=tuple(cycle * seconds for seconds in line.overhead_s),
        overhead_error_s=tuple(cycle * seconds for seconds in line.overhead_error_s),
    )


def _scaled_reading(reading: ReadingCost, factor: float) -> ReadingCost:
    """Return reading costs whose times for both models are multiplied by one factor."""
    return replace(
        reading,
        target_s=tuple(factor * seconds for seconds in reading.target_s),
        draft_s=tuple(factor * seconds for seconds in reading.draft_s),
    )
