"""Simulate a server's acceptance, and count false alarms and how soon a change is noticed.

    python benchmarks/watch/simulate.py --days 100 --out benchmarks/watch/results/simulated.json

A request drafts K tokens in each of some 70 steps. Its acceptance probability is drawn from a beta
distribution, so counts vary more between requests than steps alone would make them. A page of
counters is read after every few requests, from 2 at night to 60 by day. All stable days are
one run.
"""

# ruff: noqa: TID251 (generators of its own, not the global one)

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from forerun.provenance import collect
from forerun.trace.change_points import Cusum, watch_position

K = 4
LEARNING = 5000
"""Requests before a change: mean and spread are learned from the first 60 batches."""


def main() -> None:
    """Stable days first, then changes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--requests", type=int, default=10_000, help="a day")
    parser.add_argument("--changes", type=int, default=200, help="simulated changes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    stable = {}
    for spread in (0.05, 0.12, 0.2):
        rng = np.random.default_rng(options.seed)
        alarms = len(watched(rng, [(0.74, spread, options.days * options.requests)])[0])
        stable[str(spread)] = {"days": options.days, "alarms": alarms}
    noticed = {}
    for spread in (0.05, 0.12, 0.2):
        rng = np.random.default_rng(options.seed + 1)
        delays = []
        for _ in range(options.changes):
            found, at = watched(rng, [(0.74, spread, LEARNING), (0.47, spread, 1000)])
            after = [index for index in at if index >= LEARNING]
            delays.append(after[0] - LEARNING + 1 if after and len(after) == len(found) else 10**6)
        noticed[str(spread)] = {
            "changes": options.changes,
            "median_requests": float(np.median(delays)),
            "p95_requests": float(np.quantile(delays, 0.95)),
            "within_200": sum(delay <= 200 for delay in delays),
        }
    summary = {"stable": stable, "noticed": noticed, "seconds": time.perf_counter() - began}
    print(json.dumps(summary, indent=1))
    if options.out:
        document = {"provenance": collect({}).to_dict(), "summary": summary}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def watched(rng: np.random.Generator, parts: list[tuple[float, float, int]]) -> tuple[list, list]:
    """The changes found in traffic of so many requests each, and the request of each alarm."""
    counts, drafts = zip(*(traffic(rng, *part) for part in parts), strict=True)
    accepted, steps = np.concatenate(counts), np.concatenate(drafts)
    series: dict[str, Cusum] = {}
    found, at = [], []
    start = 0
    while start < len(steps):
        busy = 31 + 29 * np.sin(2 * np.pi * start / 10_000)  # requests between two polls
        end = min(len(steps), start + max(1, int(rng.poisson(busy))))
        totals = accepted[start:end].sum(axis=0).tolist()
        drafts = float(steps[start:end].sum())
        changes = [
            change
            for position, total in enumerate(totals, start=1)
            for change in watch_position(series, position, total, drafts, float(end))
        ]
        found += changes
        at += [end - 1] * len(changes)
        start = end
    return found, at


def traffic(
    rng: np.random.Generator, mean: float, spread: float, num: int
) -> tuple[np.ndarray, np.ndarray]:
    """Steps that accepted through each position, and steps, of every request."""
    total = mean * (1 - mean) / spread**2 - 1
    rates = rng.beta(mean * total, (1 - mean) * total, num)
    steps = 1 + rng.geometric(1 / 70, num)
    accepted, reached = np.empty((num, K)), steps
    for position in range(K):
        reached = rng.binomial(reached, rates)
        accepted[:, position] = reached
    return accepted, steps


if __name__ == "__main__":
    main()
