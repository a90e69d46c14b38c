"""Computes facts from a trace that are counts, step costs or shares."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median

from forerun.diagnose.evidence import Evidence
from forerun.diagnose.readers.trace.totals import PAUSING, Seconds, TraceTotals, merged
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import normal_interval
from forerun.theory.record import RequestRecord
from forerun.trace.costs import MIN_PLAIN_STEPS

__all__ = ["add_figures"]

MIN_RISES = 0.03
"""Of steps, the share with a larger K than the one before, from which on K is being chosen."""


def add_figures(
    evidence: Evidence, totals: TraceTotals, requests: Sequence[RequestRecord], source: str
) -> None:
    """Add facts that are figures, and the data series of the charts."""
    counts = counts_of(totals)
    evidence.add_or_note("num_steps", totals.num_steps, source)
    evidence.add_or_note("num_drafts", counts.num_steps, source)
    evidence.add_or_note("num_drafted", counts.num_drafted, source)
    evidence.add_or_note("num_accepted", counts.num_accepted, source)
    if counts.num_steps:
        add_counts(evidence, totals, counts, source)
    add_costs(evidence, totals, source)
    add_shares(evidence, totals, source)
    add_requests(evidence, requests, source)


def counts_of(totals: TraceTotals) -> AcceptanceCounts:
    """Return acceptance counts by position."""
    counts = AcceptanceCounts()
    for (_, depth, accepted, drafted), steps in totals.acceptance.items():
        counts.steps[depth, accepted] += steps
        counts.num_drafted += drafted * steps
    return counts


def add_counts(
    evidence: Evidence, totals: TraceTotals, counts: AcceptanceCounts, source: str
) -> None:
    """Add the number of drafted tokens and how many of them were accepted."""
    by_k: dict[int, int] = {}
    for (k, _, _, _), steps in totals.acceptance.items():
        by_k[k] = by_k.get(k, 0) + steps
    evidence.add_or_note("k", max(by_k, key=lambda k: by_k[k]), source)
    evidence.series["K"] = tuple((float(k), float(n), float(n)) for k, n in sorted(by_k.items()))
    evidence.add_or_note("num_emitted", counts.num_emitted, source)
    evidence.add_or_note("accepted_per_position", counts.accepted_per_position, source)
    evidence.add_or_note("drafted_per_position", counts.drafted_per_position, source)
    evidence.add_or_note(
        "conditional_acceptance_per_position", counts.conditional_acceptance, source
    )
    full = sum(n for (depth, accepted), n in counts.steps.items() if depth == accepted)
    none = sum(n for (_, accepted), n in counts.steps.items() if not accepted)
    evidence.add_or_note("full_accept_share", full / counts.num_steps, source)
    evidence.add_or_note("zero_accept_share", none / counts.num_steps, source)
    if totals.expected > 0.0:
        ratio = counts.num_accepted / totals.expected
        interval = normal_interval(ratio, math.sqrt(totals.squares) / totals.expected)
        evidence.add_or_note("expected_accepted", totals.expected, source)
        evidence.add_or_note("calibration", ratio, source, interval)
    overlap, num_known = totals.overlap
    reached = sum(counts.reached_per_position)
    if num_known and overlap > 0.0:
        found = counts.num_accepted / reached / (overlap / num_known)
        evidence.add_or_note("accept_rule_ratio", found, source)


def add_costs(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add times of drafting and plain steps, at the same number of requests in a cycle."""
    drafting = {n: t for (kind, n), t in totals.cycles.items() if kind == "drafting"}
    if not drafting:
        return
    plain_step_s = {
        size: total.total_s / total.num_cycles
        for (kind, size), total in totals.cycles.items()
        if kind == "plain" and total.num_steps >= MIN_PLAIN_STEPS and total.total_s > 0.0
    }
    compared = {size: total for size, total in drafting.items() if size in plain_step_s}
    used = merged(list((compared or drafting).values()))
    if not used.num_cycles or used.total_s <= 0.0:
        return
    for name, seconds in (
        ("cycle_s", used.total_s),
        ("draft_s", used.draft_s),
        ("verify_s", used.verify_s),
        ("other_s", used.other_s),
    ):
        evidence.add_or_note(name, seconds / used.num_cycles, source)
    evidence.add_or_note("batch", used.num_steps / used.num_cycles, source)
    if compared:
        plain_s = sum(plain_step_s[size] * total.num_cycles for size, total in compared.items())
        evidence.add_or_note("plain_step_s", plain_s / used.num_cycles, source)
        add_batch(evidence, compared, plain_step_s, source)
        add_verify_curve(evidence, totals, plain_step_s, source)


