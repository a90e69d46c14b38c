"""Observer of an engine for the live page, with little cost per step.

On the engine's thread a step is only put into a bounded queue. Figures, texts and the diagnosis are
made from it by the thread that reads a snapshot, so it costs nothing more while no page is open.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from prometheus_client.core import GaugeMetricFamily, Metric

import forerun
from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.engine.sequence import Sequence
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.server.live_figures import RECENT_S, WINDOW_S, LiveFigures
from forerun.server.live_page import (
    LiveDiagnosis,
    LiveLatency,
    LiveLoad,
    LivePiece,
    LiveQuantiles,
    LiveRequest,
    LiveSetup,
    LiveSnapshot,
    LiveTotals,
    Origin,
)
from forerun.server.metrics import LABELS, ServerMetrics
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord

MAX_QUEUED_STEPS = 8192
"""Steps that wait for a reader; without one the oldest are dropped."""
DIAGNOSIS_INTERVAL_S = 15.0
MAX_REQUESTS = 12
MAX_PROMPT_TOKENS = 60
"""Tokens at the end of a prompt that are shown."""
HEAD_TOKENS = 32
"""Tokens at the end of a prompt that name its request, where no message of a user does."""
MAX_HEAD = 200
"""Characters of a user's message that name its request."""
MAX_MESSAGES = 1024
"""Requests whose message is kept until they are shown."""
MAX_FIRST_TOKENS = 500
"""Latest requests over which times to the first token are summed up."""
MAX_CHARACTERS = 4000
"""Most characters of an output that are shown; a longer output is cut at its beginning."""

Diagnose = Callable[[str], LiveDiagnosis | None]
"""Makes the diagnosis of a page of metrics; None where it has nothing new to say."""


def origins_of(record: StepRecord) -> list[Origin]:
    """Return the source of each token that a step emitted."""
    if not record.num_drafted:
        return ["plain"] * record.num_emitted
    last: dict[str, Origin] = {"recovered": "recovered", "bonus": "bonus"}
    accepted: list[Origin] = ["accepted"] * (record.num_emitted - 1)
    return [*accepted, last.get(record.last_token_source, "accepted")]


class FirstToken(NamedTuple):
    """Time to the first token of a request, its prompt tokens, and those found in the KV cache."""

    ttft_s: float
    num_prompt: int
    num_cached: int

    @classmethod
    def of(cls, sequence: Sequence) -> FirstToken:
        return cls(_ttft_of(sequence) or 0.0, sequence.num_prompt, sequence.num_cached)


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """One of the latest sequences, with its queued steps and the text of the steps read so far."""

    sequence: Sequence
    steps: deque[StepRecord] = field(default_factory=deque)
    pieces: deque[LivePiece] = field(default_factory=deque)
    num_read: int = 0
    num_characters: int = 0
    detokenizer: Detokenizer | None = None
    head: str | None = None

    def read(self, tokenizer: Tokenizer) -> None:
        """Convert the steps since the last call to text, separated by the source of the tokens."""
        if self.detokenizer is None:
            self.detokenizer = Detokenizer(tokenizer)
        sequence = self.sequence
        while self.steps:
            record = self.steps.popleft()
            start = sequence.num_prompt + self.num_read
            self.num_read += record.num_emitted
            tokens = sequence.ids[start : start + record.num_emitted]
            for token, origin in zip(tokens, origins_of(record), strict=False):
                self._append(self.detokenizer.append(token), origin)
        while self.num_characters > MAX_CHARACTERS:
            self.num_characters -= len(self.pieces.popleft().text)

    def _append(self, text: str, origin: Origin) -> None:
        if not text:
            return
        self.num_characters += len(text)
        if self.pieces and self.pieces[-1].origin == origin:
            text = self.pieces.pop().text + text
        self.pieces.append(LivePiece(text=text, origin=origin))


