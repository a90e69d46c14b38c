"""Simulate days of a server with waves of load; count alarms, and how soon changes are noticed.

    python benchmarks/watch/simulate.py --days 100 --out benchmarks/watch/results/simulated.json

A page of counters in vLLM's format is read every minute. Requests per second follow the hours
of the day, with three bursts a day; running requests, and with them the time per token, follow from
the load. The acceptance probability of each request is drawn from a beta distribution, so counts
vary more between requests than steps alone would make them.
"""

# ruff: noqa: TID251 (generators of its own, not the global one)

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from forerun.doctor.readers.prometheus import Metrics
from forerun.doctor.watch import WatchState, observe
from forerun.provenance import collect
from forerun.trace.change_points import Incident

K = 4
ALPHA = 0.74
POLL_S = 60.0
DAY_S = 86_400.0
STEP_S = 0.05
"""Seconds of a step with one running request."""
TOKENS = 200
"""Mean output tokens of a request."""
PROMPT = 500
MOST_RUNNING = 64
"""Requests beyond these wait, which is no time per token."""
VLLM = "vllm:spec_decode_num_"


@dataclass(frozen=True, kw_only=True)
class Server:
    """What the requests of a stretch of time meet.

    Attributes:
        spread: standard deviation of the acceptance probability between requests.
        slowness: factor on the time of every step.
        hours: swing over the day of the mean acceptance probability; prompts swing by ten times
            this share.
    """

    alpha: float = ALPHA
    spread: float = 0.12
    slowness: float = 1.0
    prompt: float = PROMPT
    hours: float = 0.0


PLANTED = {
    "acceptance falls, .74 to .55": Server(alpha=0.55),
    "acceptance falls a little, .74 to .68": Server(alpha=0.68),
    "the engine is 1.3 times slower": Server(slowness=1.3),
    "traffic changes: .74 to .62, prompts 3 times as long": Server(alpha=0.62, prompt=3 * PROMPT),
    "acceptance rises, .74 to .85": Server(alpha=0.85),
    "the engine is 1.3 times faster": Server(slowness=1 / 1.3),
}


class Traffic:
    """Counters that grow by what the requests between two readings count."""

    def __init__(self, rng: np.random.Generator, start_s: float, busyness: float = 1.0) -> None:
        self.rng, self.at_s, self.busyness = rng, start_s, busyness
        self.totals: Counter[str] = Counter()
        self.accepted = np.zeros(K)
        self.bursts: list[float] = []

    def read(self, server: Server) -> Metrics:
        """Serve for the time between two readings, and return the page after it."""
        rng, self.at_s = self.rng, self.at_s + POLL_S
        wave = np.sin(2 * np.pi * self.at_s / DAY_S)
        if self.at_s % DAY_S < POLL_S or not self.bursts:
            self.bursts = list(self.at_s + rng.uniform(0, DAY_S, 3))
        rate = self.busyness * (0.03 + 1.2 * (1 + wave) ** 1.5)
        rate *= 1.5 if any(0 <= self.at_s - burst < 1200 for burst in self.bursts) else 1.0
        alpha = server.alpha + server.hours * wave
        running = self._running(rate, server, alpha)
        num = rng.poisson(rate * POLL_S)
        if num:
            around = running + np.sqrt(running) * rng.normal() * 0.4
            self._finish(num, max(1.0, around), server, alpha)
        self.totals["vllm:num_requests_running"] = min(MOST_RUNNING, rng.poisson(running))
        places = dict(enumerate(self.accepted.tolist()))
        return Metrics(
            totals=dict(self.totals), positions={f"{VLLM}accepted_tokens_per_pos": places}
        )

    def _running(self, rate: float, server: Server, alpha: float) -> float:
        """Return how many requests run: arrivals times the time that they stay."""
        running, tau = 1.0, sum(alpha**i for i in range(K + 1))
        for _ in range(20):
            running = min(MOST_RUNNING, rate * TOKENS * step_s(running, server) / tau)
        return running

    def _finish(self, num: int, running: float, server: Server, alpha: float) -> None:
        rng = self.rng
        total = alpha * (1 - alpha) / server.spread**2 - 1
        rates = rng.beta(alpha * total, (1 - alpha) * total, num)
        steps = 1 + rng.geometric(1 / 70, num)
        reached, tokens = steps, steps.astype(float)
        for position in range(K):
            reached = rng.binomial(reached, rates)
            self.accepted[position] += reached.sum()
            tokens += reached
        each_s = step_s(running, server) * steps / tokens * np.exp(0.1 * rng.normal(size=num))
        longer = server.prompt * (1 + 10 * server.hours * np.sin(2 * np.pi * self.at_s / DAY_S))
        per_token, prompt = "vllm:request_time_per_output_token_seconds", "request_prompt_tokens"
        self.totals.update(
            {
                "vllm:generation_tokens": int(tokens.sum()),
                f"{VLLM}drafts": int(steps.sum()),
                f"{VLLM}draft_tokens": K * int(steps.sum()),
                f"{per_token}_sum": each_s.sum(),
                f"{per_token}_count": num,
                f"vllm:{prompt}_sum": (longer * np.exp(0.6 * rng.normal(size=num))).sum(),
                f"vllm:{prompt}_count": num,
            }
        )


