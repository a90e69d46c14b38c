"""Converts a forerun trace to evidence: counts, costs, shares and comparisons of its parts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

import numpy as np
from scipy.special import bdtr, betaln, pdtrc

from forerun.doctor.evidence import (
    AS_FAST,
    MAX_WORD,
    SLOWER,
    Evidence,
    EvidenceCheck,
    Reading,
    is_limit,
    load_table,
)
from forerun.doctor.readers.trace_totals import (
    AFTER_PAUSE,
    ALIKE_DRAFTS,
    MIN_STRETCHES,
    NO_FALL,
    NO_RECENT_PAUSE,
    NUMBERED,
    OUTCOMES,
    PAUSING,
    Comparison,
    StretchCounts,
    Stretches,
    TraceTotals,
    compare,
    ends,
    read_totals,
)
from forerun.terminal_text import write_count
from forerun.theory.acceptance import AcceptanceCounts, ngrams
from forerun.theory.figures import (
    DURATIONS,
    MIN_PLAIN_STEPS,
    Seconds,
    estimate_ratio,
    merge_seconds,
)
from forerun.theory.intervals import (
    Interval,
    find_fall,
    normal_interval,
    student_tail,
    wilson_interval,
)
from forerun.theory.record import RequestRecord, TraceHeader
from forerun.trace.columns import Mask, Reals

MIN_PAIRS = 50
"""Pairs of steps of a request from which changes of K are told; probes change it in short runs."""
MIN_CHANGES = 0.2
"""Least share of steps with another K than the step before; probes change K less often."""
MIN_RISES = 0.03
"""Least share of steps with a larger K than the step before for K to count as adaptive."""


def _add_figures(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add facts that are figures, and the data series of the charts."""
    counts = totals.acceptance
    evidence.note("num_steps", totals.num_steps, source)
    evidence.note("num_drafts", counts.num_steps, source)
    evidence.note("num_drafted", counts.num_drafted, source)
    evidence.note("num_accepted", counts.num_accepted, source)
    if counts.num_steps:
        _add_counts(evidence, totals, counts, source)
    _add_costs(evidence, totals, source)
    _add_shares(evidence, totals, source)
    _add_requests(evidence, totals.requests, source)


def _add_counts(
    evidence: Evidence, totals: TraceTotals, counts: AcceptanceCounts, source: str
) -> None:
    evidence.note("k", totals.ks.most_common(1)[0][0], source)
    by_k = sorted(totals.ks.items())
    evidence.series["K"] = tuple((float(k), float(n), float(n)) for k, n in by_k)
    depth = sum(depth * num for (depth, _), num in counts.steps.items()) / counts.num_steps
    if (nodes := counts.num_drafted / counts.num_steps) > depth:
        evidence.note("tree_nodes", nodes, source)
        evidence.note("mean_drafted", depth, f"{source}: depth of trees")
    evidence.note("num_emitted", counts.num_emitted, source)
    evidence.note("accepted_per_position", counts.accepted_per_position, source)
    evidence.note("drafted_per_position", counts.drafted_per_position, source)
    evidence.note("conditional_acceptance_per_position", counts.conditional_acceptance, source)
    evidence.note("alpha_1", *_alpha_1_of(totals))
    if is_limit(evidence):
        full = sum(n for (depth, accepted), n in counts.steps.items() if depth == accepted)
        evidence.note("full_accept_share", full / counts.num_steps, source)
    if (expected := totals.expected_accepted) > 0.0:
        ratio = counts.num_accepted / expected
        interval = normal_interval(ratio, math.sqrt(totals.squares) / expected)
        evidence.note("expected_accepted", expected, source)
        evidence.note("calibration", ratio, source, interval)
    overlap, num_known = totals.overlap
    reached = sum(counts.reached_per_position)
    if num_known and overlap > 0.0:
        found = counts.num_accepted / reached / (overlap / num_known)
        evidence.note("accept_rule_ratio", found, source)


ONE_TEXT = 0.2
"""Difference of acceptance that two texts may have; an interval from few is at least as wide."""


