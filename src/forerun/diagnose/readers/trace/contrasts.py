"""Compares acceptance within a trace by tag, context, previous outcome and time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from forerun.diagnose.evidence import Evidence
from forerun.diagnose.readers.trace.stretches import (
    OUTCOMES,
    PAUSES,
    Comparison,
    Mask,
    StretchCounts,
    Stretches,
    compare,
)
from forerun.diagnose.readers.trace.totals import PAUSING, Hits, Seconds, TraceTotals, merged
from forerun.theory.record import RequestRecord

__all__ = ["add_contrasts"]

LEAST = 0.1
"""Of the draft: a smaller difference explains no complaint."""
CHANCE = 0.03
"""Of seeing a difference that is not there, by each comparison."""
AGAINST_TREND = 0.05
"""Difference that matters where the opposite is to be expected; and chance of seeing it, which in
truth is much smaller there."""
MIN_STEPS = 50
"""Of a tag or of a slice of time, to be named at all."""
OTHER_TEXT = 0.4
"""Prompts of another length are other prompts: up to two fifths of acceptance are between them
where nothing is wrong."""
MIN_CYCLES = 20
MAX_POINTS = 60
MAX_TAGS = 500
"""Tags that are compared: those of the most requests."""
FORMATS = frozenset({"template", "format", "prompt_format", "system", "mode"})
"""Tags `key:value` of these keys say how a prompt was put, others what it is about."""


def add_contrasts(
    evidence: Evidence, totals: TraceTotals, requests: Sequence[RequestRecord], source: str
) -> None:
    """Add facts that compare parts of a trace, and the data series of their charts."""
    stretches = totals.stretches
    add_outcomes(evidence, stretches.by("previous"), source)
    if not PAUSING & totals.methods.keys():
        paused = stretches.by("paused")
        add_fall(evidence, "acceptance_falls_after_handoff", split(paused, *PAUSES), source)
    for name, key in (("context", "context"), ("generation", "index")):
        places = stretches.by(key)
        add_fall(evidence, f"acceptance_falls_with_{name}", ends(places), source, share=OTHER_TEXT)
    company = stretches.by("company")
    found = compare(company, company.place == 0, company.place == 1)
    add_fall(evidence, "acceptance_falls_with_batch", found, source)
    add_growth(evidence, totals.far, source)
    by_request = asked(stretches, requests)
    add_tags(evidence, stretches.by("all"), by_request, source)
    add_temperatures(evidence, stretches.by("all"), by_request, source)
    add_acceptance_over_time(evidence, totals, source)


def add_outcomes(evidence: Evidence, places: StretchCounts, source: str) -> None:
    """Compare acceptance by the outcome of the previous draft.

    Acceptance clusters: text that was easy stays easy. So a step after some acceptance accepts at
    least as much as one after less, unless the state it drafts from is wrong.
    """
    none, partial, full = (places.place == index for index in range(len(OUTCOMES)))
    for name, high, low in (("partial", none, partial), ("full", none | partial, full)):
        found = compare(places, high, low)
        fact = f"acceptance_falls_after_{name}"
        add_fall(evidence, fact, found, source, least=AGAINST_TREND, chance=AGAINST_TREND)


def split(places: StretchCounts, high: str, low: str) -> Comparison | None:
    """Compare acceptance between two groups of steps, selected by name."""
    return compare(places, places.place == PAUSES.index(high), places.place == PAUSES.index(low))


def add_fall(  # noqa: PLR0913 (keyword-only settings of a test)
    evidence: Evidence,
    name: str,
    found: Comparison | None,
    source: str,
    *,
    least: float = LEAST,
    share: float = 0.0,
    chance: float = CHANCE,
) -> None:
    """Add whether acceptance is lower in the second group of a comparison than in the first.

    Args:
        evidence: takes the fact.
        name: of it.
        found: None where there was too little to compare.
        source: name of the trace.
        least: difference that matters, as a share of the draft.
        share: the same as a share of the higher side.
        chance: of seeing a difference that is not there.
    """
    if found is None:
        return
    high, low = found.high, found.low
    answer = found.is_lower(max(least, share * high.mean), chance)
    sides = ", ".join(
        f"{side.num_first / side.num_steps:.2f} of {side.num_steps}" for side in (high, low)
    )
    words = f"alpha_1 {sides}; {found.difference:+.2f} of the draft, t = {found.t:.1f}"
    evidence.add_or_note(name, answer, f"{source}: {words}")


def ends(places: StretchCounts) -> Comparison | None:
    """Compare long contexts with short ones, divided so that both groups are large."""
    best: tuple[float, Mask] | None = None
    for cut in np.unique(places.place)[1:]:
        short: Mask = places.place < cut
        size = min(places.num_steps[short].sum(), places.num_steps[~short].sum())
        if best is None or size > best[0]:
            best = size, short
    return None if best is None else compare(places, best[1], ~best[1])


def add_growth(
    evidence: Evidence, cycles: dict[tuple[int, int, int], Seconds], source: str
) -> None:
    """Add how pass time grows from short to long contexts, at equal batch size and rows."""
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
        evidence.add_or_note("context_growth", growth, f"{source}: {words}")


def asked(
    stretches: Stretches, requests: Sequence[RequestRecord]
) -> tuple[RequestRecord | None, ...]:
    """Return the record of each stretch's request; None if the trace lacks it."""
    known = {request.request_id: request for request in requests}
    return tuple(known.get(name) for name in stretches.request_ids)