class LiveView:
    """A step observer that provides the snapshots shown on the live page.

    Other threads read only the counts of the engine. The counts and the diagnosis of the page are
    those of `metrics`, and the speedup of the page is added to them.
    """

    is_required = False
    wants_logits = False

    def __init__(
        self,
        engine: Engine,
        *,
        target: str,
        metrics: ServerMetrics,
        shows_texts: bool = True,
        diagnose: Diagnose | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.target = target
        self.metrics = metrics
        self.shows_texts = shows_texts
        self._diagnose = diagnose
        self.clock = clock
        self.figures = LiveFigures()
        self._started_s = clock()
        self._queue: deque[tuple[StepRecord, ...]] = deque(maxlen=MAX_QUEUED_STEPS)
        self._watched: dict[str, WatchedRequest] = {}
        self._first_tokens: deque[FirstToken] = deque(maxlen=MAX_FIRST_TOKENS)
        self._prefilled: deque[tuple[float, int]] = deque()
        self._messages: deque[tuple[str, str]] = deque(maxlen=MAX_MESSAGES)
        self._reading = threading.Lock()
        self._diagnosing = threading.Lock()
        self._diagnosis: LiveDiagnosis | None = None
        self._diagnosed_s = -DIAGNOSIS_INTERVAL_S
        metrics.registry.register(self)

    # ------------------------------------------------------------------ on the engine's own thread

    def observe(self, step: ObservedStep) -> None:
        """Queue the records of a step, and assign them to their requests."""
        for entry in step.prefilling:
            self._watch(entry.sequence)
        if not step.records:
            return
        self._queue.append(tuple(step.records))
        watched = self._watched
        for entry, record in zip(step.emitting, step.records, strict=True):
            found = watched.get(record.request_id)
            sequence = entry.sequence
            if found is None or found.sequence is not sequence:
                found = self._watch(sequence)
            if sequence.num_output == record.num_emitted:
                self._first_tokens.append(FirstToken.of(sequence))
            if self.shows_texts:
                found.steps.append(record)

    def _watch(self, sequence: Sequence) -> WatchedRequest:
        found = self._watched.get(sequence.key)
        if found is not None and found.sequence is sequence:
            return found
        self._watched.pop(sequence.key, None)
        found = self._watched[sequence.key] = WatchedRequest(sequence)
        if len(self._watched) > MAX_REQUESTS:
            del self._watched[next(iter(self._watched))]
        return found

    # -------------------------------------------------------------------------------- on any thread

    def snapshot(self) -> LiveSnapshot:
        """Return a snapshot of the latest figures; any thread but the engine's may call it."""
        with self._reading:
            self._drain()
            now_s = self.clock()
            figures = self.figures
            counts = figures.counts
            changes = [*self.metrics.totals.changes.copy()]
            return LiveSnapshot(
                uptime_s=now_s - self._started_s,
                window_s=float(min(WINDOW_S, len(figures.slices))),
                setup=self._setup(),
                totals=self._totals(),
                load=self._load(),
                tokens_per_s=figures.tokens_per_s(now_s),
                speedup=figures.speedup(),
                acceptance_length=counts.acceptance_length,
                positions=tuple(figures.positions()),
                token_times=figures.token_times(),
                latency=self._latency(now_s),
                history=tuple(piece.point(now_s) for piece in figures.slices),
                requests=tuple(self._requests(now_s)),
                shows_texts=self.shows_texts,
                diagnosis=self._diagnosis,
                last_change=changes[-1].words if changes else None,
                last_change_age_s=time.time() - changes[-1].noticed_s if changes else None,
            )

    def _drain(self) -> None:
        """Count the steps that were queued since the last call."""
        for _ in range(MAX_QUEUED_STEPS):
            try:
                records = self._queue.popleft()
            except IndexError:
                return
            self.figures.add(records)

    def collect(self) -> Iterator[Metric]:
        """Yield the speedup that the page states, for `/metrics`; no value before it is known."""
        with self._reading:
            self._drain()
            found = self.figures.speedup()
        for name, text, value in (
            ("forerun:speedup", "Rate of the latest decode steps over plain ones", "value"),
            ("forerun:speedup_low", "Lower end of its 95% interval", "low"),
            ("forerun:speedup_high", "Upper end of its 95% interval", "high"),
            ("forerun:plain_token_seconds", "Time per token of plain steps", "plain_s"),
        ):
            family = GaugeMetricFamily(name, text, labels=LABELS)
            if found is not None:
                family.add_metric([*self.metrics.labels.values()], getattr(found, value))
            yield family

    def _totals(self) -> LiveTotals:
        totals = self.metrics.totals
        counts = totals.acceptance
        return LiveTotals(
            num_steps=totals.num_cycles,
            num_drafted=counts.num_drafted,
            num_accepted=counts.num_accepted,
            num_emitted=totals.num_emitted,
        )

    def _setup(self) -> LiveSetup:
        capabilities = self.engine.capabilities()
        return LiveSetup(
            engine="forerun",
            version=forerun.__version__,
            target=self.target,
            methods=capabilities.methods,
            max_context=capabilities.max_context,
            has_chat=self.engine.tokenizer.definition.chat_template is not None,
        )

    def _load(self) -> LiveLoad:
        scheduler, config = self.engine.scheduler, self.engine.config
        running = list(scheduler.running)
        num_tokens = sum(len(sequence.ids) for sequence in running)
        max_tokens = config.max_kv_tokens or config.max_batch * self.engine.max_context
        return LiveLoad(
            num_running=len(running),
            num_waiting=len(scheduler.waiting),
            max_running=config.max_batch,
            max_waiting=config.max_waiting,
            num_kv_tokens=num_tokens,
            max_kv_tokens=max_tokens,
            kv_share=min(1.0, num_tokens / max_tokens),
            refused=self.metrics.refusals(),
        )

    def _latency(self, now_s: float) -> LiveLatency:
        firsts = list(self._first_tokens.copy())
        num_prompt = sum(first.num_prompt for first in firsts)
        num_cached = sum(first.num_cached for first in firsts)
        totals, fed = self.metrics.totals, self._prefilled
        fed.append((now_s, totals.num_prefill_rows))
        while len(fed) > 2 and fed[1][0] <= now_s - RECENT_S:
            fed.popleft()
        (since_s, before), (_, now) = fed[0], fed[-1]
        return LiveLatency(
            ttft=_quantiles_of([first.ttft_s for first in firsts]),
            prefix_hit_share=num_cached / num_prompt if num_prompt else None,
            gap=_quantiles_of(list(totals.recent_gaps.copy())),
            prompt_tokens_per_s=(now - before) / (now_s - since_s) if now_s > since_s else None,
        )

    def _requests(self, now_s: float) -> Iterator[LiveRequest]:
        for found in reversed(list(self._watched.values())):
            sequence = found.sequence
            # The copy is taken at once, while the engine's thread may be counting.
            counts = AcceptanceCounts(
                sequence.acceptance.num_drafted, Counter(dict(sequence.acceptance.steps))
            )
            num_steps = counts.num_steps
            yield LiveRequest(
                request_id=sequence.key,
                state=state_of(sequence),
                age_s=max(0.0, now_s - sequence.arrived_at_s),
                num_prompt_tokens=sequence.num_prompt,
                num_output_tokens=sequence.num_output,
                num_drafted=counts.num_drafted,
                acceptance_length=sequence.num_output / num_steps if num_steps else None,
                draft_acceptance_rate=counts.draft_acceptance_rate,
                ttft_s=_ttft_of(sequence),
                tokens_per_s=rate_of(sequence, now_s),
                head=self._head(found) if self.shows_texts else "",
                pieces=self._pieces(found) if self.shows_texts else (),
            )

    def _head(self, found: WatchedRequest) -> str:
        if found.head is None:  # the message may come after the first step
            found.head = dict(self._messages.copy()).get(found.sequence.request_id)
        return found.head or self._end_of_prompt(found.sequence, HEAD_TOKENS)

    def _end_of_prompt(self, sequence: Sequence, num_tokens: int) -> str:
        end = sequence.num_prompt
        shortened = "… " if end > num_tokens else ""
        ids = sequence.ids[max(0, end - num_tokens) : end]
        return shortened + self.engine.tokenizer.decode(ids)

    def _pieces(self, found: WatchedRequest) -> tuple[LivePiece, ...]:
        found.read(self.engine.tokenizer)
        prompt = self._end_of_prompt(found.sequence, MAX_PROMPT_TOKENS)
        return (LivePiece(text=prompt, origin="prompt"), *found.pieces)

    def add_message(self, request_ids: Iterable[str], text: str | None) -> None:
        """Name requests by the last message of their user; any thread may call this."""
        if self.shows_texts and text:
            self._messages.extend((request_id, text[:MAX_HEAD]) for request_id in request_ids)

    def diagnose(self) -> None:
        """Diagnose the latest metrics, if there are new steps and the last diagnosis is old enough.

        It takes some ten milliseconds; call it on a thread on which nothing waits.
        """
        if self._diagnose is None or not self._diagnosing.acquire(blocking=False):
            return
        try:
            now_s = self.clock()
            if now_s - self._diagnosed_s < DIAGNOSIS_INTERVAL_S:
                return
            found = self._diagnose(self.metrics.text().decode())
            if found is not None:
                self._diagnosed_s = now_s
                self._diagnosis = found
        finally:
            self._diagnosing.release()


def _quantiles_of(values: list[float]) -> LiveQuantiles | None:
    if not values:
        return None
    p50, p95 = np.quantile(values, (0.5, 0.95)).tolist()
    return LiveQuantiles(p50=p50, p95=p95, num=len(values))


def state_of(sequence: Sequence) -> str:
    """Return the state of a request: "reading", "decoding" or its finish reason."""
    if sequence.stop is not None:
        return sequence.stop.finish_reason
    return "decoding" if sequence.num_output else "reading"


def _ttft_of(sequence: Sequence) -> float | None:
    first_s = sequence.first_token_at_s
    return None if first_s is None else max(0.0, first_s - sequence.arrived_at_s)


def rate_of(sequence: Sequence, now_s: float) -> float | None:
    """Return tokens per second after the first token."""
    first_s = sequence.first_token_at_s
    if first_s is None or sequence.num_output < 2:
        return None
    end_s = now_s if sequence.finished_at_s is None else sequence.finished_at_s
    return (sequence.num_output - 1) / (end_s - first_s) if end_s > first_s else None