def _alpha_1_of(totals: TraceTotals) -> tuple[float, str, Interval]:
    """Return acceptance at position 1 with its interval between texts, whose steps are alike."""
    places = totals.stretches.by("all")
    first, steps = places.num_first.tolist(), places.num_steps.tolist()
    found = estimate_ratio(first, steps, (0.0, 1.0))
    if found is None or len(steps) < MIN_STRETCHES:
        found = wilson_interval(int(sum(first)), int(sum(steps)))
        low, high = found.estimate - ONE_TEXT, found.estimate + ONE_TEXT
        found = replace(
            found, low=max(0.0, min(found.low, low)), high=min(1.0, max(found.high, high))
        )
    return found.estimate, "accepted at position 1 / drafts, error between texts", found


def _add_costs(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add times of drafting and plain steps, at the same number of requests in a cycle."""
    drafting, plain_step_s = totals.cycles.by_size("drafting"), totals.cycles.plain_step_s
    if not drafting:
        return
    compared = {size: total for size, total in drafting.items() if size in plain_step_s}
    used = merge_seconds((compared or drafting).values())
    if not used.num_cycles or used.total_s <= 0.0:
        return
    evidence.note("cycle_s", used.total_s / used.num_cycles, source)
    for name in DURATIONS:
        evidence.note(name, getattr(used, name) / used.num_cycles, source)
    evidence.note("batch", used.num_steps / used.num_cycles, source)
    if compared:
        plain_s = sum(plain_step_s[size] * total.num_cycles for size, total in compared.items())
        evidence.note("plain_step_s", plain_s / used.num_cycles, source)
        if (speedup := totals.cycles.compare().speedup) is not None:
            said = f"{source}: all decode steps, plain ones included"
            evidence.note("speedup", speedup.estimate, said, speedup)
        _add_batch(evidence, compared, plain_step_s, source)
        _add_verify_curve(evidence, totals, plain_step_s, source)


MIN_CYCLES = 20
COSTLIER, AS_COSTLY = 1.3, 1.1
"""Growth of kappa with the batch: reported from the first value on, denied up to the second."""
FAR = 2.0
"""Least ratio of two batch sizes that are compared."""


def _add_batch(
    evidence: Evidence, drafting: dict[int, Seconds], plain_step_s: dict[int, float], source: str
) -> None:
    few, many = min(plain_step_s), max(plain_step_s)
    if many >= FAR * few:
        growth = (plain_step_s[many] / plain_step_s[few] - 1.0) / (many / few - 1.0)
        evidence.note("batch_linearity", max(0.0, growth), f"{source}: {few} and {many} sequences")
    kappas = {
        size: total.total_s / total.num_cycles / plain_step_s[size]
        for size, total in sorted(drafting.items())
        if total.num_cycles >= MIN_CYCLES
    }
    few, many = min(kappas, default=0), max(kappas, default=0)
    if few and many >= FAR * few:
        ratio = kappas[many] / kappas[few]
        answer = True if ratio >= COSTLIER else False if ratio <= AS_COSTLY else None
        words = f"kappa {kappas[few]:.2f} for {few}, {kappas[many]:.2f} for {many}"
        evidence.note("slower_with_batch", answer, f"{source}: {words}")


def _add_verify_curve(
    evidence: Evidence, totals: TraceTotals, plain_step_s: dict[int, float], source: str
) -> None:
    """Add pass times by number of rows, at the batch size with the most cycles."""
    sizes: Counter[int] = Counter()
    for (size, _), total in totals.rows.items():
        if size in plain_step_s:
            sizes[size] += total.num_cycles
    ((size, _),) = sizes.most_common(1)
    curve = [
        (float(rows), total.verify_s / total.num_cycles / plain_step_s[size])
        for (s, rows), total in sorted(totals.rows.items())
        if s == size and total.num_cycles >= MIN_PLAIN_STEPS
    ]
    if len(curve) > 1:
        evidence.note("verify_rows", [rows for rows, _ in curve], source)
        evidence.note("verify_costs", [cost for _, cost in curve], source)


def _add_shares(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    prefill = merge_seconds(totals.cycles.by_size("prefill").values())
    everything_s = totals.cycles.total.total_s
    if everything_s > 0.0:
        evidence.note("prefill_share", prefill.total_s / everything_s, source)
        decode_s = everything_s - prefill.total_s
        if decode_s > 0.0:
            decoded = totals.num_tokens - prefill.num_steps
            evidence.note("tokens_per_s", max(0, decoded) / decode_s, source)
    steps = sum(totals.request_steps[name] for name in totals.drafting_steps)
    if steps:
        drafted = totals.drafting_steps.total()
        evidence.note("k0_share", max(0.0, 1.0 - drafted / steps), source)
    if totals.num_pairs >= MIN_PAIRS:
        evidence.note("k_change_share", totals.num_k_changes / totals.num_pairs, source)
        _add_swing(evidence, totals, source)
    if graphs := totals.graph_hits.total():
        evidence.note("graph_hit_share", totals.graph_hits[True] / graphs, source)


def _add_swing(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    if PAUSING & totals.methods.keys() or not totals.methods:
        return
    moved, of = totals.k_swing
    if of:
        swing = moved / of if totals.num_k_changes >= MIN_CHANGES * totals.num_pairs else 0.0
        evidence.note("k_swing", swing, f"{source}: mean change of K over mean K")
    rises = totals.num_k_rises / totals.num_pairs
    if rises > MIN_RISES:
        evidence.note("adaptive_k", True, f"{source}: K rises in {rises:.0%} of the steps")


def _add_requests(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    if not requests:
        return
    evidence.note("num_prompt_tokens", fmean(r.num_prompt_tokens for r in requests), source)
    evidence.note("num_output_tokens", fmean(r.num_output_tokens for r in requests), source)
    if ttft := [request.ttft_s for request in requests if request.ttft_s is not None]:
        evidence.note("ttft_s", median(ttft), source)
    for name in ("temperature", "top_k", "top_p"):
        asked = {request.parameters.get(name) for request in requests}
        value = asked.pop() if len(asked) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            evidence.note(name, value, source)


LEAST = 0.1
"""Least difference of the accepted share of a draft that is reported."""
AGAINST_TREND = 0.05
"""The same where the opposite is to be expected."""
MIN_STEPS = 50
"""Least number of steps of a tag, or of a slice of time, that is shown."""
OTHER_TEXT = 0.4
"""Least relative difference between contexts of different length: their prompts differ too, which
changes acceptance by up to two fifths in healthy runs."""
MAX_POINTS = 60
MAX_COMPARED_TAGS = 500
"""Most tags that are compared; those of the most requests are taken."""
FORMATS = frozenset({"template", "format", "prompt_format", "system", "mode"})
"""Keys of tags `key:value` that describe the form of a prompt; other tags describe its topic."""


LARGE_EXCESS, NO_EXCESS = 0.04, 0.02
"""Relative difference to the expected tokens: reported from the first value on, denied up to the
second."""


def _run_checks(totals: TraceTotals, evidence: Evidence) -> Iterator[EvidenceCheck]:
    """Make all tests of a trace, which share one error level."""
    yield from _check_rule(totals)
    yield from _check_speed(totals)
    stretches = totals.stretches
    yield from _check_outcomes(stretches.by("previous"))
    if not PAUSING & totals.methods.keys():
        paused = stretches.by("paused")
        found = compare(paused, paused.place == NO_RECENT_PAUSE, paused.place == AFTER_PAUSE)
        yield from _check_fall("acceptance_falls_after_handoff", found)
    for name, key in (("context", "context"), ("generation", "index")):
        found = ends(stretches.by(key))
        yield from _check_fall(f"acceptance_falls_with_{name}", found, share=OTHER_TEXT)
    company = stretches.by("company")
    found = compare(company, company.place == 0, company.place == 1)
    yield from _check_fall("acceptance_falls_with_batch", found)
    known = {request.request_id: request for request in totals.requests}
    by_stretch = [known.get(name) for name in stretches.request_ids]
    yield from _check_tags(evidence, stretches.by("all"), by_stretch)
    yield from _check_temperatures(stretches.by("all"), by_stretch)
    if not PAUSING & totals.methods.keys():
        yield from _check_requests(stretches)
    if totals.over_time:
        yield from _check_time(totals)


def _check_rule(totals: TraceTotals) -> Iterator[EvidenceCheck]:
    """Test whether more, or less, is accepted than the verifier's rule gives.

    The p-value is one over an e-value: it holds for any number of steps and any dependence.
    """
    if (expected := totals.expected_accepted) <= 0.0:
        return
    excess = totals.acceptance.num_accepted / expected - 1.0
    for name, sign, value in zip(
        ("above", "below"), (1.0, -1.0), totals.excess.values, strict=True
    ):
        yield EvidenceCheck(
            name=f"acceptance_{name}_expected",
            p_value=min(1.0, 1.0 / value),
            is_large=sign * excess >= LARGE_EXCESS,
            is_absent=sign * excess <= NO_EXCESS,
            words=f"{totals.acceptance.num_accepted} accepted, {expected:.1f} expected",
        )


def _check_speed(totals: TraceTotals) -> Iterator[EvidenceCheck]:
    """Test whether all decode steps together are slower than plain ones."""
    found = totals.cycles.compare()
    if (speedup := found.speedup) is not None:
        t = (SLOWER / speedup.estimate - 1.0) / max(1e-9, found.relative_error)
        yield EvidenceCheck(
            name="slower_than_plain",
            p_value=student_tail(t, found.freedom),
            is_large=speedup.estimate < SLOWER,
            is_absent=speedup.estimate >= AS_FAST,
            words=f"speedup {speedup.show()}",
        )


def _check_outcomes(places: StretchCounts) -> Iterator[EvidenceCheck]:
    """Compare acceptance by the outcome of the previous draft.

    Consecutive steps of a text are alike, so after a step with more accepted tokens acceptance is
    at least as high as after one with fewer, unless the draft's state is wrong.
    """
    none, partial, full = (places.place == index for index in range(len(OUTCOMES)))
    for name, high, low in (("partial", none, partial), ("full", none | partial, full)):
        found = compare(places, high, low)
        yield from _check_fall(f"acceptance_falls_after_{name}", found, least=AGAINST_TREND)


def _check_fall(
    name: str,
    found: Comparison | None,
    *,
    least: float = LEAST,
    share: float = 0.0,
    num_tried: float = 1.0,
    words: str = "",
) -> Iterator[EvidenceCheck]:
    """Test whether acceptance is lower in the second group of a comparison than in the first.

    Args:
        num_tried: comparisons of which this one was chosen.
    """
    if found is None:
        return
    high, low = found.high, found.low
    sides = ", ".join(
        f"{side.num_first / side.num_steps:.2f} of {side.num_steps}" for side in (high, low)
    )
    yield EvidenceCheck(
        name=name,
        p_value=min(1.0, num_tried * found.p_value),
        is_large=found.difference >= max(least, share * high.mean),
        is_absent=found.difference + 2.0 * found.error < NO_FALL,
        words=f"{words}alpha_1 {sides}; {found.difference:+.2f} of the draft, t = {found.t:.1f}",
    )


NO_GROWTH, MIN_GROWTH = 1.15, 1.6
"""Growth of a pass from short to long contexts, if that of plain steps is not known: up to the
first it is none, from the second on it is reported. Attention takes longer there without drafts,
too."""
FAR_SPLIT = 18
"""Twice the logarithm of a context of 512 tokens: no pass over less takes longer for it."""
Cycles = Mapping[tuple[int, ...], Seconds]
"""Durations by number of requests, rows per request, and logarithm of the context."""


def _add_growth(evidence: Evidence, cycles: Cycles, source: str) -> None:
    """Add how pass time grows with context beyond that of plain steps, at equal size and rows."""
    found: list[tuple[int, float, str]] = []
    for size, rows in {place[:2] for place in cycles if place[1] > 1}:
        for split in {place[2] for place in cycles if place[:2] == (size, rows)}:
            drafting = _growth(cycles, (size, rows), split)
            plain = _growth(cycles, (size, 1), split)
            if drafting is None:
                continue
            num, growth = drafting
            is_short = split < FAR_SPLIT
            if plain is None and growth > NO_GROWTH and (is_short or growth < MIN_GROWTH):
                continue
            words = f"a pass of {rows} rows takes {growth:.2f} times as long at long contexts"
            if plain is not None:
                words += f", a plain one {plain[1]:.2f} times"
                growth /= plain[1]
            found.append((num, growth, words))
    if found:
        _, growth, words = max(found)
        evidence.note("context_growth", growth, f"{source}: {words}")


def _growth(cycles: Cycles, of: tuple[int, ...], split: int) -> tuple[int, float] | None:
    sides = [(place[2] > split, total) for place, total in cycles.items() if place[:2] == of]
    short, long = (
        merge_seconds(total for is_long, total in sides if is_long is i) for i in (False, True)
    )
    num = min(short.num_cycles, long.num_cycles)
    if num < MIN_CYCLES or short.verify_s <= 0.0:
        return None
    return num, (long.verify_s / long.num_cycles) / (short.verify_s / short.num_cycles)


def _check_tags(
    evidence: Evidence, places: StretchCounts, by_stretch: Sequence[RequestRecord | None]
) -> Iterator[EvidenceCheck]:
    tags: dict[str, list[int]] = {}
    for index, request in enumerate(by_stretch):
        for tag in () if request is None else request.tags:
            tags.setdefault(tag, []).append(index)
    common = sorted(tags.items(), key=lambda entry: -len(entry[1]))[:MAX_COMPARED_TAGS]
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
            pairs = len(found) * (len(found) - 1) / 2  # the most different one is compared
            comparison, words = compare(places, high[1], low[1]), f"{high[0][:60]}, {low[0][:60]}: "
            yield from _check_fall(name, comparison, num_tried=pairs, words=words)


def alpha_1(places: StretchCounts, mask: Mask) -> tuple[float, float]:
    num_steps = float(places.num_steps[mask].sum())
    return float(places.num_first[mask].sum()) / max(1.0, num_steps), num_steps


def _check_temperatures(
    places: StretchCounts, by_stretch: Sequence[RequestRecord | None]
) -> Iterator[EvidenceCheck]:
    asked = [(i, request) for i, request in enumerate(by_stretch) if request is not None]
    cold = [i for i, request in asked if request.parameters.get("temperature") == 0]
    greedy, known = np.isin(places.stretch, cold), np.isin(places.stretch, [i for i, _ in asked])
    found = compare(places, greedy, known & ~greedy)
    yield from _check_fall("acceptance_falls_with_temperature", found)


def _add_acceptance_over_time(evidence: Evidence, totals: TraceTotals) -> None:
    ordered = sorted(totals.over_time, key=lambda point: point[0])
    points = []
    width = -(-len(ordered) // MAX_POINTS) or 1
    for start in range(0, len(ordered), width):
        times_s, num_steps, num_first = zip(*ordered[start : start + width], strict=True)
        rate = sum(num_first) / max(1, sum(num_steps))
        points.append((times_s[0] - ordered[0][0], rate, float(sum(num_steps))))
    if points:
        evidence.series["time"] = tuple(points)


def _check_time(totals: TraceTotals) -> Iterator[EvidenceCheck]:
    """Test whether acceptance fell, at the moment at which it seems to fall most."""
    if len({(header.draft, header.draft_hash) for header in totals.headers}) > 1:
        return  # the drafts of several runs differ, whenever they ran
    times_s, num_steps, num_first = zip(*sorted(totals.over_time), strict=True)
    if (fall := find_fall(num_first, num_steps)) is not None:
        after_s = times_s[fall.cut] - times_s[0]
        yield EvidenceCheck(
            name="acceptance_fell_in_run",
            p_value=fall.p_value,
            is_large=True,
            is_absent=False,  # what is in the trace may all be later than a fall
            words=f"position 1 from {fall.before:.2f} to {fall.now:.2f}, {after_s:.1f} s after "
            "the first draft",
        )


MIN_OF_REQUEST, MAX_OF_REQUEST = 3, 100
"""Drafts of a request: fewer do not show whether it accepts nothing, and more count as so many."""
HARDLY_ANY = 0.05
"""Share of accepted drafts up to which a request accepts nothing."""
MIN_REFUSED = 0.04
"""Least share of requests that accept nothing; single texts may be foreign to a draft."""
MEAN_GRID, PRECISION_GRID = np.linspace(0.02, 0.98, 49)[:, None], np.geomspace(1.0, 24.0, 10)
"""Beta distributions of the acceptance of requests: means, and precisions. More would take all
texts to be alike."""
FITTING = 0.5
"""Difference of log-likelihoods up to which a distribution fits as well as the best one."""


def _check_requests(stretches: Stretches) -> Iterator[EvidenceCheck]:
    """Test whether more requests accept nothing than a Beta distribution of the others explains."""
    places = stretches.by("all")
    request = np.unique(stretches.request_ids, return_inverse=True)[1][places.stretch]
    steps, first = (np.bincount(request, each) for each in (places.num_steps, places.num_first))
    scale = np.minimum(1.0, MAX_OF_REQUEST / steps)
    steps, first = (np.rint(scale * each)[steps >= MIN_OF_REQUEST] for each in (steps, first))
    num_refused = int((first <= HARDLY_ANY * steps).sum())
    if num_refused == len(steps):
        return
    fit, refused = np.zeros((2, len(MEAN_GRID), len(PRECISION_GRID)))
    for num in np.unique(steps):
        most = math.floor(HARDLY_ANY * num)
        none = sum(np.exp(_log_beta_binomial(num, accepted)) for accepted in range(most + 1))
        of_length = first[steps == num]
        refused += len(of_length) * none
        others = np.unique(of_length[of_length > most], return_counts=True)
        for accepted, number in zip(*others, strict=True):
            fit += number * (_log_beta_binomial(num, accepted) - np.log1p(-none))
    expected = float(refused[fit >= fit.max() - FITTING].max())
    yield EvidenceCheck(
        name="requests_accept_nothing",
        p_value=float(pdtrc(num_refused - 1.0, expected)) if num_refused else 1.0,
        is_large=num_refused >= MIN_REFUSED * len(steps),
        is_absent=not num_refused,
        words=f"{num_refused} of {len(steps)} requests, {expected:.1f} expected by the others",
    )


def _log_beta_binomial(num: float, accepted: float) -> Reals:
    """Return the log-probability that so many of a request's drafts are accepted, on the grid."""
    hits, misses = MEAN_GRID * PRECISION_GRID, (1.0 - MEAN_GRID) * PRECISION_GRID
    log = betaln(hits + accepted, misses + num - accepted) - betaln(hits, misses)
    found: Reals = log + math.log(math.comb(int(num), int(accepted)))
    return found


MIN_DOUBTED = 20
"""Drafts of a pattern, or accepted tokens of a trace, from which on what is unusual is said."""
LEAST_REQUESTS, DOUBT_LEVEL = 3, 1e-4
"""Least requests of drafts that accept nothing, and the largest probability of their pattern."""
LEAST_OTHERS = 0.3
"""Least acceptance of the other drafts where some accept nothing."""
MIN_ROUNDS = 3
"""How often at least a period recurs."""
MOST_OTHER = 0.9
"""Share of a step outside drafting and pass, from which on it is unusual."""


def _find_doubts(totals: TraceTotals, evidence: Evidence) -> Iterator[str]:
    """Yield what a healthy run does not show, and no test of a fault covers."""
    counts = totals.acceptance
    if totals.num_steps and totals.cycles.total.total_s <= 0.0:
        yield "no step of the trace has a duration"
    if counts.num_accepted >= MIN_DOUBTED and totals.expected_accepted <= 0.0:
        yield f"expected_accepted is 0 in all steps, though {counts.num_accepted} were accepted"
    other_s, cycle_s = evidence.number("other_s"), evidence.number("cycle_s")
    is_other = other_s is not None and cycle_s and other_s >= MOST_OTHER * cycle_s
    if other_s is not None and cycle_s and is_other and "speedup" not in evidence:
        yield f"{other_s / cycle_s:.0%} of a step is neither drafting nor the pass (other_s)"
    if {METHODS.get(name) for name in totals.methods} & {"ngram"}:
        return  # copies are accepted as the text goes
    if len(totals.drafting_steps) >= LEAST_REQUESTS:
        yield from _find_refused_phase(totals)
        yield from _find_outage(totals)


def _find_outage(totals: TraceTotals) -> Iterator[str]:
    """Find a time at which the drafts of several requests accept nothing, as at no other time."""
    if len({(header.draft, header.draft_hash) for header in totals.headers}) > 1:
        return
    run, counts = totals.longest_refused, totals.acceptance
    accepted = sum(n for (_, accepted), n in counts.steps.items() if accepted)
    share = accepted / max(1, counts.num_steps - run.num_drafts)
    is_rare = counts.num_steps * (1.0 - share) ** run.num_trials <= DOUBT_LEVEL
    if len(run.request_ids) >= LEAST_REQUESTS and share >= LEAST_OTHERS and is_rare:
        start_s = min(totals.over_time)[0]
        yield (
            f"none of {run.num_drafts} drafts of {len(run.request_ids)} requests is accepted from "
            f"{max(0.0, run.begun_s - start_s):.1f} to {run.ended_s - start_s:.1f} s after the "
            f"first draft, and {share:.0%} are at other times"
        )


def _find_refused_phase(totals: TraceTotals) -> Iterator[str]:
    """Find a period at which drafts accept nothing, and those between them as usual."""
    if len(totals.methods) > 1:
        return  # a controller may try another drafter every so many steps
    num_drafts = totals.acceptance.num_steps
    rounds = num_drafts / len(totals.drafting_steps), totals.cycles.total.num_cycles, num_drafts
    num_rounds = dict(zip(NUMBERED, rounds, strict=True))
    for (period, name), (drafts, refused) in sorted(totals.phases.items()):
        phase = np.argmax(refused / np.maximum(1, drafts))
        num, accepted = drafts[phase], drafts[phase] - refused[phase]
        share = ((drafts - refused).sum() - accepted) / max(1, drafts.sum() - num)
        trials = accepted // ALIKE_DRAFTS, num // ALIKE_DRAFTS  # a phase may be one text's
        p_value = len(totals.phases) * period * bdtr(*trials, share)
        is_seen = num >= MIN_DOUBTED and num_rounds[name] >= MIN_ROUNDS * period
        is_bad = accepted <= HARDLY_ANY * num and share >= LEAST_OTHERS
        if is_seen and is_bad and p_value <= DOUBT_LEVEL:
            yield (
                f"one in {period} {name}, at regular intervals, accepts nothing ({accepted} of "
                f"{num} drafts accept a token), and {share:.0%} of the others do"
            )
            return


METHODS: Mapping[str, str] = load_table("engines")["methods"]["forerun"]
"""Value of the fact `method` for each of forerun's drafters."""
MIN_PROMPT_TOKENS = 200
"""Least number of prompt tokens from which random ids are told from text."""
COMMON = 10
"""Number of most frequent tokens whose share is large in text and near 0 in random ids."""


def _add_setup(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    headers, methods = totals.headers, totals.methods
    if not headers:
        return
    evidence.note("engine", "forerun", source)
    for name, values in (
        ("target_name", {header.target for header in headers}),
        ("draft_name", {header.draft for header in headers}),
        ("target_hash", {header.target_hash for header in headers}),
        ("draft_hash", {header.draft_hash for header in headers}),
        ("engine_version", {header.versions.get("forerun") for header in headers}),
        ("device", {header.device for header in headers}),
    ):
        value = values.pop() if len(values) == 1 else None
        if value is not None and len(value) <= MAX_WORD:
            evidence.note(name, value, source)
    _add_changed_target(evidence, headers, source)
    if methods:
        most = max(methods, key=lambda method: methods[method])
        evidence.note("method", METHODS.get(most, "other"), source)


SWITCHING = frozenset({"auto", "goodput", "bandit"})
"""Controllers that plan K = 0 where they expect or measured that drafting does not pay."""


def _add_off_share(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add the share of decode steps with K = 0, if every controller can switch a draft off."""
    headers = totals.headers
    names = {header.controller for header in headers}
    steps = totals.request_steps.total()
    has_draft = all(header.draft is not None for header in headers)
    if steps and names and names <= SWITCHING and has_draft:
        controller = " and ".join(sorted(filter(None, names)))
        evidence.note("off_share", totals.num_off / steps, f"{source}: {controller}")


def _add_changed_target(evidence: Evidence, headers: Sequence[TraceHeader], source: str) -> None:
    drafts = {header.draft_hash for header in headers}
    targets = {header.target_hash for header in headers}
    if len(targets) == 2 and len(drafts) == 1:
        evidence.note("changed", ["target"], f"{source}: its headers name two targets, one draft")


def _add_asked(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    rules = {
        (r.parameters.get("verification"), r.parameters.get("draft_temperature"))
        for r in requests
        if r.parameters.get("temperature") != 0
    }
    if len(rules) == 1 and "draft_model" in evidence.words("method"):
        rule, draft_temperature = rules.pop()
        evidence.note("draft_one_hot", draft_temperature == 0, f"{source}: draft_temperature")
        if rule in ("walk", "block", "token"):
            evidence.note("exact_match_rule", rule == "walk", f"{source}: verification {rule}")
    _add_prompts(evidence, requests, source)


def _add_prompts(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    counts: Counter[int] = Counter()
    for request in requests:
        counts.update(request.prompt_token_ids or ())
    total = counts.total()
    if total < MIN_PROMPT_TOKENS:
        return
    share = sum(count for _, count in counts.most_common(COMMON)) / total
    answer = True if share < 0.05 else False if share > 0.12 else None
    evidence.note("random_prompts", answer, f"{source}: {share:.0%} of prompts are {COMMON} tokens")


GRAM = 4
MIN_GRAMS = 200
"""Least number of 4-grams from which repetition is judged."""


def _add_texts(evidence: Evidence, texts: Iterable[Sequence[int]], source: str) -> None:
    """Add how repetitive the outputs are, if the trace contains their tokens."""
    total = distinct = 0
    for text in texts:
        grams = [*ngrams(text, GRAM)]
        total += len(grams)
        distinct += len(set(grams))
    if total >= MIN_GRAMS:
        evidence.note("distinct_4gram_share", distinct / total, f"{source}: of {total} 4-grams")


def read_trace_evidence(path: Path) -> Evidence:
    """Return the evidence of a trace; raises InvalidTrace if it cannot be read."""
    return evidence_of(read_totals(path), path.name)


def evidence_of(totals: TraceTotals, name: str) -> Evidence:
    """Return the facts that follow from what was read of a trace."""
    source = f"trace {name}"
    evidence = Evidence(readings=[_reading_of(totals, name)])
    _add_figures(evidence, totals, source)
    _add_growth(evidence, totals.far, source)
    _add_acceptance_over_time(evidence, totals)
    evidence.settle([*_run_checks(totals, evidence)])
    if evidence.flag("acceptance_fell_in_run"):
        words = evidence.checks["acceptance_fell_in_run"].words
        evidence.note("acceptance_dropped", True, f"{source}: {words}")
        evidence.changes.append(f"acceptance fell at {words}")
    if totals.num_empty:
        evidence.conflicts.append(
            f"{write_count(totals.num_empty, 'step')} without a draft emitted nothing, where the "
            "target's pass gives one token"
        )
    if totals.num_contradictory:
        evidence.conflicts.append(
            f"{totals.num_contradictory} of {totals.acceptance.num_steps} drafting steps emitted "
            "something else than what they accept and one more token"
        )
    if not (evidence.flag("acceptance_fell_in_run") or evidence.flag("requests_accept_nothing")):
        evidence.doubts += _find_doubts(totals, evidence)
    _add_setup(evidence, totals, source)
    _add_off_share(evidence, totals, source)
    _add_asked(evidence, totals.requests, source)
    _add_texts(evidence, totals.texts.values(), source)
    return evidence


def _reading_of(totals: TraceTotals, name: str) -> Reading:
    reading = Reading(source=name, kinds={"forerun trace"}, num_lines=totals.num_steps)
    reading.num_unknown = totals.num_damaged
    reading.notes += [f"not read: {place}" for place in totals.damage]
    if totals.limit:
        reading.notes.append(f"longer than {totals.limit}; only the beginning was read")
    if len(totals.headers) > 1:
        drafts = sorted({str(header.draft) for header in totals.headers})
        reading.notes.append(f"several runs in one trace, drafts {', '.join(drafts)}")
    return reading
