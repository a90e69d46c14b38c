"""What the live page shows of our own engine: an observer with little cost per step.

On the engine's thread a step is only put into a bounded queue. Figures, texts and the diagnosis are
made from it by the thread that reads a snapshot, so it costs nothing more while no page is open.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily, Metric

import forerun
from forerun.engine.observing import ObservedStep
from forerun.engine.sequence import Sequence
from forerun.models.tokenizers import Detokenizer, Tokenizer
from forerun.server.live_page import Diagnose, Json, LivePage, describe_speedup
from forerun.server.metrics import LABELS, ServerMetrics
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord
from forerun.trace.change_points import Incident

MAX_QUEUED_STEPS = 8192
"""Steps that wait for a reader; without one the oldest are dropped."""
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


@dataclass(slots=True, eq=False)
class WatchedRequest:
    """One of the latest sequences, with the text of its tokens by source as far as it was read."""

    sequence: Sequence
    pieces: deque[Json] = field(default_factory=deque)
    num_read: int = 0
    num_characters: int = 0
    detokenizer: Detokenizer | None = None
    head: str | None = None

    def read(self, tokenizer: Tokenizer) -> None:
        """Convert the tokens since the last call to text, separated by their source."""
        if self.detokenizer is None:
            self.detokenizer = Detokenizer(tokenizer)
        sources = self.sequence.sources[self.num_read :]  # the engine adds to the ids first
        start = self.sequence.num_prompt + self.num_read
        self.num_read += len(sources)
        tokens = self.sequence.ids[start : start + len(sources)]
        for token, source in zip(tokens, sources, strict=True):
            text = self.detokenizer.append(token)
            self.num_characters += len(text)
            if self.pieces and self.pieces[-1]["origin"] == source.value:
                self.pieces[-1]["text"] += text
            elif text:
                self.pieces.append({"text": text, "origin": source.value})
        while self.num_characters > MAX_CHARACTERS:
            self.num_characters -= len(self.pieces.popleft()["text"])


class LiveView(LivePage):
    """A step observer that provides the snapshots shown on the live page.

    Other threads read only the counts of the engine. The counts and the diagnosis of the page are
    those of `metrics`, and the speedup of the page is added to them.
    """

    is_required = False
    wants_logits = False

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        shows_texts: bool = True,
        diagnose: Diagnose | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(diagnose, clock)
        self.engine = metrics.engine
        self.metrics = metrics
        self.shows_texts = shows_texts
        self._queue: deque[tuple[StepRecord, ...]] = deque(maxlen=MAX_QUEUED_STEPS)
        self._watched: dict[str, WatchedRequest] = {}
        self._first_tokens: deque[tuple[float, int, int]] = deque(maxlen=MAX_FIRST_TOKENS)
        self._messages: deque[tuple[str, str]] = deque(maxlen=MAX_MESSAGES)
        metrics.registry.register(self)

    # ------------------------------------------------------------------ on the engine's own thread

    def observe(self, step: ObservedStep) -> None:
        """Queue the records of a step, and note the sequences that it worked on."""
        for entry in step.prefilling:
            self._watch(entry.sequence)
        if not step.records:
            return
        self._queue.append(tuple(step.records))
        for entry, record in zip(step.emitting, step.records, strict=True):
            sequence = entry.sequence
            self._watch(sequence)
            if sequence.num_output == record.num_emitted:
                ttft_s = _measure_ttft(sequence) or 0.0
                self._first_tokens.append((ttft_s, sequence.num_prompt, sequence.num_cached))

    def _watch(self, sequence: Sequence) -> None:
        found = self._watched.get(sequence.key)
        if found is not None and found.sequence is sequence:
            return
        self._watched.pop(sequence.key, None)
        self._watched[sequence.key] = WatchedRequest(sequence)
        if len(self._watched) > MAX_REQUESTS:
            del self._watched[next(iter(self._watched))]

    # -------------------------------------------------------------------------------- on any thread

    def describe_engine(self, now_s: float) -> Json:
        """Return the setup, totals, load and latest requests of the engine."""
        totals = self.metrics.totals
        return {
            "setup": self._describe_setup(),
            "totals": {
                "num_steps": totals.num_cycles,
                "num_drafted": totals.acceptance.num_drafted,
                "num_accepted": totals.acceptance.num_accepted,
                "num_emitted": totals.num_emitted,
            },
            "load": self._describe_load(),
            "latency": self._describe_latency(now_s),
            "requests": [
                self._describe_request(found, now_s) for found in list(self._watched.values())[::-1]
            ],
            "shows_texts": self.shows_texts,
        }

    def read_metrics(self) -> str:
        return self.metrics.text().decode()

    def read_changes(self) -> Iterable[Incident]:
        return self.metrics.totals.changes.copy()

    def drain(self) -> None:
        for _ in range(MAX_QUEUED_STEPS):
            try:
                records = self._queue.popleft()
            except IndexError:
                return
            self.figures.add(records)

    def collect(self) -> Iterator[Metric]:
        """Yield the speedup that the page states, for `/metrics`; no value before it is known."""
        with self._reading:
            self.drain()
            compared = self.figures.compare()
        found = describe_speedup(compared) or {}
        for name, text, value in (
            ("forerun:speedup", "Rate of the latest decode steps over plain ones", "estimate"),
            ("forerun:speedup_low", "Lower end of its 95% interval", "low"),
            ("forerun:speedup_high", "Upper end of its 95% interval", "high"),
            ("forerun:plain_token_seconds", "Time per token of plain steps", "plain_token_s"),
        ):
            family = GaugeMetricFamily(name, text, labels=LABELS)
            if found:
                family.add_metric([*self.metrics.labels.values()], found[value])
            yield family

    def _describe_setup(self) -> Json:
        capabilities = self.engine.capabilities()
        return {
            "version": forerun.__version__,
            "target": self.metrics.labels["model_name"],
            "methods": capabilities.methods,
            "max_context": capabilities.max_context,
            "has_chat": self.engine.tokenizer.definition.chat_template is not None,
        }

    def _describe_load(self) -> Json:
        stats, config = self.engine.stats(), self.engine.config
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "max_running": config.max_batch,
            "max_waiting": config.max_waiting,
            "kv_share": self.metrics.kv_usage(),
            "refused": self.metrics.refusals(),
        }

    def _describe_latency(self, now_s: float) -> Json:
        times, prompts, cached = zip((0.0, 0, 0), *self._first_tokens.copy(), strict=True)
        totals, prefix = self.metrics.totals, (sum(cached), sum(prompts))
        gaps = totals.recent_gaps.copy()
        return self.describe_latency(now_s, times[1:], gaps, prefix, totals.num_prefill_rows)

    def _describe_request(self, found: WatchedRequest, now_s: float) -> Json:
        sequence = found.sequence
        # The copy is taken at once, while the engine's thread may be counting.
        counts = AcceptanceCounts(
            sequence.acceptance.num_drafted, Counter(dict(sequence.acceptance.steps))
        )
        num_steps = counts.num_steps
        state = "decoding" if sequence.num_output else "reading"
        return {
            "request_id": sequence.key,
            "state": state if sequence.stop is None else sequence.stop.finish_reason,
            "age_s": max(0.0, now_s - sequence.arrived_at_s),
            "num_prompt_tokens": sequence.num_prompt,
            "num_output_tokens": sequence.num_output,
            "num_drafted": counts.num_drafted,
            "acceptance_length": sequence.num_output / num_steps if num_steps else None,
            "draft_acceptance_rate": counts.draft_acceptance_rate,
            "ttft_s": _measure_ttft(sequence),
            "tokens_per_s": rate_of(sequence, now_s),
            "head": self._find_head(found) if self.shows_texts else "",
            "pieces": self._read_pieces(found) if self.shows_texts else [],
        }

    def _find_head(self, found: WatchedRequest) -> str:
        if found.head is None:  # the message may come after the first step
            found.head = dict(self._messages.copy()).get(found.sequence.request_id)
        return found.head or self._end_of_prompt(found.sequence, HEAD_TOKENS)

    def _end_of_prompt(self, sequence: Sequence, num_tokens: int) -> str:
        end = sequence.num_prompt
        shortened = "… " if end > num_tokens else ""
        ids = sequence.ids[max(0, end - num_tokens) : end]
        return shortened + self.engine.tokenizer.decode(ids)

    def _read_pieces(self, found: WatchedRequest) -> list[Json]:
        found.read(self.engine.tokenizer)
        prompt = self._end_of_prompt(found.sequence, MAX_PROMPT_TOKENS)
        return [{"text": prompt, "origin": "prompt"}, *found.pieces]

    def add_message(self, request_ids: Iterable[str], text: str | None) -> None:
        """Name requests by the last message of their user; any thread may call this."""
        if self.shows_texts and text:
            self._messages.extend((request_id, text[:MAX_HEAD]) for request_id in request_ids)


def _measure_ttft(sequence: Sequence) -> float | None:
    first_s = sequence.first_token_at_s
    return None if first_s is None else max(0.0, first_s - sequence.arrived_at_s)


def rate_of(sequence: Sequence, now_s: float) -> float | None:
    """Return tokens per second after the first token."""
    first_s = sequence.first_token_at_s
    if first_s is None or sequence.num_output < 2:
        return None
    end_s = now_s if sequence.finished_at_s is None else sequence.finished_at_s
    return (sequence.num_output - 1) / (end_s - first_s) if end_s > first_s else None