def step_s(running: float, server: Server) -> float:
    """Seconds of a step: flat for few requests, in proportion to them for many."""
    return server.slowness * STEP_S * (1 + running / 24)


def watch(
    state: WatchState, traffic: Traffic, server: Server, seconds: float
) -> Iterator[Incident]:
    """Yield what is reported while a server runs as described."""
    for _ in range(int(seconds / POLL_S)):
        yield from observe(state, traffic.read(server), traffic.at_s)


def count_healthy(days: int, seed: int, **settings: float) -> dict[str, object]:
    """Count what is reported of so many days without a change."""
    state, traffic = WatchState(source="s"), Traffic(np.random.default_rng(seed), 0.0)
    list(watch(state, traffic, Server(**settings), days * DAY_S))
    found = state.watcher.incidents
    kinds = Counter(each.kind for each in found)
    return {
        "days": days,
        "requests": traffic.totals["vllm:request_prompt_tokens_count"],
        **{kind: kinds[kind] for kind in ("alarm", "note", "possible")},
        "what": [each.words for each in found][:10],
    }


def plant(name: str, times: int, seed: int) -> dict[str, object]:
    """Change a server after half a day to a day for six hours, and watch it for six more."""
    alarms, notes, delays, early, resolved = Counter(), Counter(), [], 0, 0
    for number in range(times):
        rng = np.random.default_rng(seed + number)
        traffic, state = Traffic(rng, rng.uniform(0, DAY_S)), WatchState(source="s")
        list(watch(state, traffic, Server(), DAY_S * rng.uniform(0.5, 1)))
        began_s = traffic.at_s
        early += len(state.watcher.incidents)
        list(watch(state, traffic, PLANTED[name], DAY_S / 4))
        list(watch(state, traffic, Server(), DAY_S / 4))
        found = [each for each in state.watcher.incidents if each.noticed_s > began_s]
        raised = [each for each in found if each.kind == "alarm"]
        alarms[len(raised)] += 1
        notes[sum(each.kind == "note" for each in found)] += 1
        delays += [each.noticed_s - began_s for each in raised[:1]]
        resolved += bool(raised) and raised[0].resolved_s is not None
    return {
        "times": times,
        "alarms": dict(alarms),
        "notes": dict(notes),
        "median_delay_s": float(np.median(delays)) if delays else None,
        "p95_delay_s": float(np.quantile(delays, 0.95)) if delays else None,
        "resolved": resolved,
        "before_the_change": early,
    }


def start(times: int, seed: int, drafts: int | None) -> dict[str, object]:
    """Watch servers whose acceptance falls from .74 to .47 after so many drafts, or never."""
    words, after = Counter(), []
    for number in range(times):
        rng = np.random.default_rng(seed + number)
        traffic, state = Traffic(rng, rng.uniform(0, DAY_S), 0.05), WatchState(source="s")
        said, changed_at = None, None
        while traffic.totals[f"{VLLM}drafts"] < 30_000 + (drafts or 0):
            known = traffic.totals[f"{VLLM}drafts"]
            has_changed = drafts is not None and known >= drafts
            changed_at = known if has_changed and changed_at is None else changed_at
            server = Server(alpha=0.47) if has_changed else Server()
            found = [
                e for e in observe(state, traffic.read(server), traffic.at_s) if e.kind != "note"
            ]
            if found:
                said = found[0].kind if has_changed == (drafts is not None) else "too early"
                after += [traffic.totals[f"{VLLM}drafts"] - (changed_at or 0)]
                break
        words[str(said)] += 1
    return {
        "times": times,
        "said": dict(words),
        "median_drafts_after": float(np.median(after)) if after else None,
    }


def main() -> None:
    """Healthy days first, then changes, then short histories."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--days", type=int, default=100)
    parser.add_argument("--changes", type=int, default=10, help="of every kind")
    parser.add_argument("--starts", type=int, default=50, help="short histories")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    summary: dict[str, object] = {}
    for name, settings in {
        "waves of load": {},
        "waves of load and of traffic": {"hours": 0.02},
        "waves of load, requests alike": {"spread": 0.05},
        "waves of load, requests that differ much": {"spread": 0.2},
    }.items():
        days = options.days // (10 if settings else 1)
        report(summary, name, count_healthy(days, options.seed, **settings))
    for name in PLANTED:
        report(summary, name, plant(name, options.changes, options.seed + 1000))
    for drafts in (None, 5_000, 10_000, 20_000):
        name = "short history, " + (f"a fall after {drafts} drafts" if drafts else "healthy")
        report(summary, name, start(options.starts, options.seed + 5000, drafts))
    if options.out:
        document = {"provenance": collect({}).to_dict(), "summary": summary}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def report(summary: dict[str, object], name: str, found: dict[str, object]) -> None:
    """Add a result, and print it."""
    summary[name] = found
    print(name, json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
