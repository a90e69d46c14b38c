"""What the live page shows of a diagnosis, and the view of a vLLM server from its metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from forerun.bounded_read import parse_json
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import Evidence, Reading
from forerun.doctor.readers.prometheus import Metrics, metrics_of, read_page
from forerun.doctor.words import change_line, changes_of, headline
from forerun.errors import ForerunError, InvalidRequest, ServerUnavailable
from forerun.server.live_page import (
    LiveCause,
    LiveDiagnosis,
    LiveLoad,
    LivePoint,
    LivePosition,
    LiveSetup,
    LiveSnapshot,
    LiveTotals,
)

MIN_DIAGNOSED = 50
"""Steps of requests below which there is no diagnosis."""
MAX_DIAGNOSED = 40
"""Samples of the metrics; a diagnosis rests on what was counted since the oldest."""
MAX_CAUSES = 3
MAX_CHANGES = 3


class PageDiagnosis:
    """Diagnoses the metrics of our own server: call it with the text of its page."""

    def __init__(self) -> None:
        self._samples = deque([Metrics()], maxlen=MAX_DIAGNOSED)

    def __call__(self, page: str) -> LiveDiagnosis | None:
        """Return a diagnosis of what was counted lately; None without enough or new steps."""
        metrics = read_page(page).metrics
        growth = metrics.since(self._samples[0])
        num_steps, num_new = map(_count_steps, (growth, metrics.since(self._samples[-1])))
        if not num_new or num_steps < MIN_DIAGNOSED:
            return None
        self._samples.append(metrics)
        return diagnose_metrics(growth, "forerun", num_steps)


def _count_steps(metrics: Metrics) -> int:
    return int(metrics.totals.get("forerun:sequence_steps", 0.0))


def diagnose_metrics(growth: Metrics, engine: str, num_steps: int) -> LiveDiagnosis:
    """Return the part of the diagnosis of counts that the live page shows.

    The speedup is left out: the page states it once, and a diagnosis rests on other steps.
    """
    found = diagnose(collect_evidence(growth, engine))
    return LiveDiagnosis(
        verdict=found.verdict,
        headline=headline(found, states_speedup=False),
        causes=tuple(
            LiveCause(
                label=item.scored.cause.label, score=item.scored.score, what=item.scored.cause.what
            )
            for item in found.causes[:MAX_CAUSES]
        ),
        changes=tuple(
            change_line(change, states_speedup=False) for change in changes_of(found)[:MAX_CHANGES]
        ),
        num_steps=num_steps,
    )


def collect_evidence(metrics: Metrics, engine: str) -> Evidence:
    """Return the evidence that a file of the same metrics gives."""
    source = f"metrics of {engine}"
    evidence = Evidence(readings=[Reading(source=source)])
    evidence.add("engine", engine, source)
    metrics_of(metrics).add_to(evidence, source)
    return evidence


_PREFIX = "vllm:spec_decode_num_"
HISTORY = 120
"""Samples that are kept; an open page makes about one a second."""
RECENT_S = 10.0
DIAGNOSIS_INTERVAL_S = 15.0
MIN_DRAFTS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsSample:
    """Metrics of a server at one point in time."""

    at_s: float
    metrics: Metrics

    def total(self, name: str) -> float:
        """Return a metric summed over its labels; 0 where the server does not have it."""
        return self.metrics.totals.get(name, 0.0)


class VllmView:
    """Snapshots of a vLLM server for the live page, without figures of single steps.

    `get` returns the body at a path of the server, or raises ServerUnavailable.
    """

    def __init__(
        self,
        get: Callable[[str], bytes],
        *,
        target: str,
        methods: Sequence[str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.get = get
        self.clock = clock
        self._setup = LiveSetup(
            engine="vllm", version="", target=target, methods=tuple(methods), max_context=None
        )
        self._started_s = clock()
        self._samples: deque[MetricsSample] = deque(maxlen=HISTORY)
        self._diagnosis: LiveDiagnosis | None = None
        self._diagnosed_s = -DIAGNOSIS_INTERVAL_S

    def snapshot(self) -> LiveSnapshot:
        """Read the metrics once and return a snapshot; an unreachable server adds no sample."""
        self._sample()
        now_s = self.clock()
        samples = list(self._samples) or [MetricsSample(at_s=now_s, metrics=Metrics())]
        latest, growth = samples[-1], _grown_in(samples)
        recent = [sample for sample in samples if sample.at_s >= now_s - RECENT_S]
        drafts = growth.totals.get(_PREFIX + "drafts", 0.0)
        accepted = growth.totals.get(_PREFIX + "accepted_tokens", 0.0)
        return LiveSnapshot(
            uptime_s=now_s - self._started_s,
            window_s=latest.at_s - samples[0].at_s,
            setup=self._setup,
            totals=LiveTotals(
                num_steps=int(latest.total(_PREFIX + "drafts")),
                num_drafted=int(latest.total(_PREFIX + "draft_tokens")),
                num_accepted=int(latest.total(_PREFIX + "accepted_tokens")),
                num_emitted=int(latest.total("vllm:generation_tokens")),
            ),
            load=LiveLoad(
                num_running=int(latest.total("vllm:num_requests_running")),
                num_waiting=int(latest.total("vllm:num_requests_waiting")),
                kv_share=latest.metrics.totals.get("vllm:kv_cache_usage_perc"),
            ),
            tokens_per_s=rate_of(recent),
            acceptance_length=1.0 + accepted / drafts if drafts else None,
            positions=positions_of(growth),
            history=tuple(
                _compute_point(before, after, now_s, self._setup.methods)
                for before, after in pairwise(samples)
                if after.total("vllm:generation_tokens") > before.total("vllm:generation_tokens")
            ),
            diagnosis=self._diagnosis,
        )

    def _sample(self) -> None:
        try:
            body = self.get("/metrics")
        except (InvalidRequest, ServerUnavailable):
            return
        page = read_page(body.decode(errors="replace"))
        if not self._samples:
            self._setup = replace(self._setup, version=_version(self.get))
        self._samples.append(MetricsSample(at_s=self.clock(), metrics=page.metrics))

    def diagnose(self) -> None:
        """Diagnose the counts since the first stored sample if the last diagnosis is old enough."""
        samples = list(self._samples)
        if not samples or self.clock() - self._diagnosed_s < DIAGNOSIS_INTERVAL_S:
            return
        growth = _grown_in(samples)
        drafts = int(growth.totals.get(_PREFIX + "drafts", 0.0))
        if drafts >= MIN_DRAFTS:
            self._diagnosed_s = self.clock()
            self._diagnosis = diagnose_metrics(growth, "vLLM", drafts)


def _grown_in(samples: Sequence[MetricsSample]) -> Metrics:
    return samples[-1].metrics.since(samples[0].metrics)


def rate_of(samples: Sequence[MetricsSample]) -> float:
    """Return output tokens per second between the first and the last sample."""
    if len(samples) < 2:
        return 0.0
    tokens = _grown_in(samples).totals.get("vllm:generation_tokens", 0.0)
    return tokens / max(1e-3, samples[-1].at_s - samples[0].at_s)


def positions_of(growth: Metrics) -> tuple[LivePosition, ...]:
    """Return acceptance by position from counters of vLLM, which always drafts K tokens."""
    drafts = int(growth.totals.get(_PREFIX + "drafts", 0.0))
    counts = growth.positions.get(_PREFIX + "accepted_tokens_per_pos", {})
    return tuple(
        LivePosition(position=index + 1, num_drafted=drafts, num_accepted=int(count))
        for index, count in sorted(counts.items())
        if drafts
    )


def _compute_point(
    before: MetricsSample, after: MetricsSample, now_s: float, methods: Sequence[str]
) -> LivePoint:
    """Return the figures of the time between two samples."""
    growth = after.metrics.since(before.metrics)
    drafts = growth.totals.get(_PREFIX + "drafts", 0.0)
    accepted = growth.totals.get(_PREFIX + "accepted_tokens", 0.0)
    method = methods[0] if methods and drafts else "plain"
    return LivePoint(
        age_s=max(0.0, now_s - before.at_s),
        tokens_per_s=rate_of((before, after)),
        num_running=after.total("vllm:num_requests_running"),
        acceptance_length=1.0 + accepted / drafts if drafts else None,
        num_speculative_tokens=growth.totals.get(_PREFIX + "draft_tokens", 0.0) / max(1.0, drafts),
        methods={method: max(1, int(drafts))},
    )


def _version(get: Callable[[str], bytes]) -> str:
    """Return the version that a vLLM server reports; empty if it reports none."""
    try:
        return str(parse_json(get("/version"), "the version")["version"])
    except (ForerunError, KeyError, TypeError):
        return ""