def add_tags(
    evidence: Evidence,
    places: StretchCounts,
    by_stretch: Sequence[RequestRecord | None],
    source: str,
) -> None:
    """Add acceptance by tag; a request with several tags counts under each."""
    tags: dict[str, list[int]] = {}
    for index, request in enumerate(by_stretch):
        for tag in () if request is None else request.tags:
            tags.setdefault(tag, []).append(index)
    common = sorted(tags.items(), key=lambda entry: -len(entry[1]))[:MAX_TAGS]
    known = {tag: np.isin(places.stretch, indices) for tag, indices in common}
    sides = [(tag, mask, *alpha_1(places, mask)) for tag, mask in known.items()]
    ordered = sorted((s for s in sides if s[3] >= MIN_STEPS), key=lambda side: side[2])
    evidence.series["tag"] = tuple((tag[:60], a, n) for tag, _, a, n in ordered[:MAX_POINTS])
    formats = [side for side in ordered if side[0].partition(":")[0] in FORMATS]
    domains = [side for side in ordered if side[0].partition(":")[0] not in FORMATS]
    for name, found in (
        ("acceptance_differs_by_template", formats),
        ("acceptance_differs_by_domain", domains),
    ):
        if len(found) > 1:
            low, high = found[0], found[-1]
            pairs = len(found) * (len(found) - 1)  # the best was looked for, and the worst
            words = f"{source}: {high[0][:60]} and {low[0][:60]}"
            comparison = compare(places, high[1], low[1])
            add_fall(evidence, name, comparison, words, chance=2.0 * CHANCE / pairs)


def alpha_1(places: StretchCounts, mask: Mask) -> tuple[float, float]:
    """Return acceptance at the first position, and the number of steps."""
    num_steps = float(places.num_steps[mask].sum())
    return float(places.num_first[mask].sum()) / max(1.0, num_steps), num_steps


def add_temperatures(
    evidence: Evidence,
    places: StretchCounts,
    by_stretch: Sequence[RequestRecord | None],
    source: str,
) -> None:
    """Compare greedy with sampled requests, if a trace contains both."""
    known = [i for i, request in enumerate(by_stretch) if request is not None]
    cold = [
        i
        for i, request in enumerate(by_stretch)
        if request is not None and request.parameters.get("temperature") == 0
    ]
    greedy = np.isin(places.stretch, cold)
    found = compare(places, greedy, np.isin(places.stretch, known) & ~greedy)
    add_fall(evidence, "acceptance_falls_with_temperature", found, source)


def add_acceptance_over_time(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add acceptance over time, and whether it dropped at some point."""
    ordered = sorted(totals.over_time, key=lambda point: point[0])
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
    best = sharpest(totals.stretches)
    # A trace that did not change within itself may all lie behind the change.
    if best is not None and best.is_lower(LEAST, CHANCE / NUM_CUTS):
        add_fall(evidence, "acceptance_dropped", best, source, chance=CHANCE / NUM_CUTS)


NUM_CUTS = 16
"""Moments at which acceptance may have dropped."""


def sharpest(stretches: Stretches) -> Comparison | None:
    """Return the most significant drop of acceptance over several candidate times."""
    places, starts_s = stretches.by("all"), np.array(stretches.starts_s)
    if not len(starts_s):
        return None
    found: list[Comparison] = []
    for moment in np.unique(np.quantile(starts_s, np.arange(1, NUM_CUTS + 1) / (NUM_CUTS + 1))):
        before: Mask = (starts_s < moment)[places.stretch]
        if (comparison := compare(places, before, ~before)) is not None:
            found.append(comparison)
    return max(found, key=lambda comparison: comparison.t, default=None)


def pooled(parts: Iterable[Hits]) -> Hits:
    """Merge the counts of several time slices."""
    total = Hits()
    for part in parts:
        total.add(part.num_steps, part.num_first)
    return total
