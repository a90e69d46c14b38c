"""Counts the steps of a vLLM server from the statistics that it gives to its loggers.

On vLLM's event loop a step is only put into a queue. A thread counts it, and reads the page of all
metrics for the watch. The names of statistics are those of vLLM 0.32 (`vllm/v1/metrics/stats.py`,
`vllm/v1/spec_decode/metrics.py`), which promises none of them: at the first exception the plug-in
says so once and switches itself off, while vLLM goes on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric

import forerun
from forerun.doctor.live import PageDiagnosis
from forerun.doctor.readers.prometheus import read_page
from forerun.doctor.watch import WatchState, observe
from forerun.errors import EngineStopped
from forerun.server.live_figures import RECENT_S
from forerun.server.live_page import Json, LivePage, compute_quantiles
from forerun.theory.acceptance import AcceptanceCounts
from forerun.trace.change_points import Incident

logger = logging.getLogger("vllm.plugins.forerun")
"""Below vLLM's own logger, whose handlers and format it has."""

MAX_QUEUED_STEPS = 8192
"""Steps that wait to be counted; a thread counts them every second."""
COUNT_INTERVAL_S = 1.0
WATCH_INTERVAL_S = 15.0
MAX_REQUESTS = 12
MAX_TIMES = 2000
MAX_CHANGES = 20
PLAIN = "plain"
PLAN = ("method", "num_speculative_tokens")
WRITTEN_FOR = "0.32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is served.

    Attributes:
        model: its name in requests.
        method: vLLM's name of the drafter; "" without speculation.
        k: most tokens drafted per step.
    """

    model: str
    method: str
    k: int
    max_running: int
    max_context: int
    vllm_version: str

    @classmethod
    def of(cls, config: Any, vllm_version: str) -> Setup:
        """Return the setup that a VllmConfig describes."""
        drafting = config.speculative_config
        return cls(
            model=config.model_config.served_model_name,
            method="" if drafting is None else str(drafting.method),
            k=0 if drafting is None else int(drafting.num_speculative_tokens),
            max_running=config.scheduler_config.max_num_seqs,
            max_context=config.model_config.max_model_len,
            vllm_version=vllm_version,
        )


class QueuedStep(NamedTuple):
    """Statistics of one step of one engine, and when they came."""

    at_s: float
    scheduler: Any
    iteration: Any
    engine: int


@dataclass(slots=True, kw_only=True)
class Sums:
    """Sums over the steps of one second, which cost less than counting every step by itself.

    Attributes:
        drafted: sequences that drafted each position; `accepted` through each.
        num_sequences: that emitted tokens, in all steps together.
    """

    second: int
    drafted: Sequence[int] = ()
    accepted: Sequence[int] = ()
    num_sequences: int = 0
    num_tokens: int = 0


class VllmObserver(LivePage):
    """Counts steps, watches them and makes the snapshots of the page.

    Counters are of the whole life of the server and those that vLLM does not show itself; they are
    in `registry`, which is vLLM's. Any thread may call every method.
    """

    def __init__(
        self,
        setup: Setup,
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(PageDiagnosis("vLLM"), clock)
        self.setup = setup
        self.registry = registry
        self.failure: str | None = None
        self.num_cycles = self.num_emitted = self.num_prompt_rows = 0
        self.counts = AcceptanceCounts()
        self._sums = Sums(second=0)
        self.changes: deque[Incident] = deque(maxlen=MAX_CHANGES)
        self.num_changes: Counter[str] = Counter()
        self._watch = WatchState(source=f"vLLM {setup.model}")
        self._queue: deque[QueuedStep] = deque(maxlen=MAX_QUEUED_STEPS)
        self._loads: dict[int, tuple[int, int, float]] = {}
        self._first_tokens: deque[float] = deque(maxlen=MAX_TIMES)
        self._gaps: deque[float] = deque(maxlen=MAX_TIMES)
        self._prefixes: deque[tuple[int, int]] = deque(maxlen=MAX_TIMES)
        self._prefilled: deque[tuple[float, int]] = deque()
        self._finished: deque[tuple[float, Any]] = deque(maxlen=MAX_REQUESTS)
        registry.register(self)

    # ------------------------------------------------------------------------ on vLLM's event loop

    def record(self, scheduler: Any, iteration: Any, engine: int = 0) -> None:
        """Queue the statistics of a step, which vLLM changes no more."""
        if self.failure is None:
            self._queue.append(QueuedStep(self.clock(), scheduler, iteration, engine))

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
                logger.error(
                    "forerun %s, written for vLLM %s, is off in vLLM %s, which goes on: %s",
                    *(forerun.__version__, WRITTEN_FOR, self.setup.vllm_version, self.failure),
                    exc_info=error,
                )

    def drain(self) -> None:
        with self._reading:
            try:
                while self._queue:
                    self._count(self._queue.popleft())
                self._flush()
            except Exception as error:  # noqa: BLE001  # fields that this version does not have
                self.fail(error)

    def _count(self, step: QueuedStep) -> None:
        scheduler, iteration, sums = step.scheduler, step.iteration, self._sums
        if int(step.at_s) != sums.second:
            self._flush()
            sums = self._sums = Sums(second=int(step.at_s))
        if scheduler is not None:
            waiting = scheduler.num_waiting_reqs + scheduler.num_skipped_waiting_reqs
            load = scheduler.num_running_reqs, waiting, scheduler.kv_cache_usage
            self._loads[step.engine] = load
            prefix = scheduler.prefix_cache_stats
            if prefix is not None and prefix.queries:
                self._prefixes.append((prefix.hits, prefix.queries))
            if (drafted := scheduler.spec_decoding_stats) is not None:
                sums.drafted = _add(sums.drafted, drafted.num_draft_tokens_per_pos)
                sums.accepted = _add(sums.accepted, drafted.num_accepted_tokens_per_pos)
        if iteration is None:
            return
        gaps, firsts = iteration.inter_token_latencies_iter, iteration.time_to_first_tokens_iter
        self._gaps.extend(gaps)
        self._first_tokens.extend(firsts)
        self._finished.extend((step.at_s, request) for request in iteration.finished_requests)
        if num_sequences := len(gaps) + len(firsts):  # not all its requests were aborted
            self.num_cycles += 1
            self.num_emitted += iteration.num_generation_tokens
            self.num_prompt_rows += iteration.prompt_token_stats.computed
            sums.num_sequences += num_sequences
            sums.num_tokens += iteration.num_generation_tokens

    def _flush(self) -> None:
        """Add the steps of a second, or of a part of it, to the counts of the page."""
        sums, self._sums = self._sums, Sums(second=self._sums.second)
        counts = AcceptanceCounts.from_positions(sums.drafted, sums.accepted)
        num_drafting = counts.num_steps
        counts.steps[0, 0] = max(0, sums.num_sequences - num_drafting)
        self.counts += counts
        if not counts.num_steps:
            return
        if not self.figures.groups or self.figures.groups[-1][0] != sums.second:
            self.figures.begin_group(sums.second)
        group, k = self.figures.groups[-1][1], self.setup.k
        group.acceptance += counts
        group.num_tokens += sums.num_tokens
        group.sum_k += k * counts.num_steps
        undrafted = "no proposal" if k else PLAIN
        group.methods += Counter(
            {self.setup.method: num_drafting, undrafted: counts.steps[0, 0]}
        )  # of which a sum keeps what is above 0

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
            logger.log(
                logging.WARNING if is_alarm else logging.INFO, "%s%s", incident.words, causes
            )

    def read_metrics(self) -> str:
        return generate_latest(self.registry).decode()

    def read_changes(self) -> Iterable[Incident]:
        return self.changes.copy()

    def collect(self) -> list[Metric]:
        """Return the counters that vLLM does not have; none while the plug-in is off."""
        with self._reading:
            self.drain()
            if self.failure is not None:
                return []
            steps, setup, by_method = self.counts.drafting, self.setup, ("method",)
            plans = {(PLAIN, 0): self.counts.num_steps - steps.num_steps}
            if setup.method:
                plans[setup.method, setup.k] = steps.num_steps
            drafted, accepted = (
                {(setup.method,): count} if setup.method else {}
                for count in (steps.num_drafted, steps.num_accepted)
            )
            places = {(place,): n for place, n in enumerate(steps.drafted_per_position)}
            changes = {(series,): n for series, n in self.num_changes.items()}
            return [
                self._build("cycles", "Steps that emitted tokens", (), {(): self.num_cycles}),
                self._build("sequence_steps", "Steps of sequences by plan", PLAN, plans),
                self._build("drafted_per_position", "Drafted so deep", ("position",), places),
                self._build("draft_tokens", "Draft tokens by drafter", by_method, drafted),
                self._build("accepted_tokens", "Accepted by drafter", by_method, accepted),
                self._build("change_points", "Changes for the worse", ("series",), changes),
            ]

    def _build(
        self, name: str, text: str, labels: Sequence[str], values: Mapping[Any, int]
    ) -> Metric:
        family = CounterMetricFamily(f"forerun:{name}", text, labels=("model_name", *labels))
        for key, value in values.items():
            family.add_metric((self.setup.model, *map(str, key)), value)
        return family

    def describe_engine(self, now_s: float) -> Json:
        """Return the setup, totals, load and latest requests; raises EngineStopped if it is off."""
        if self.failure is not None:
            raise EngineStopped(f"forerun is off, vLLM goes on: {self.failure}")
        setup, loads = self.setup, [*self._loads.values()]
        return {
            "setup": {
                "version": forerun.__version__,
                "target": setup.model,
                "methods": [setup.method] if setup.method else [],
                "max_context": setup.max_context,
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
                "max_running": setup.max_running * max(1, len(loads)),
                "max_waiting": None,
                "kv_share": max((share for _, _, share in loads), default=0.0),
                "refused": None,
            },
            "latency": self._describe_latency(now_s),
            "requests": [_describe_request(*found, now_s) for found in [*self._finished][::-1]],
            "shows_texts": False,
        }

    def _describe_latency(self, now_s: float) -> Json:
        hits, queries = (sum(column) for column in zip((0, 0), *self._prefixes, strict=True))
        fed = self._prefilled
        fed.append((now_s, self.num_prompt_rows))
        while len(fed) > 2 and fed[1][0] <= now_s - RECENT_S:
            fed.popleft()
        (since_s, before), (_, now) = fed[0], fed[-1]
        return {
            "ttft": compute_quantiles([*self._first_tokens]),
            "prefix_hit_share": hits / queries if queries else None,
            "gap": compute_quantiles([*self._gaps]),
            "prompt_tokens_per_s": (now - before) / (now_s - since_s) if now_s > since_s else None,
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
