"""What acceptance depends on in a trace: domains, contexts, what came before, when it changed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from forerun.diagnose.drops import MIN_Z, is_drop
from forerun.diagnose.evidence import Evidence
from forerun.diagnose.readers.trace.totals import Hits, Seconds, TraceTotals, merged
from forerun.theory.record import RequestRecord

__all__ = ["add_contrasts"]

MIN_STEPS = 50
"""Fewer drafting steps on one side say nothing."""
AGAINST_TREND = 3.0
"""Standard errors asked for within requests, where dependence would rather show the opposite."""
MIN_CYCLES = 20
MAX_POINTS = 60
FORMATS = frozenset({"template", "format", "prompt_format", "system", "mode"})
"""Tags `key:value` of these keys say how a prompt was put, others what it is about."""


def add_contrasts(
    evidence: Evidence, totals: TraceTotals, requests: Sequence[RequestRecord], source: str
) -> None:
    """Facts that compare one part of a trace with another, and the series behind them."""
    hits = totals.hits
    previous = hits.get("previous", {})
    partial, none, full = (previous.get(name, Hits()) for name in ("partial", "none", "full"))
    # Acceptance clusters: text that was easy stays easy. So a step after some acceptance accepts
    # at least as much as one after less, unless the state it drafts from is wrong.
    less = pooled([none, partial])
    add_drop(evidence, "acceptance_falls_after_partial", none, partial, source, AGAINST_TREND)
    add_drop(evidence, "acceptance_falls_after_full", less, full, source, AGAINST_TREND)
    paused = hits.get("paused", {})
    again, settled = paused.get("again", Hits()), paused.get("settled", Hits())
    add_drop(evidence, "acceptance_falls_after_handoff", settled, again, source, AGAINST_TREND)
    add_ends(evidence, "acceptance_falls_with_context", hits.get("context", {}), source)
    add_ends(evidence, "acceptance_falls_with_generation", hits.get("index", {}), source)
    add_growth(evidence, totals.far, source)
    company = hits.get("company", {})
    alone, together = company.get("one", Hits()), company.get("several", Hits())
    add_drop(evidence, "acceptance_falls_with_batch", alone, together, source)
    add_tags(evidence, hits.get("request", {}), requests, source)
    add_temperatures(evidence, hits.get("request", {}), requests, source)
    add_change(evidence, totals.over_time, source)


def drop(high: Hits, low: Hits, min_z: float = MIN_Z) -> bool | None:
    """Whether alpha_1 is clearly lower on one side; None where too few steps tell."""
    if min(high.num_steps, low.num_steps) < MIN_STEPS:
        return None
    return is_drop((high.num_first, high.num_steps), (low.num_first, low.num_steps), min_z)


def add_drop(
    evidence: Evidence, name: str, high: Hits, low: Hits, source: str, min_z: float = MIN_Z
) -> None:
    """A contrast as a fact whose source names both sides."""
    found = drop(high, low, min_z)
    sides = f"alpha_1 {high.alpha_1:.2f} of {high.num_steps}, {low.alpha_1:.2f} of {low.num_steps}"
    evidence.add(name, found, f"{source}: {sides}")


def add_ends(evidence: Evidence, name: str, places: dict[str, Hits], source: str) -> None:
    """The long end against the short one, cut where both sides have most steps."""
    ordered = [places[key] for key in sorted(places, key=int)]
    best: tuple[int, Hits, Hits] | None = None
    for cut in range(1, len(ordered)):
        low, high = pooled(ordered[:cut]), pooled(ordered[cut:])
        size = min(low.num_steps, high.num_steps)
        if best is None or size > best[0]:
            best = (size, low, high)
    if best is not None:
        add_drop(evidence, name, best[1], best[2], source)


def add_growth(
    evidence: Evidence, cycles: dict[tuple[int, int, int], Seconds], source: str
) -> None:
    """How the pass grows from short contexts to long ones, among as many requests and rows."""
    found: list[tuple[int, float, str]] = []
    for pair in {(size, rows) for size, rows, _ in cycles}:
        places = sorted((place[2], total) for place, total in cycles.items() if place[:2] == pair)
        parts = [total for _, total in places]
        for at in range(1, len(parts)):
            low, high = merged(parts[:at]), merged(parts[at:])
            num = min(low.num_cycles, high.num_cycles)
            if num < MIN_CYCLES or low.verify_s <= 0.0:
                continue
            short_s, long_s = low.verify_s / low.num_cycles, high.verify_s / high.num_cycles
            words = f"a pass takes {short_s:.3g} s at short contexts, {long_s:.3g} s at long ones"
            found.append((num, long_s / short_s, words))
    if found:
        _, growth, words = max(found)
        evidence.add("context_growth", growth, f"{source}: {words}")


def add_tags(
    evidence: Evidence, by_request: dict[str, Hits], requests: Sequence[RequestRecord], source: str
) -> None:
    """Acceptance by tag; a request with several counts under each."""
    tags: dict[str, Hits] = {}
    for request in requests:
        hits = by_request.get(request.request_id, Hits())
        for tag in request.tags:
            tags.setdefault(tag, Hits()).add(hits.num_steps, hits.num_first, hits.num_accepted)
    known = {tag: hits for tag, hits in tags.items() if hits.num_steps >= MIN_STEPS}
    ordered = sorted(known.items(), key=lambda item: item[1].alpha_1)
    evidence.series["tag"] = tuple(
        (tag[:60], hits.alpha_1, float(hits.num_steps)) for tag, hits in ordered[:MAX_POINTS]
    )
    formats = [(tag, hits) for tag, hits in ordered if tag.partition(":")[0] in FORMATS]
    domains = [(tag, hits) for tag, hits in ordered if tag.partition(":")[0] not in FORMATS]
    for name, found in (
        ("acceptance_differs_by_template", formats),
        ("acceptance_differs_by_domain", domains),
    ):
        if len(found) > 1:
            (low_tag, low), (high_tag, high) = found[0], found[-1]
            sides = f"{high_tag[:60]} {high.alpha_1:.2f}, {low_tag[:60]} {low.alpha_1:.2f}"
            evidence.add(name, drop(high, low), f"{source}: alpha_1 of {sides}")


def add_temperatures(
    evidence: Evidence, by_request: dict[str, Hits], requests: Sequence[RequestRecord], source: str
) -> None:
    """Greedy requests against sampled ones, where a trace has both."""
    greedy, sampled = Hits(), Hits()
    for request in requests:
        hits = by_request.get(request.request_id, Hits())
        side = greedy if request.parameters.get("temperature") == 0 else sampled
        side.add(hits.num_steps, hits.num_first, hits.num_accepted)
    add_drop(evidence, "acceptance_falls_with_temperature", greedy, sampled, source)


def add_change(evidence: Evidence, points: Sequence[tuple[float, Hits]], source: str) -> None:
    """When acceptance changed most, and whether it dropped there."""
    ordered = sorted(points, key=lambda point: point[0])
    width = -(-len(ordered) // MAX_POINTS) if ordered else 1
    coarse = [
        (ordered[start][0], pooled(hits for _, hits in ordered[start : start + width]))
        for start in range(0, len(ordered), width)
    ]
    if not coarse:
        return
    evidence.series["time"] = tuple(
        (t_s - coarse[0][0], hits.alpha_1, float(hits.num_steps)) for t_s, hits in coarse
    )
    best: tuple[float, Hits, Hits] | None = None
    for cut in range(1, len(coarse)):
        before, after = (pooled(h for _, h in part) for part in (coarse[:cut], coarse[cut:]))
        weight = before.num_steps * after.num_steps
        score = (before.alpha_1 - after.alpha_1) * math.sqrt(weight)
        if best is None or score > best[0]:
            best = (score, before, after)
    # A trace that did not change within itself may all lie behind the change.
    if best is not None and drop(best[1], best[2]):
        add_drop(evidence, "acceptance_dropped", best[1], best[2], source)


def pooled(parts: Iterable[Hits]) -> Hits:
    """Several places together."""
    total = Hits()
    for part in parts:
        total.add(part.num_steps, part.num_first, part.num_accepted)
    return total
