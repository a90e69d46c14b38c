"""Metrics for Prometheus: with vLLM's names where the meaning is equal, and further ones.

Steps are counted in plain dictionaries on the engine's thread and converted when Prometheus asks,
so that a step does not pay for them.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import accumulate
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.engine.results import Completion, RequestOutput
from forerun.theory.acceptance import AcceptanceCounts
from forerun.trace.change_points import MIN_DRAFTS, Incident, Watcher, sample_positions

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
FAST_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
SLOW_S = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


COUNTERS: Mapping[str, tuple[str, ...]] = {
    "vllm:request_success": ("Finished requests by the reason of their end", "finished_reason"),
    "vllm:prompt_tokens": ("Prompt tokens of requests",),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the KV cache",),
    "vllm:prefix_cache_queries": ("Prompt tokens looked for in it",),
    "vllm:num_preemptions": ("Preempted sequences",),
    "forerun:http_responses": ("Responses by status", "status"),
}
"""Description of every counter of requests, and its labels beside the model."""
HISTOGRAMS: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token", FAST_S),
    "vllm:request_time_per_output_token_seconds": ("Mean per token after the first", FAST_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end", SLOW_S),
    "vllm:request_queue_time_seconds": ("From arrival to a place in the batch", FAST_S),
    "vllm:request_prefill_time_seconds": ("From a place in the batch to the first token", FAST_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last", SLOW_S),
    "vllm:request_prompt_tokens": ("Prompt tokens", TOKENS),
    "vllm:request_generation_tokens": ("Output tokens", TOKENS),
    "vllm:request_max_num_generation_tokens": ("Output tokens of the longest sample", TOKENS),
}
MAX_GAPS = 2000
MAX_CHANGES = 20
MAX_OPEN = 4096
"""Sequences whose last output is remembered; aborted ones are forgotten as others come."""


class StepTotals:
    """An observer that adds up all steps of an engine.

    Attributes:
        changes: the latest falls of acceptance, as `forerun diagnose --watch` finds them.
        num_changes: how many there were, by the figure that fell first.
        outcomes: sequences' steps by (depth drafted, nodes accepted).
        plans: sequences' steps by (drafter or "plain", most nodes that the plan allowed).
        num_prefill_rows: prompt tokens fed, those read again after a preemption included.
        seconds: of the cycles that emitted tokens, by phase: draft, verify, other.
        gaps: how many times between two outputs of a sequence lie in each bucket of `FAST_S`, the
            last one without an end. An output is what a step emits, as in vLLM.
    """

    is_required = False
    wants_logits = False

    def __init__(self) -> None:
        self.outcomes: dict[tuple[int, int], int] = {}
        self.plans: dict[tuple[str, int], int] = {}
        self.drafted: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self.num_emitted = 0
        self.num_prefill_rows = 0
        self.seconds = {"draft": 0.0, "verify": 0.0, "other": 0.0}
        self.num_cycles = 0
        self.gaps = [0] * (len(FAST_S) + 1)
        self.gaps_s = 0.0
        self.recent_gaps: deque[float] = deque(maxlen=MAX_GAPS)
        self.changes: deque[Incident] = deque(maxlen=MAX_CHANGES)
        self.num_changes: dict[str, int] = {}
        self._watcher = Watcher()
        self._fresh, self._num_fresh = AcceptanceCounts(), 0
        self._last_output_s: dict[str, float] = {}

    def observe(self, step: ObservedStep) -> None:
        if not step.records:
            self.num_prefill_rows += sum(entry.num_chain for entry in step.prefilling)
            return
        first = step.records[0]
        self.num_cycles += 1
        self.num_prefill_rows += first.num_prefill_rows
        self.seconds["draft"] += first.draft_s
        self.seconds["verify"] += first.verify_s
        self.seconds["other"] += first.other_s
        for record in step.records:
            add(self.outcomes, (record.depth_drafted, record.num_accepted), 1)
            add(self.plans, (record.method, record.k_budget), 1)
            if record.num_drafted:
                self._fresh.add(record.depth_drafted, record.num_accepted)
                self._num_fresh += 1
                add(self.drafted, record.method, record.num_drafted)
                add(self.accepted, record.method, record.num_accepted)
            self.num_emitted += record.num_emitted
        if self._num_fresh >= MIN_DRAFTS:
            self._find_changes()
        self._add_gaps(step, first.t_s + first.cycle_s)

    def _find_changes(self) -> None:
        """Look for a change of acceptance, in counts of many requests."""
        fresh, self._fresh, self._num_fresh = self._fresh, AcceptanceCounts(), 0
        samples = sample_positions(fresh.accepted_per_position, fresh.drafted_per_position)
        for incident in self._watcher.add(samples, time.time()):
            if incident.kind == "alarm" and incident.resolved_s is None:
                self.changes.append(incident)
                add(self.num_changes, incident.changes[0].series, 1)

    def _add_gaps(self, step: ObservedStep, ended_s: float) -> None:
        last = self._last_output_s
        for entry, record in zip(step.emitting, step.records, strict=True):
            before_s = last.pop(record.request_id, None)
            if before_s is not None and record.step:
                gap_s = max(0.0, ended_s - before_s)
                self.gaps[bisect_left(FAST_S, gap_s)] += 1
                self.gaps_s += gap_s
                self.recent_gaps.append(gap_s)
            if entry.sequence.stop is None:
                last[record.request_id] = ended_s
        if len(last) > MAX_OPEN:
            del last[next(iter(last))]

    @property
    def acceptance(self) -> AcceptanceCounts:
        """Counts of the steps that drafted."""
        counts = AcceptanceCounts(num_drafted=sum(self.drafted.copy().values()))
        counts.steps.update({key: n for key, n in self.outcomes.copy().items() if key[0] > 0})
        return counts


def add(totals: dict[Any, int], key: object, count: int) -> None:
    """Add to a total, which starts at 0 if it does not exist."""
    totals[key] = totals.get(key, 0) + count


class ServerMetrics:
    """The metrics of a server over one engine.

    Requests are counted as they end; the totals of the engine are converted when Prometheus asks.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self.engine = engine
        self.labels = {"model_name": model, "engine": "0"}
        self.totals = StepTotals()
        engine.observers.append(self.totals)
        disable_created_metrics()  # type: ignore[no-untyped-call]  # has no annotations
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._counters = {
            name: Counter(name, text, (*LABELS, *labels), registry=self.registry)
            for name, (text, *labels) in COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(name, text, LABELS, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }

    def _add(self, name: str, count: int, **labels: str) -> None:
        self._counters[name].labels(**self.labels, **labels).inc(count)

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].labels(**self.labels).observe(value)

    def finished(self, output: RequestOutput) -> None:
        """Count a finished request, all of whose samples have ended."""
        num_prompt = len(output.prompt_token_ids)
        longest = max(len(completion.token_ids) for completion in output.completions)
        self._add("vllm:prompt_tokens", num_prompt)
        self._observe("vllm:request_prompt_tokens", num_prompt)
        self._observe("vllm:request_max_num_generation_tokens", longest)
        for completion in output.completions:
            self._add("vllm:request_success", 1, finished_reason=completion.finish_reason)
            self._add("vllm:prefix_cache_queries", num_prompt)
            self._add("vllm:prefix_cache_hits", completion.num_cached_tokens)
            self._add("vllm:num_preemptions", completion.num_preemptions)
            self._observe("vllm:request_generation_tokens", len(completion.token_ids))
            self._observe("vllm:e2e_request_latency_seconds", completion.total_s)
            self._observe_times(completion)

    def _observe_times(self, completion: Completion) -> None:
        ttft_s, prefill_s = completion.ttft_s, completion.prefill_s
        if ttft_s is None or prefill_s is None:
            return
        decode_s = max(0.0, completion.total_s - ttft_s)
        self._observe("vllm:time_to_first_token_seconds", ttft_s)
        self._observe("vllm:request_prefill_time_seconds", prefill_s)
        self._observe("vllm:request_queue_time_seconds", max(0.0, ttft_s - prefill_s))
        self._observe("vllm:request_decode_time_seconds", decode_s)
        if (num_gaps := len(completion.token_ids) - 1) > 0:
            self._observe("vllm:request_time_per_output_token_seconds", decode_s / num_gaps)

    def aborted(self, num_samples: int) -> None:
        """Count the samples of a request whose client disconnected."""
        self._add("vllm:request_success", num_samples, finished_reason="abort")

    def responded(self, status: int) -> None:
        self._add("forerun:http_responses", 1, status=str(status))

    def refusals(self) -> dict[str, int]:
        """Return how many responses were errors, by status; a client that left is none."""
        (family,) = self._counters["forerun:http_responses"].collect()
        counts = {s.labels["status"]: int(s.value) for s in family.samples}
        return {status: n for status, n in counts.items() if status >= "400" and status != "499"}

    def kv_usage(self) -> float:
        """Return the share of the KV rows that running sequences use, from 0 to 1."""
        engine, rows = self.engine, 0
        for sequence in list(engine.scheduler.running):
            context = sequence.context
            with suppress(AttributeError):  # the engine's thread closed it meanwhile
                rows += 0 if context is None else context.num_cached
        return rows / (engine.config.num_slots * engine.max_context)

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Collect gauges of the present state and counters of all steps."""
        engine, totals = self.engine, self.totals
        stats, counts, gauge = engine.stats(), totals.acceptance, GaugeMetricFamily
        used = self.kv_usage()
        for name, text, value in (
            ("vllm:num_requests_running", "Sequences decoded", stats.num_running),
            ("vllm:num_requests_waiting", "Sequences that wait", stats.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the KV rows in use, 1 is all", used),
        ):
            yield self._build_family(name, text, {(): value}, kind=gauge)
        prefix = "vllm:spec_decode_num_"
        for name, text, value in (
            ("vllm:generation_tokens", "Output tokens", totals.num_emitted),
            ("forerun:prefill_rows", "Prompt rows fed", totals.num_prefill_rows),
            (prefix + "drafts", "Steps that drafted", counts.num_steps),
            (prefix + "draft_tokens", "Draft tokens", counts.num_drafted),
            (prefix + "accepted_tokens", "Accepted tokens", counts.num_accepted),
            ("forerun:cycles", "Target passes that emitted", totals.num_cycles),
        ):
            yield self._build_family(name, text, {(): value})
        accepted = dict(enumerate(counts.accepted_per_position))
        drafted = dict(enumerate(counts.drafted_per_position))
        through = "Steps that accepted through a position"
        changes = totals.num_changes
        for name, text, label, values in (
            (prefix + "accepted_tokens_per_pos", through, "position", accepted),
            ("forerun:drafted_per_position", "Steps that drafted a position", "position", drafted),
            ("forerun:draft_tokens", "Draft tokens by drafter", "method", totals.drafted),
            ("forerun:accepted_tokens", "Accepted by drafter", "method", totals.accepted),
            ("forerun:cycle_seconds", "Seconds of steps by phase", "phase", totals.seconds),
            ("forerun:change_points", "Falls of acceptance", "series", changes),
        ):
            found: Mapping[Any, float] = values.copy()
            yield self._build_family(name, text, {(key,): n for key, n in found.items()}, label)
        plan = ("method", "num_speculative_tokens")
        yield self._build_family(
            "forerun:sequence_steps", "Steps by plan", totals.plans.copy(), *plan
        )
        yield self._build_gaps()

    def _build_gaps(self) -> Metric:
        totals = self.totals
        family = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds",
            "From one output of a sequence to its next",
            labels=LABELS,
        )
        ends = [*map(str, map(float, FAST_S)), "+Inf"]
        buckets = [*zip(ends, accumulate(totals.gaps.copy()), strict=True)]
        family.add_metric(tuple(self.labels.values()), buckets, sum_value=totals.gaps_s)
        return family

    def _build_family(
        self,
        name: str,
        text: str,
        values: Mapping[Any, float],
        *labels: str,
        kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
    ) -> Metric:
        family = kind(name, text, labels=(*LABELS, *labels))
        for key, value in values.items():
            family.add_metric((*self.labels.values(), *map(str, key)), value)
        return family