MIN_CYCLES = 20
COSTLIER, AS_COSTLY = 1.3, 1.1
"""kappa at many sequences over that at few: a good part of the gain goes, or none to speak of."""
FAR = 2.0
"""Many are at least so many times few: nearer ones tell nothing."""


def add_batch(
    evidence: Evidence, drafting: dict[int, Seconds], plain_step_s: dict[int, float], source: str
) -> None:
    """Add how plain steps slow down with the batch, and kappa at the smallest and largest batch."""
    few, many = min(plain_step_s), max(plain_step_s)
    if many >= FAR * few:
        growth = (plain_step_s[many] / plain_step_s[few] - 1.0) / (many / few - 1.0)
        evidence.add_or_note(
            "batch_linearity", max(0.0, growth), f"{source}: {few} and {many} sequences"
        )
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
        evidence.add_or_note("slower_with_batch", answer, f"{source}: {words}")


def add_verify_curve(
    evidence: Evidence, totals: TraceTotals, plain_step_s: dict[int, float], source: str
) -> None:
    """Add pass times by number of rows, at the batch size with the most cycles."""
    sizes: dict[int, int] = {}
    for (size, _), total in totals.rows.items():
        if size in plain_step_s:
            sizes[size] = sizes.get(size, 0) + total.num_cycles
    size = max(sizes, key=lambda s: sizes[s])
    curve = [
        (float(rows), total.verify_s / total.num_cycles / plain_step_s[size])
        for (s, rows), total in sorted(totals.rows.items())
        if s == size and total.num_cycles >= MIN_PLAIN_STEPS
    ]
    if len(curve) > 1:
        evidence.add_or_note("verify_rows", [rows for rows, _ in curve], source)
        evidence.add_or_note("verify_costs", [cost for _, cost in curve], source)


def add_shares(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add shares of steps, of passes and of time."""
    by_kind = {
        kind: merged([t for (k, _), t in totals.cycles.items() if k == kind])
        for kind in ("plain", "drafting", "prefill")
    }
    everything_s = math.fsum(total.total_s for total in by_kind.values())
    if everything_s > 0.0:
        evidence.add_or_note("prefill_share", by_kind["prefill"].total_s / everything_s, source)
        decode_s = everything_s - by_kind["prefill"].total_s
        if decode_s > 0.0:
            decoded = totals.num_tokens - by_kind["prefill"].num_steps
            evidence.add_or_note("tokens_per_s", max(0, decoded) / decode_s, source)
    steps = sum(totals.request_steps[name] for name in totals.drafting_steps)
    if steps:
        drafted = totals.drafting_steps.total()
        evidence.add_or_note("k0_share", max(0.0, 1.0 - drafted / steps), source)
    if totals.num_pairs:
        evidence.add_or_note("k_change_share", totals.num_k_changes / totals.num_pairs, source)
        add_swing(evidence, totals, source)
    if graphs := totals.graph_hits.total():
        evidence.add_or_note("graph_hit_share", totals.graph_hits[True] / graphs, source)


def add_swing(evidence: Evidence, totals: TraceTotals, source: str) -> None:
    """Add how much K varies between steps, if a controller chooses it."""
    if PAUSING & totals.methods.keys():
        return
    moved, of = totals.k_swing
    if of:
        evidence.add_or_note("k_swing", moved / of, f"{source}: mean change of K over mean K")
    rises = totals.num_k_rises / totals.num_pairs
    if rises > MIN_RISES:
        evidence.add_or_note("adaptive_k", True, f"{source}: K rises in {rises:.0%} of the steps")


def add_requests(evidence: Evidence, requests: Sequence[RequestRecord], source: str) -> None:
    """Add medians and means of the requests' lengths and settings."""
    if not requests:
        return
    evidence.add_or_note("num_prompt_tokens", fmean(r.num_prompt_tokens for r in requests), source)
    evidence.add_or_note("num_output_tokens", fmean(r.num_output_tokens for r in requests), source)
    if ttft := [request.ttft_s for request in requests if request.ttft_s is not None]:
        evidence.add_or_note("ttft_s", median(ttft), source)
    for name in ("temperature", "top_k", "top_p"):
        asked = {request.parameters.get(name) for request in requests}
        value = asked.pop() if len(asked) == 1 else None
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            evidence.add_or_note(name, value, source)
