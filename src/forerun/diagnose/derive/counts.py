"""Derives acceptance rates from counts and from other rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from forerun.diagnose.evidence import Evidence
from forerun.theory.intervals import Interval, normal_interval, wilson_interval
from forerun.theory.speedup import break_even_alpha

__all__ = ["add_rates"]

MIN_REACHED = 20
"""Least number of steps that must reach a position for its conditional acceptance to be used."""
MIN_RATE = 1e-6
"""A rate below is none: nothing is compared with it."""


def add_rates(evidence: Evidence) -> None:
    """Add rates, tau and K, from whichever figures are known."""
    add_positions(evidence)
    add_k(evidence)
    add_length(evidence)
    add_draft_rate(evidence)
    add_constant(evidence)
    add_first_position(evidence)
    add_conditional(evidence)


def add_positions(evidence: Evidence) -> None:
    """Add beta from counts per position; missing denominators are the number of drafts."""
    accepted = evidence.numbers("accepted_per_position")
    drafted = evidence.numbers("drafted_per_position")
    drafts = evidence.number("num_drafts")
    if accepted and not drafted and drafts:
        drafted = (drafts,) * len(accepted)
    if accepted and len(accepted) == len(drafted) and all(drafted):
        rates = [min(1.0, a / d) for a, d in zip(accepted, drafted, strict=True)]
        evidence.conclude("acceptance_rate_per_position", rates, "accepted / drafted per position")


def add_k(evidence: Evidence) -> None:
    """Add K: the number of positions, or of tokens drafted per step."""
    if "k" in evidence:
        return
    if rates := evidence.numbers("acceptance_rate_per_position"):
        evidence.conclude("k", len(rates), "number of drafted positions")
        return
    drafted, drafts = evidence.number("num_drafted"), evidence.number("num_drafts")
    if drafted and drafts:
        evidence.conclude(
            "k", math.ceil(drafted / drafts - 0.01), "drafted tokens per draft, rounded up"
        )


def add_length(evidence: Evidence) -> None:
    """Add tau from counts, else from beta, else from the draft acceptance rate at a fixed K."""
    if "acceptance_length" in evidence:
        return
    accepted, drafts = evidence.number("num_accepted"), evidence.number("num_drafts")
    rates = evidence.numbers("acceptance_rate_per_position")
    rate, k = evidence.number("draft_acceptance_rate"), evidence.number("k")
    name = "acceptance_length"
    if accepted is not None and drafts:
        tau = 1.0 + accepted / drafts
        evidence.conclude(name, tau, "1 + accepted / drafts", length_interval(tau, rates, drafts))
    elif rates:
        evidence.conclude(name, 1.0 + sum(rates), "1 + sum of beta")
    elif rate is not None and k:
        evidence.conclude(
            name, 1.0 + rate * k, "1 + (accepted / drafted) x K, had every step drafted K"
        )


def length_interval(tau: float, rates: Sequence[float], drafts: float) -> Interval | None:
    """Return the 95% interval of tau, taking steps as independent."""
    if not rates or drafts < 2:
        return None
    square = sum((2 * i - 1) * rate for i, rate in enumerate(rates, start=1))
    error = math.sqrt(max(0.0, square - (tau - 1.0) ** 2) / drafts)
    return normal_interval(tau, error, least=1.0)


def add_draft_rate(evidence: Evidence) -> None:
    """Add the draft acceptance rate: accepted / drafted tokens."""
    accepted, drafted = evidence.number("num_accepted"), evidence.number("num_drafted")
    tau, k = evidence.number("acceptance_length"), evidence.number("k")
    name = "draft_acceptance_rate"
    if accepted is not None and drafted and accepted <= drafted:
        interval = wilson_interval(int(accepted), int(drafted))
        evidence.conclude(name, accepted / drafted, "accepted / drafted tokens", interval)
    elif name not in evidence and tau is not None and k and 1.0 <= tau <= k + 1:
        evidence.conclude(name, (tau - 1.0) / k, "(tau - 1) / K, had every step drafted K")


def add_constant(evidence: Evidence) -> None:
    """Add the constant acceptance probability that would give this tau."""
    tau, depth = evidence.number("acceptance_length"), mean_drafted(evidence)
    if tau is None or depth is None:
        return
    evidence.conclude("mean_drafted", depth, "drafted tokens per drafting step")
    k = max(1, round(depth))
    if 1.0 <= tau <= k + 1:
        evidence.conclude("alpha", break_even_alpha(k, tau), "tau solved for a constant acceptance")
    if tau <= depth + 1.0:
        evidence.conclude("length_over_ceiling", tau / (depth + 1.0), "tau / (drafted + 1)")


def mean_drafted(evidence: Evidence) -> float | None:
    """Return the tokens drafted per step: K, or fewer where a stop rule ends drafts earlier."""
    drafted, drafts = evidence.number("num_drafted"), evidence.number("num_drafts")
    tau, rate = evidence.number("acceptance_length"), evidence.number("draft_acceptance_rate")
    k = evidence.number("k")
    if drafted and drafts:
        return drafted / drafts
    if tau is not None and tau > 1.0 and rate:
        found = (tau - 1.0) / rate
        return found if k is None else min(found, k)
    return k or None


def add_first_position(evidence: Evidence) -> None:
    """Add alpha_1, the acceptance at the first drafted position."""
    accepted = evidence.numbers("accepted_per_position")
    drafted = evidence.numbers("drafted_per_position")
    drafts = evidence.number("num_drafts")
    trials = drafted[0] if drafted else drafts
    if accepted and trials and accepted[0] <= trials:
        interval = wilson_interval(int(accepted[0]), int(trials))
        evidence.conclude("alpha_1", interval.estimate, "accepted at position 1 / drafts", interval)
    elif rates := evidence.numbers("acceptance_rate_per_position"):
        evidence.conclude("alpha_1", rates[0], "beta of position 1")
    else:
        evidence.conclude("alpha_1", evidence.number("alpha"), "taken as constant over positions")


def add_conditional(evidence: Evidence) -> None:
    """Add the conditional acceptance, and how far its lowest later value is below the first."""
    rates = evidence.numbers("acceptance_rate_per_position")
    name = "conditional_acceptance_per_position"
    if name not in evidence and rates and rates[0] > 0.0:
        ratios = [rates[0]]
        ratios += [min(1.0, after / before) if before else 0.0 for before, after in pairwise(rates)]
        evidence.conclude(name, ratios, "beta over that of the position before")
    conditional = evidence.numbers(name)
    drafts = evidence.number("num_drafts")
    later = [
        value
        for position, value in enumerate(conditional[1:], start=1)
        if position < len(rates) + 1
        and (drafts is None or rates[position - 1] * drafts >= MIN_REACHED)
    ]
    if later and conditional[0] > MIN_RATE:
        found = min(later) / conditional[0]
        evidence.conclude(
            "later_over_first", found, "lowest later conditional acceptance / the first"
        )
