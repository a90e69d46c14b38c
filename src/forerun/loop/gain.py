"""The gain of a draft on trial over the draft in service, measured on the same requests."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub

from forerun.engine.shadow import RequestTally, TimedCount
from forerun.theory.intervals import Interval, student_quantile

MIN_REQUESTS = 20
"""Requests with a measured draft below which no gain is stated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """How much faster decoding is expected to be with the draft on trial.

    Attributes:
        gain: of tokens per second, as a share; 0.1 is a tenth faster.
        depth: K of the trial.
        acceptance_length: tau of the draft on trial, at K.
        acceptance: of each of its positions, given that those before were accepted.
    """

    gain: Interval
    num_requests: int
    depth: int
    acceptance_length: float
    acceptance: tuple[float, ...]

    @property
    def words(self) -> str:
        ends = f"{self.gain.low:+.1%} to {self.gain.high:+.1%}"
        return (
            f"{self.gain.estimate:+.1%} tokens per second ({ends}) on {self.num_requests} requests,"
            f" {self.acceptance_length:.2f} tokens per step at K={self.depth}"
        )

    @property
    def figures(self) -> dict[str, float]:
        return {
            "gain": self.gain.estimate,
            "gain_low": self.gain.low,
            "gain_high": self.gain.high,
            "num_requests": self.num_requests,
            "acceptance_length": self.acceptance_length,
            **{f"acceptance_{n}": rate for n, rate in enumerate(self.acceptance, start=1)},
        }


def measure_gain(tallies: Sequence[RequestTally], confidence: float = 0.95) -> Gain | None:
    """Compare the draft on trial with the one in service; None where too little was measured.

    A step with the draft on trial takes what other steps of its depth take without drafting, and
    what it needs to draft. The interval is that of the jackknife over requests, whose steps are
    alike.

    Source: Efron and Tibshirani 1993, chapter 11.
    """
    depths = Counter[int]()
    for tally in tallies:
        depths.update({depth: round(chains.number) for depth, chains in tally.chains.items()})
    if not depths:
        return None
    ((depth, _),) = depths.most_common(1)
    groups = [_list_sums(tally, depth) for tally in tallies if tally.weights]
    num = len(groups)
    if num < MIN_REQUESTS:
        return None
    total = [sum(column) for column in zip(*groups, strict=True)]
    estimate = _compute_gain(total, depth)
    without = [_compute_gain(list(map(sub, total, group)), depth) for group in groups]
    if not all(map(math.isfinite, (estimate, *without))):
        return None
    mean = sum(without) / num
    error = math.sqrt((num - 1) / num * sum((value - mean) ** 2 for value in without))
    reach = student_quantile(0.5 + confidence / 2, num - 1) * error
    rates = _compute_rates(total, depth)
    return Gain(
        gain=Interval(estimate=estimate, low=estimate - reach, high=estimate + reach),
        num_requests=num,
        depth=depth,
        acceptance_length=_compute_length(rates),
        acceptance=tuple(rates),
    )


def _list_sums(tally: RequestTally, depth: int) -> list[float]:
    """Return the sums of a request that the gain is computed from."""
    parts = (
        tally.live,
        tally.rest.get(depth, TimedCount()),
        tally.chains.get(depth, TimedCount()),
        tally.usual_levels,
        tally.trial_levels,
    )
    padding = [0.0] * (depth - len(tally.weights))
    scores = [*tally.weights[:depth], *padding, *tally.accepted[:depth], *padding]
    return [value for part in parts for value in (part.number, part.seconds)] + scores


def _compute_rates(sums: Sequence[float], depth: int) -> list[float]:
    weights, accepted = sums[-2 * depth : -depth], sums[-depth:]
    pairs = zip(accepted, weights, strict=True)
    return [min(1.0, above / below) if below > 0.0 else 0.0 for above, below in pairs]


def _compute_length(rates: Sequence[float]) -> float:
    """Return the expected tokens of a step, from the acceptance of each position given the last."""
    return 1.0 + sum(math.prod(rates[: n + 1]) for n in range(len(rates)))


def _compute_gain(sums: Sequence[float], depth: int) -> float:
    """Return the gain; NaN where a time is missing."""
    tokens, live_s, num_rest, rest_s, num_chains, chains_s = sums[:6]
    usual, usual_s, trial, trial_s = sums[6:10]
    if min(tokens, live_s, num_rest, num_chains) <= 0.0:
        return math.nan
    draft_s = chains_s / num_chains
    if min(usual, trial) > 0.0:
        # Where kernels draft, it takes less than in steps with a trial, here as for the live draft.
        draft_s = max(0.0, draft_s + depth * (usual_s / usual - trial_s / trial))
    step_s = rest_s / num_rest + draft_s
    return _compute_length(_compute_rates(sums, depth)) / step_s / (tokens / live_s) - 1.0
