"""Watches the counters of a server: change points with likely causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from forerun.doctor.diagnosis import as_reference, diagnose
from forerun.doctor.evidence import Evidence, Reading, merge
from forerun.doctor.readers.prometheus import POSITIONS, Metrics, metrics_of
from forerun.errors import InvalidRequest
from forerun.trace.change_points import ChangePoint, Cusum, watch_position

MAX_CHANGES = 100
"""Change points that a state keeps, the latest ones."""
MAX_CAUSES = 3
MIN_REQUESTS = 20.0
_PER_TOKEN = "vllm:request_time_per_output_token_seconds"
_PER_TOKEN_SGLANG = "sglang:time_per_output_token_seconds"
_TIMES = (
    (f"{_PER_TOKEN}_sum", f"{_PER_TOKEN}_count", MIN_REQUESTS),
    (f"{_PER_TOKEN_SGLANG}_sum", f"{_PER_TOKEN_SGLANG}_count", MIN_REQUESTS),
    ("llamacpp:tokens_predicted_seconds", "llamacpp:tokens_predicted", 2000.0),
    ("forerun:step_seconds", "forerun:step_tokens", 2000.0),
)
"""Seconds and what they are divided by: requests or tokens, and how many make a batch."""
_PROMPTS = (
    ("vllm:request_prompt_tokens_sum", "vllm:request_prompt_tokens_count", MIN_REQUESTS),
    ("sglang:prompt_tokens", "sglang:num_requests", MIN_REQUESTS),
)
_GAUGE = "sglang:spec_accept_length"
_GAUGE_POLLS = 6.0
TIME_PER_TOKEN = "time per output token (s)"
PROMPT_TOKENS = "prompt tokens per request"


class WatchState(Struct, kw_only=True, forbid_unknown_fields=True):
    """The saved state of a watch, which continues after restarts of the watch or of the server.

    Attributes:
        source: what is watched; a state belongs to one source.
        last: counters at the latest reading; a counter that is smaller at the next was reset.
        usual: counts since the watch began or the latest change, without those of `recent`.
        recent: counts since the first deviation of a figure.
        unsent: changes that the web hook has not accepted yet.
        num_failed: readings in a row that failed.
    """

    source: str
    last: Metrics | None = None
    usual: Metrics = msgspec.field(default_factory=Metrics)
    recent: Metrics = msgspec.field(default_factory=Metrics)
    series: dict[str, Cusum] = {}
    changes: list[ChangePoint] = []
    unsent: list[ChangePoint] = []
    num_changes: int = 0
    num_failed: int = 0


def observe(state: WatchState, metrics: Metrics, at_s: float) -> list[ChangePoint]:
    """Add the metrics of a page, read at this Unix time, to the state; returns the changes."""
    if not metrics.totals:  # a server that was just started may have few
        raise InvalidRequest(f"{state.source} holds no metric of an engine that is known")
    last, state.last, state.num_failed = state.last, metrics, 0
    return [] if last is None else _add_growth(state, metrics.since(last), at_s)


def _add_growth(state: WatchState, grown: Metrics, at_s: float) -> list[ChangePoint]:
    found = [
        *_acceptance_changes(state.series, grown, at_s),
        *_figure_changes(state.series, grown, at_s),
    ]
    state.recent.include(grown)
    if found:
        found = [replace(change, causes=causes_of(change, state)) for change in found]
        state.usual, state.recent = Metrics(), Metrics()
    elif all(cusum.started_s is None for cusum in state.series.values()):
        state.usual.include(state.recent)
        state.recent = Metrics()
    state.changes = [*state.changes, *found][-MAX_CHANGES:]
    state.num_changes += len(found)
    return found


def _acceptance_changes(series: dict[str, Cusum], grown: Metrics, at_s: float) -> list[ChangePoint]:
    tally = metrics_of(grown)
    if drafts := tally.counts.get("num_drafts"):
        known = [name for name in grown.positions if POSITIONS.get(name) == "drafted"]
        drafted = grown.positions[min(known)] if known else {}
        return [
            change
            for place, count in enumerate(tally.per_position)
            for change in watch_position(series, place + 1, count, drafted.get(place, drafts), at_s)
        ]
    length = grown.totals.get(_GAUGE, 0.0)  # SGLang counts no positions
    if length <= 0.0:
        return []
    name = "acceptance length"
    cusum = series.setdefault(name, Cusum(min_size=_GAUGE_POLLS, is_log=True))
    change = cusum.add(name, length, 1.0, at_s)
    return [] if change is None else [change]


def _figures(metrics: Metrics) -> Iterator[tuple[str, float, float, float]]:
    for name, pairs in ((TIME_PER_TOKEN, _TIMES), (PROMPT_TOKENS, _PROMPTS)):
        for over, under, size in pairs:
            if over in metrics.totals and under in metrics.totals:
                yield name, metrics.totals[over], metrics.totals[under], size
                break


def _figure_changes(series: dict[str, Cusum], grown: Metrics, at_s: float) -> Iterator[ChangePoint]:
    for name, over, under, size in _figures(grown):
        cusum = series.setdefault(name, Cusum(min_size=size, is_log=True))
        found = cusum.add(name, over, under, at_s)
        if found is not None:
            yield found


def causes_of(change: ChangePoint, state: WatchState) -> tuple[str, ...]:
    """Return the labels that a diagnosis of the time since the change finds likeliest."""
    now = Evidence(readings=[Reading(source="since the change")])
    before = Evidence(readings=[Reading(source="before the change")])
    metrics_of(state.recent).add_to(now, "since the change")
    metrics_of(state.usual).add_to(before, "before the change")
    if change.series.startswith("acceptance") and change.now < change.before:
        now.note("acceptance_dropped", True, change.words)
    if change.series == TIME_PER_TOKEN and change.now > change.before:
        now.note("slowed_down", True, change.words)
    if change.series == PROMPT_TOKENS:
        now.note("changed", ["traffic"], change.words)
    return tuple(
        ranked.scored.cause.label
        for ranked in diagnose(merge(now, as_reference(before))).causes[:MAX_CAUSES]
        if ranked.scored.cause.label != "healthy"
    )


def watch_text(state: WatchState) -> str:
    """Return the state in Prometheus's text format."""
    lines = [
        "# TYPE forerun_watch_change_points_total counter",
        f"forerun_watch_change_points_total {state.num_changes}",
        "# TYPE forerun_watch_failed_readings gauge",
        f"forerun_watch_failed_readings {state.num_failed}",
        "# TYPE forerun_watch_last_change_seconds gauge",
    ]
    latest: Mapping[str, ChangePoint] = {change.series: change for change in state.changes}
    lines += [
        f'forerun_watch_last_change_seconds{{series="{name}"}} {change.noticed_s:.0f}'
        for name, change in latest.items()
    ]
    lines.append("# TYPE forerun_watch_deviation gauge")
    lines += [
        f'forerun_watch_deviation{{series="{name}"}} {max(cusum.up, cusum.down):.3f}'
        for name, cusum in state.series.items()
    ]
    return "\n".join(lines) + "\n"
