"""Counts the steps of a vLLM server from the statistics that it gives to its loggers.

On vLLM's event loop a step is only put into a queue. A thread counts it, and reads the page of all
metrics for the watch. The names of statistics are those of vLLM 0.32 (`vllm/v1/metrics/stats.py`,
`vllm/v1/spec_decode/metrics.py`), which may change in any version: at the first exception the
plug-in says so once and switches itself off, while vLLM goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

import forerun
from forerun.doctor.live import PageDiagnosis
from forerun.doctor.readers.prometheus import read_page
from forerun.doctor.watch import WatchState, observe
from forerun.errors import EngineStopped
from forerun.server.live_page import Json, LivePage
from forerun.theory.acceptance import AcceptanceCounts
from forerun.trace.change_points import Incident

logger = logging.getLogger("vllm.plugins.forerun")
"""Below vLLM's own logger, whose handlers and format it has."""
NAME = f"forerun {forerun.__version__}, written for vLLM 0.32,"

MAX_QUEUED_STEPS = 8192
"""Steps that wait to be counted; a thread counts them every second."""
COUNT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 15.0
MAX_REQUESTS = 12
MAX_TIMES = 2000
MAX_CHANGES = 20


class VllmObserver(LivePage):
    """Counts steps, watches them and makes the snapshots of the page, from any thread.

    Counters are of the whole life of the server; `registry`, which is vLLM's, gets those that vLLM
    itself does not have. `config` is a VllmConfig.
    """

    def __init__(
        self,
        config: Any,
        vllm_version: str,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(PageDiagnosis("vLLM"), clock)
        self.vllm_version = vllm_version
        self.registry = registry
        self.model: str = config.model_config.served_model_name
        self.max_context: int = config.model_config.max_model_len
        self.max_running: int = config.scheduler_config.max_num_seqs
        drafting = config.speculative_config
        self.method = "" if drafting is None else str(drafting.method)
        self.k = 0 if drafting is None else int(drafting.num_speculative_tokens)
        self.failure: str | None = None
        self.num_cycles = self.num_emitted = self.num_prompt_rows = 0
        self.counts = AcceptanceCounts()
        self.changes: deque[Incident] = deque(maxlen=MAX_CHANGES)
        self.num_changes: Counter[str] = Counter()
        self._watch = WatchState(source=f"vLLM {self.model}")
        self._queue: deque[tuple[float, Any, Any, int]] = deque(maxlen=MAX_QUEUED_STEPS)
        self._begin(0)
        self._loads: dict[int, tuple[int, int, float]] = {}
        self._first_tokens: deque[float] = deque(maxlen=MAX_TIMES)
        self._gaps: deque[float] = deque(maxlen=MAX_TIMES)
        self._prefixes: deque[tuple[int, int]] = deque(maxlen=MAX_TIMES)
        self._finished: deque[tuple[float, Any]] = deque(maxlen=MAX_REQUESTS)
        registry.register(self)

    def _begin(self, second: int) -> None:
        """Begin the sums of a second; they cost less than counting every step by itself."""
        self._second = second
        self._drafted: Sequence[int] = ()
        self._accepted: Sequence[int] = ()
        self._num_sequences = self._num_tokens = 0

    # ------------------------------------------------------------------------ on vLLM's event loop

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, *_: Any, engine_idx: int = 0, **__: Any
    ) -> None:
        """Queue the statistics of a step, which vLLM does not change afterwards."""
        if self.failure is None:
            self._queue.append((self.clock(), scheduler_stats, iteration_stats, engine_idx))

    # ------------------------------------------------------------------------- on the other threads

    def start(self) -> None:
        """Count and watch until the process ends."""
        threading.Thread(target=self._run, name="forerun", daemon=True).start()

    def _run(self) -> None:
        watched_s = self.clock()
        while self.failure is None:
            time.sleep(COUNT_INTERVAL_S)
            self.drain()
            if self.clock() - watched_s >= WATCH_INTERVAL_S:
                watched_s = self.clock()
                self.watch(time.time())

    def fail(self, error: Exception) -> None:
        """Switch the plug-in off, and say why, once."""
        with self._reading:
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                self._queue.clear()
                words = "%s is off in vLLM %s, which goes on: %s"
                logger.error(words, NAME, self.vllm_version, self.failure, exc_info=error)

    def drain(self) -> None:
        with self._reading:
            try:
                while self._queue:
                    self._count(*self._queue.popleft())
                self._flush()
            except Exception as error:  # noqa: BLE001  # fields that this version does not have
                self.fail(error)

    def _count(self, at_s: float, scheduler: Any, iteration: Any, engine: int) -> None:
        if int(at_s) != self._second:
            self._flush()
            self._begin(int(at_s))
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            load = scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage
            self._loads[engine] = load
            prefix = scheduler.prefix_cache_stats
            if prefix is not None and prefix.queries:
                self._prefixes.append((prefix.hits, prefix.queries))
            if (drafted := scheduler.spec_decoding_stats) is not None:
                self._drafted = _add(self._drafted, drafted.num_draft_tokens_per_pos)
                self._accepted = _add(self._accepted, drafted.num_accepted_tokens_per_pos)
        if iteration is None:
            return
        gaps, firsts = iteration.inter_token_latencies_iter, iteration.time_to_first_tokens_iter
        self._gaps.extend(gaps)
        self._first_tokens.extend(firsts)
        self._finished.extend((at_s, request) for request in iteration.finished_requests)
        if num_sequences := len(gaps) + len(firsts):  # not all its requests were aborted
            self.num_cycles += 1
            self.num_emitted += iteration.num_generation_tokens
            self.num_prompt_rows += iteration.prompt_token_stats.computed
            self._num_sequences += num_sequences
            self._num_tokens += iteration.num_generation_tokens

    def _flush(self) -> None:
        """Add the steps of a second, or of a part of it, to the counts of the page."""
        counts = AcceptanceCounts.from_positions(self._drafted, self._accepted)
        num_drafting = counts.num_steps
        counts.steps[0, 0] = num_plain = max(0, self._num_sequences - num_drafting)
        self.counts += counts
        if counts.num_steps:
            if not self.figures.groups or self.figures.groups[-1][0] != self._second:
                self.figures.begin_group(self._second)
            group = self.figures.groups[-1][1]
            group.acceptance += counts
            group.num_tokens += self._num_tokens
            group.sum_k += self.k * counts.num_steps
            undrafted = "no proposal" if self.k else "plain"
            group.methods += Counter({self.method: num_drafting, undrafted: num_plain})
        self._begin(self._second)

    def watch(self, at_s: float) -> None:
        """Read the page of all metrics, and log what changed since the readings before."""
        try:
            found = observe(self._watch, read_page(self.read_metrics()).metrics, at_s)
        except Exception as error:  # noqa: BLE001  # vLLM goes on without the plug-in
            return self.fail(error)
        for incident in found:
            is_alarm = incident.kind == "alarm" and incident.resolved_s is None
            if is_alarm:
                self.changes.append(incident)
                self.num_changes[incident.changes[0].series] += 1
            causes = f"; likely: {', '.join(incident.causes)}" if incident.causes else ""
            level = logging.WARNING if is_alarm else logging.INFO
            logger.log(level, "%s%s", incident.words, causes)

    def read_metrics(self) -> str:
        return generate_latest(self.registry).decode()

    def read_changes(self) -> Iterable[Incident]:
        return self.changes.copy()

    def collect(self) -> list[Metric]:
        """Return the counters that vLLM does not have; none while the plug-in is off."""
        try:
            return self._build_families()
        except Exception as error:  # noqa: BLE001  # vLLM's own metrics go on
            self.fail(error)
            return []

    def _build_families(self) -> list[Metric]:
        with self._reading:
            self.drain()
            if self.failure is not None:
                return []
            steps, model, method = self.counts.drafting, self.model, self.method
            plans: list[tuple[Any, ...]] = [("plain", 0, self.counts.num_steps - steps.num_steps)]
            if method:
                plans.append((method, self.k, steps.num_steps))
            rows: dict[tuple[str, ...], list[tuple[Any, ...]]] = {
                ("cycles", "Steps that emitted tokens"): [(self.num_cycles,)],
                ("drafted_per_position", "Steps that drafted a position", "position"): [
                    *enumerate(steps.drafted_per_position)
                ],
                ("sequence_steps", "Steps by plan", "method", "num_speculative_tokens"): plans,
                ("change_points", "Changes for the worse", "series"): [*self.num_changes.items()],
            }
        families: list[Metric] = []
        for (name, text, *labels), values in rows.items():
            family = CounterMetricFamily(f"forerun:{name}", text, labels=("model_name", *labels))
            for *key, count in values:
                family.add_metric((model, *map(str, key)), count)
            families.append(family)
        return families

    def describe_engine(self, now_s: float) -> Json:
        """Return the setup, totals, load and latest requests; raises EngineStopped if it is off."""
        if self.failure is not None:
            raise EngineStopped(f"forerun is off, vLLM goes on: {self.failure}")
        loads = [*self._loads.values()]
        hits, queries = (sum(column) for column in zip((0, 0), *self._prefixes, strict=True))
        return {
            "setup": {
                "version": forerun.__version__,
                "target": self.model,
                "methods": [self.method] if self.method else [],
                "max_context": self.max_context,
                "has_chat": None,
            },
            "totals": {
                "num_steps": self.num_cycles,
                "num_drafted": self.counts.num_drafted,
                "num_accepted": self.counts.num_accepted,
                "num_emitted": self.num_emitted,
            },
            "load": {
                "num_running": sum(running for running, _, _ in loads),
                "num_waiting": sum(waiting for _, waiting, _ in loads),
                "max_running": self.max_running * max(1, len(loads)),
                "max_waiting": None,
                "kv_share": max((share for _, _, share in loads), default=0.0),
                "refused": None,
            },
            "latency": self.describe_latency(
                now_s, self._first_tokens, self._gaps, (hits, queries), self.num_prompt_rows
            ),
            "requests": [_describe_request(*found, now_s) for found in [*self._finished][::-1]],
            "shows_texts": False,
        }


def _describe_request(ended_s: float, request: Any, now_s: float) -> Json:
    """Return a finished request; vLLM gives its loggers neither its text nor its acceptance."""
    num_tokens, decode_s = request.num_generation_tokens, request.decode_time
    return {
        "request_id": str(request.request_id),
        "state": str(request.finish_reason),
        "age_s": max(0.0, now_s - ended_s) + request.e2e_latency,
        "num_prompt_tokens": request.num_prompt_tokens,
        "num_output_tokens": num_tokens,
        "num_drafted": 0,
        "acceptance_length": None,
        "draft_acceptance_rate": None,
        "ttft_s": max(0.0, request.e2e_latency - decode_s),  # with the time before vLLM's queue
        "tokens_per_s": (num_tokens - 1) / decode_s if decode_s > 0.0 and num_tokens > 1 else None,
        "head": "",
        "pieces": [],
    }


def _add(sums: Sequence[int], more: Sequence[int]) -> list[int]:
    return [one + other for one, other in zip_longest(sums, more, fillvalue=0)]
