"""Watches the counters of a server: incidents with likely causes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from forerun.doctor.diagnosis import as_reference, diagnose
from forerun.doctor.evidence import Evidence, Reading, merge
from forerun.doctor.readers.prometheus import OUTPUT_TOKENS, POSITIONS, Metrics, metrics_of
from forerun.errors import InvalidRequest
from forerun.trace.change_points import Growth, Incident, Watcher, sample_positions

MAX_CAUSES = 3
MIN_REQUESTS = 20.0
_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
_PER_TOKEN_SGLANG = "sglang:time_per_output_token_seconds"
_TIMES = (
    (f"{_PER_TOKEN}_sum", f"{_PER_TOKEN}_count", MIN_REQUESTS),
    (f"{_PER_TOKEN_SGLANG}_sum", f"{_PER_TOKEN_SGLANG}_count", MIN_REQUESTS),
    ("llamacpp:tokens_predicted_seconds", "llamacpp:tokens_predicted", 2000.0),
)
"""Seconds and what they are divided by: requests or tokens, and how many make a batch."""
_PROMPTS = (
    ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count", MIN_REQUESTS),
    ("sglang:prompt_tokens", "sglang:num_requests", MIN_REQUESTS),
)
_LOADS = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
_LEAST_SLOWER, _LEAST_LONGER = 0.02, 0.15
"""Least spread of times and of prompts, whose lengths differ with the hours of the day."""
_OWN_LOAD = ("sequence_steps", "cycles")
_LEAST_LOAD = 0.05
"""Least mean of running requests: one, for a twentieth of the time."""
_GAUGE = "sglang:spec_accept_length"
_GAUGE_POLLS = 6.0
TIME_PER_TOKEN = "time per output token (s)"
PROMPT_TOKENS = "prompt tokens per request"


class WatchState(Struct, kw_only=True, forbid_unknown_fields=True):
    """The saved state of a watch, which continues after restarts of the watch or of the server.

    Attributes:
        source: what is watched; a state belongs to one source.
        last: counters at the latest reading, at Unix time `last_s`; a counter that is smaller at
            the next was reset.
        usual: counts since the watch began or the latest incident, without those of `recent`.
        recent: counts since the first deviation of a figure.
        unsent: messages that the web hook has not accepted yet.
        num_failed: readings in a row that failed.
    """

    source: str
    last: Metrics | None = None
    last_s: float = 0.0
    usual: Metrics = msgspec.field(default_factory=Metrics)
    recent: Metrics = msgspec.field(default_factory=Metrics)
    watcher: Watcher = msgspec.field(default_factory=Watcher)
    unsent: list[dict[str, Any]] = []
    num_failed: int = 0


def observe(state: WatchState, metrics: Metrics, at_s: float) -> list[Incident]:
    """Add the metrics of a page, read at this Unix time; returns what began or was resolved."""
    if not metrics.totals:  # a server that was just started may have few
        raise InvalidRequest(f"{state.source} holds no metric of an engine that is known")
    counted = Evidence(readings=[Reading(source=state.source)])
    metrics_of(metrics).add_to(counted, state.source)
    counted.check_accepted()
    last, state.last, state.num_failed = state.last, metrics, 0
    seconds, state.last_s = at_s - state.last_s, at_s
    if last is None:
        return []
    grown = metrics.since(last)
    load = estimate_load(last, metrics, grown, seconds)
    samples = [
        *_sample_acceptance(grown),
        *_sample_figures(grown, load),
    ]
    found = state.watcher.add(samples, at_s)
    state.recent.include(grown)
    for incident in found:
        if incident.resolved_s is None and incident.kind != "note":
            incident.causes = causes_of(incident, state)
    if any(incident.kind != "possible" for incident in found):
        state.usual, state.recent = Metrics(), Metrics()
    elif all(cusum.started_s is None for cusum in state.watcher.series.values()):
        state.usual.include(state.recent)
        state.recent = Metrics()
    return found


def estimate_load(last: Metrics, now: Metrics, grown: Metrics, seconds: float) -> float | None:
    """Return the mean number of running requests between two readings; None if it is not known.

    It is the rate of tokens times the time that each takes (Little 1961). A gauge is of two moments
    only.
    """
    steps, cycles = (grown.totals.get(f"forerun:{name}", 0.0) for name in _OWN_LOAD)
    if steps >= cycles > 0.0:
        return steps / cycles
    tokens = sum(grown.totals.get(name, 0.0) for name in OUTPUT_TOKENS)
    for over, under, _ in _TIMES:
        if tokens and grown.totals.get(under) and seconds > 0.0:
            return max(_LEAST_LOAD, tokens / seconds * grown.totals[over] / grown.totals[under])
    for name in _LOADS:
        if name in now.totals:
            before = last.totals.get(name, now.totals[name])
            return max(1.0, (now.totals[name] + before) / 2.0)
    return None


def _sample_acceptance(grown: Metrics) -> list[Growth]:
    tally = metrics_of(grown)
    if drafts := tally.counts.get("num_drafts"):
        known = [name for name in grown.positions if POSITIONS.get(name) == "drafted"]
        drafted = grown.positions[min(known)] if known else {}
        places = range(len(tally.per_position))
        return sample_positions(tally.per_position, (drafted.get(p, drafts) for p in places))
    length = grown.totals.get(_GAUGE, 0.0)  # SGLang counts no positions
    if length <= 0.0:
        return []
    return [Growth("acceptance length", length, 1.0, _GAUGE_POLLS, is_log=True)]


def _sample_figures(grown: Metrics, load: float | None) -> Iterator[Growth]:
    for name, pairs, worse, least in (
        (TIME_PER_TOKEN, _TIMES, 1, _LEAST_SLOWER),
        (PROMPT_TOKENS, _PROMPTS, 0, _LEAST_LONGER),
    ):
        if name == TIME_PER_TOKEN and load is None:
            continue  # a time alone may be that of a larger batch
        for over, under, size in pairs:
            if over in grown.totals and under in grown.totals:
                counts = grown.totals[over], grown.totals[under]
                at = load if worse else None
                yield Growth(name, *counts, size, worse, is_log=True, load=at, least=least)
                break


def causes_of(incident: Incident, state: WatchState) -> tuple[str, ...]:
    """Return the labels that a diagnosis of the time since the incident finds likeliest."""
    now = Evidence(readings=[Reading(source="since the change")])
    before = Evidence(readings=[Reading(source="before the change")])
    metrics_of(state.recent).add_to(now, "since the change")
    metrics_of(state.usual).add_to(before, "before the change")
    for change in incident.changes:
        if change.series.startswith("acceptance") and change.is_worse:
            now.note("acceptance_dropped", True, change.words)
        if change.series == TIME_PER_TOKEN and change.is_worse:
            now.note("slowed_down", True, change.words)
        if change.series == PROMPT_TOKENS:
            now.note("changed", ["traffic"], change.words)
    return tuple(
        ranked.scored.cause.label
        for ranked in diagnose(merge(now, as_reference(before))).causes[:MAX_CAUSES]
        if ranked.scored.cause.label != "healthy"
    )


def write_message(source: str, incident: Incident) -> dict[str, Any]:
    """Return an incident for a web hook; the id is the same when it is sent again or resolved."""
    content = msgspec.to_builtins(incident)
    name = f"{source} {incident.kind} {incident.noticed_s}"
    is_open = incident.resolved_s is None
    return {
        "id": hashlib.sha256(name.encode()).hexdigest()[:16],
        "event": incident.kind if is_open else "resolved",
        "source": source,
        "text": incident.words,
        "started_s": incident.started_s,
        **{key: content[key] for key in ("noticed_s", "resolved_s", "changes", "causes")},
    }


def watch_text(state: WatchState) -> str:
    """Return the state in Prometheus's text format."""
    watcher = state.watcher
    is_open = [each.kind == "alarm" and each.resolved_s is None for each in watcher.incidents]
    gauges = (
        ("change_points_total", "counter", watcher.num_alarms),
        ("open_incidents", "gauge", sum(is_open)),
        ("failed_readings", "gauge", state.num_failed),
    )
    lines = []
    for name, kind, value in gauges:
        lines += [f"# TYPE forerun_watch_{name} {kind}", f"forerun_watch_{name} {value}"]
    latest = {
        change.series: change
        for incident in watcher.incidents
        if incident.kind == "alarm"
        for change in incident.changes
    }
    lines.append("# TYPE forerun_watch_last_change_seconds gauge")
    lines += [
        f'forerun_watch_last_change_seconds{{series="{name}"}} {change.noticed_s:.0f}'
        for name, change in latest.items()
    ]
    lines.append("# TYPE forerun_watch_deviation gauge")
    lines += [
        f'forerun_watch_deviation{{series="{name}"}} {cusum.excess:.3f}'
        for name, cusum in watcher.series.items()
    ]
    return "\n".join(lines) + "\n"
