"""Reads the logs of vLLM, LMDeploy, SGLang and llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from forerun.doctor.evidence import ERROR_LEVEL, Evidence, EvidenceCheck, load_table
from forerun.theory.intervals import find_fall

MAX_POSITIONS = 64
METHODS: Mapping[str, Mapping[str, str]] = load_table("engines")["methods"]
"""Value of the fact `method` for each name that an engine gives a drafting method, by engine."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums of counts, means and facts over the lines of one engine.

    Attributes:
        means: weighted sum and weight.
    """

    counts: dict[str, float] = field(default_factory=dict)
    per_position: list[float] = field(default_factory=list)
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    checks: list[EvidenceCheck] = field(default_factory=list)

    def count(self, name: str, value: float) -> None:
        self.counts[name] = self.counts.get(name, 0.0) + value

    def mean(self, name: str, value: float, weight: float = 1.0) -> None:
        total, before = self.means.get(name, (0.0, 0.0))
        self.means[name] = total + value * weight, before + weight

    def set_fact(self, name: str, value: object) -> None:
        self.facts.setdefault(name, value)

    def positions(self, accepted: Sequence[float]) -> None:
        for index, value in enumerate(accepted[:MAX_POSITIONS]):
            if index == len(self.per_position):
                self.per_position.append(0.0)
            self.per_position[index] += value

    def include(self, other: Tally) -> None:
        for name, value in other.counts.items():
            self.count(name, value)
        for name, (total, weight) in other.means.items():
            self.mean(name, total / weight if weight else 0.0, weight)
        for name, fact in other.facts.items():
            self.set_fact(name, fact)
        self.positions(other.per_position)

    @property
    def is_empty(self) -> bool:
        return not (self.counts or self.per_position or self.means or self.facts)

    def add_to(self, evidence: Evidence, source: str) -> None:
        """Convert the sums to facts of the evidence; impossible values are noted and left out."""
        evidence.readings[-1].notes += self.notes
        evidence.changes += self.changes
        evidence.settle(self.checks)
        named: Mapping[str, object] = {
            **{name: round(value, 3) for name, value in self.counts.items()},
            **{name: total / weight for name, (total, weight) in self.means.items() if weight},
            **self.facts,
        }
        for name, value in named.items():
            evidence.note(name, value, source)
        if self.per_position and self.counts.get("num_drafts"):
            drafts = self.counts["num_drafts"]
            evidence.note(
                "accepted_per_position", [min(v, drafts) for v in self.per_position], source
            )


@dataclass(slots=True, kw_only=True)
class LoggedInterval:
    """What one line of a log counts, or several in a row; the times are those of the lines."""

    first: str
    last: str
    accepted: float
    drafted: float
    tally: Tally = field(default_factory=Tally)

    def include(self, other: LoggedInterval) -> None:
        self.last = other.last
        self.accepted += other.accepted
        self.drafted += other.drafted
        self.tally.include(other.tally)


MAX_INTERVALS = 1024
"""Most intervals of a series; of a longer one two neighbours are one."""
CLOCK = re.compile(r"\b\d{2}:\d{2}:\d{2}\b")


class LoggedSeries:
    """Acceptance over the lines of a log; a fall is a change with a time, not an average."""

    def __init__(self) -> None:
        self.intervals: list[LoggedInterval] = []

    def add(self, line: str, accepted: float, drafted: float, tally: Tally) -> None:
        """Add what one line counts."""
        found = CLOCK.search(line)
        at = found.group(0) if found else f"interval {len(self.intervals) + 1}"
        self.intervals.append(
            LoggedInterval(first=at, last=at, accepted=accepted, drafted=drafted, tally=tally)
        )
        if len(self.intervals) > MAX_INTERVALS:
            for even, odd in zip(self.intervals[::2], self.intervals[1::2], strict=False):
                even.include(odd)
            del self.intervals[1::2]

    def close(self, tally: Tally) -> None:
        """Add the counts to a tally: all of them, or those after a fall and what was before."""
        latest = self.intervals
        fall = find_fall([each.accepted for each in latest], [each.drafted for each in latest])
        if fall is not None and fall.p_value <= ERROR_LEVEL:
            last, latest = latest[fall.cut - 1].last, latest[fall.cut :]
            words = (
                f"acceptance fell from {fall.before:.2f} to {fall.now:.2f} of the drafted tokens"
            )
            tally.changes.append(f"{words} between {last} and {latest[0].first}")
            tally.set_fact("acceptance_dropped", True)
            tally.set_fact("acceptance_fell_in_run", True)
            tally.set_fact("reference_acceptance_rate", fall.before)
        for interval in latest:
            tally.include(interval.tally)


NUMBER = r"([0-9]{1,15}(?:\.[0-9]{1,15})?(?:[eE][-+]?[0-9]{1,2})?)"
MAX_NUMBERS = 64


class LineReader:
    """Reads the lines of one format, and sums up what they state."""

    kind = ""
    """The format's name."""

    def __init__(self) -> None:
        self.tally = Tally()

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        raise NotImplementedError

    def close(self) -> None:
        """Add facts that depend on all lines, after the last line was read."""


def matched_number(pattern: re.Pattern[str], line: str) -> float | None:
    found = pattern.search(line)
    return float(found.group(1)) if found else None


def numbers_in(text: str) -> list[float]:
    return [float(value) for value in re.findall(NUMBER, text)[:MAX_NUMBERS]]


def positive(values: Mapping[str, float | None], name: str) -> float | None:
    value = values.get(name)
    return value if value is not None and value > 0.0 else None


VLLM_LENGTH = re.compile(r"Mean acceptance length: " + NUMBER)
ACCEPTED = re.compile(r"Accepted: " + NUMBER + " tokens")
DRAFTED = re.compile(r"Drafted: " + NUMBER + " tokens")
POSITIONS = re.compile(r"Per-position acceptance rate: ([0-9., ]{1,600})")
VLLM_THROUGHPUT = re.compile(r"Avg generation throughput: " + NUMBER)
VLLM_RUNNING = re.compile(r"Running: " + NUMBER)
HITS = re.compile(r"Prefix cache hit rate: " + NUMBER + "%")
LMDEPLOY_RATE = re.compile(r"Avg thr \(in/out\): *" + NUMBER + " / " + NUMBER)
CONFIGURED = re.compile(r"speculative_config=SpeculativeConfig\(method='?(\w{1,30})'?")
NUM_SPEC = re.compile(r"num_spec(?:ulative)?_tokens['\"]?[=:] ?" + NUMBER)
# The engine before v1 counted in this shape.
OLD = re.compile(
    r"Speculative metrics: Draft acceptance rate: [0-9.]+, System efficiency: [0-9.]+, "
    r"Number of speculative tokens: (\d{1,4}), Number of accepted tokens: (\d{1,12}), "
    r"Number of draft tokens: (\d{1,12}), Number of emitted tokens: (\d{1,12})"
)
PROCESS = re.compile(r"\bpid[=: ] ?(\d{1,10})\b")
MAX_PROCESSES = 256
MAX_SHOWN = 6
MIN_DRAFTED = 100
"""Draft tokens of a process, for its acceptance to be compared with that of others."""
SAME_RUN = 0.15
"""Acceptance of processes that serve one draft differs by less; they are averaged."""


class SpecDecodingLog(LineReader):
    """Reader of vLLM's log, and of LMDeploy's, which orders the same fields differently.

    Lines name the process that wrote them. Processes whose acceptance differs are separate runs:
    they are not averaged, and the figures are those of the run that accepts least.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kind = "vLLM log"
        self._runs: dict[str, Tally] = {}
        self._series: dict[str, LoggedSeries] = {}
        self._old: tuple[float, float, float] | None = None

    def read(self, line: str) -> bool:
        if "SpecDecoding metrics:" in line:
            return self._read_metrics(line)
        if rate := VLLM_THROUGHPUT.search(line):
            running = matched_number(VLLM_RUNNING, line)
            # If nothing runs at the end of an interval, it was idle for a part of it.
            run = self._runs[self._run(line)]
            if running:
                run.mean("tokens_per_s", float(rate.group(1)))
                run.mean("batch", max(1.0, running))
            if (hits := matched_number(HITS, line)) is not None:
                run.facts["prefix_hit_rate"] = hits / 100.0
            return True
        if found := OLD.search(line):
            k, accepted, drafted, _ = map(float, found.groups())
            self._old = k, accepted, drafted
            return True
        if found := CONFIGURED.search(line):
            self.tally.set_fact("method", METHODS["vllm"].get(found.group(1), "other"))
            self.tally.set_fact("k", matched_number(NUM_SPEC, line))
            return True
        return False

    def close(self) -> None:
        for name in self._close_runs():
            self._series.setdefault(name, LoggedSeries()).close(self.tally)
        if self._old is None:
            return
        k, accepted, drafted = self._old
        for name, value in (("num_accepted", accepted), ("num_drafted", drafted)):
            self.tally.count(name, value)
        self.tally.set_fact("k", k)
        if k:
            self.tally.count("num_drafts", drafted / k)

    def _run(self, line: str) -> str:
        """Return the name of the process that wrote a line."""
        found = PROCESS.search(line)
        name = found.group(1) if found else ""
        if name not in self._runs and len(self._runs) >= MAX_PROCESSES:
            name = next(iter(self._runs))
        self._runs.setdefault(name, Tally())
        return name

    def _close_runs(self) -> list[str]:
        """Take what else the lines state; returns the processes whose acceptance counts."""
        rates = {
            name: sum(each.accepted for each in series.intervals) / drafted
            for name, series in self._series.items()
            if (drafted := sum(each.drafted for each in series.intervals)) >= MIN_DRAFTED
        }
        if len(rates) < 2 or max(rates.values()) - min(rates.values()) < SAME_RUN:
            for run in self._runs.values():
                self.tally.include(run)
            return list(self._series)
        least = min(rates, key=lambda name: rates[name])
        self.tally.include(self._runs[least])
        others = sorted((rate, name) for name, rate in rates.items() if name != least)
        shown = ", ".join(f"process {name} {rate:.0%}" for rate, name in others[:MAX_SHOWN])
        self.tally.notes.append(
            f"{len(rates)} separate runs, which are not averaged: the figures are those of process "
            f"{least}, which accepts {rates[least]:.0%} of its draft tokens; {shown}"
            f"{' and others' if len(others) > MAX_SHOWN else ''}. Give the lines of one process to "
            "diagnose another run"
        )
        return [least]

    def _read_metrics(self, line: str) -> bool:
        accepted, drafted = matched_number(ACCEPTED, line), matched_number(DRAFTED, line)
        found = POSITIONS.search(line)
        rates = numbers_in(found.group(1)) if found else []
        if accepted is None or drafted is None:
            return False
        name, run = self._run(line), Tally()
        if "metrics: Draft acceptance rate" in line:
            self.kind = "LMDeploy log"
            if rate := LMDEPLOY_RATE.search(line):
                run.mean("tokens_per_s", float(rate.group(2)))
        length = matched_number(VLLM_LENGTH, line)
        drafts = drafts_of(accepted, drafted, length, len(rates))
        run.count("num_accepted", accepted)
        run.count("num_drafted", drafted)
        if drafts:
            run.count("num_drafts", drafts)
            run.positions([rate * drafts for rate in rates])
        self._series.setdefault(name, LoggedSeries()).add(line, accepted, drafted, run)
        return True


def drafts_of(
    accepted: float, drafted: float, length: float | None, num_positions: int
) -> float | None:
    if length is not None and length > 1.0 and accepted > 0.0:
        # Two decimals of a length near 1 say little: there, the number of positions says more.
        by_length = accepted / (length - 1.0)
        by_positions = drafted / num_positions if num_positions else by_length
        return by_length if length > 1.2 else by_positions
    return drafted / num_positions if num_positions else None


SGLANG_LENGTH = re.compile(r"accept len: " + NUMBER)
RATE = re.compile(r"accept rate: " + NUMBER)
SGLANG_RUNNING = re.compile(r"#running-req: " + NUMBER)
SGLANG_THROUGHPUT = re.compile(r"gen throughput \(token/s\): " + NUMBER)
GRAPH = re.compile(r"(?:cuda|cpu|npu) graph: (True|False)")
STEPS = re.compile(r"speculative_num_steps=" + NUMBER)
DRAFT_TOKENS = re.compile(r"speculative_num_draft_tokens=" + NUMBER)
ALGORITHM = re.compile(r"speculative_algorithm='?([A-Z0-9]{3,20})")
ADAPTIVE = re.compile(r"Adaptive spec params updated: steps (\d{1,3}) -> (\d{1,3})")
MAX_DRAFT_TOKENS = 64


LINE_STEPS = 40.0
"""Steps of a request between two lines, as SGLang is set by default."""


class SglangLog(LineReader):
    """Reader of SGLang's scheduler lines and start-up arguments."""

    kind = "SGLang log"

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[float, float]] = []
        self._changes: list[tuple[int, int]] = []
        self._series = LoggedSeries()

    def read(self, line: str) -> bool:
        if "Decode batch" in line:
            return self._read_decode(line)
        if found := ADAPTIVE.search(line):
            self._changes.append((int(found.group(1)), int(found.group(2))))
            return True
        if found := ALGORITHM.search(line):
            self.tally.set_fact("method", METHODS["sglang"].get(found.group(1), "other"))
            self.tally.set_fact("k", matched_number(STEPS, line))
            if (nodes := matched_number(DRAFT_TOKENS, line)) and "k" not in self.tally.facts:
                self.tally.set_fact("k", nodes - 1)
            return True
        return False

    def close(self) -> None:
        if self._changes:
            self.tally.set_fact("adaptive_k", True)
            rising = [after > before for before, after in self._changes]
            turns = sum(one != other for one, other in pairwise(rising))
            if len(self._changes) >= 8 and turns >= len(self._changes) // 2:
                self.tally.set_fact("adaptive_stuck", True)
        nodes = num_draft_tokens_of(self._pairs)
        if nodes is not None:
            self.tally.set_fact("k", nodes - 1)
        self._series.close(self.tally)

    def _read_decode(self, line: str) -> bool:
        running = matched_number(SGLANG_RUNNING, line)
        weight = max(1.0, running) if running is not None else 1.0
        length, rate = matched_number(SGLANG_LENGTH, line), matched_number(RATE, line)
        if length is not None and length >= 1.0:
            steps, line_tally = LINE_STEPS * weight, Tally()
            line_tally.mean("acceptance_length", length, weight)
            self._series.add(line, steps * (length - 1.0) / length, steps, line_tally)
            if rate:
                self._pairs.append((length, rate))
        if running is not None:
            self.tally.mean("batch", weight)
        if (speed := matched_number(SGLANG_THROUGHPUT, line)) is not None:
            self.tally.mean("tokens_per_s", speed)
        if found := GRAPH.search(line):
            self.tally.mean("graph_hit_share", float(found.group(1) == "True"))
        return True


def num_draft_tokens_of(pairs: list[tuple[float, float]]) -> int | None:
    """Infer the tokens verified per pass, K + 1, from accept lengths and rates.

    The rate once was length / n with the bonus token on both sides, and now is
    (length - 1) / (n - 1). The n that explains all lines to within their rounding, under either
    meaning, is taken; None where none does, or where both meanings explain them differently.
    """
    fitting = {
        n
        for n in range(2, MAX_DRAFT_TOKENS + 1)
        for bonus in (0, 1)
        if pairs and all(agrees(n, bonus, length, rate) for length, rate in pairs)
    }
    return fitting.pop() if len(fitting) == 1 else None


def agrees(n: int, bonus: int, length: float, rate: float) -> bool:
    """Whether accept length and rate of a line are consistent with n tokens verified per pass."""
    predicted = (length - bonus) / (n - bonus)
    return length <= n + 0.005 and abs(predicted - rate) <= 0.005 + 0.006 / n


ACCEPTANCE = re.compile(
    r"draft acceptance(?: rate)? = *[0-9.]+ \( *(\d{1,12}) accepted / *(\d{1,12}) generated\)"
)
MEAN_LENGTH = re.compile(r"mean len = *" + NUMBER)
PER_POSITION = re.compile(r"acc per pos = \(([0-9., ]{1,600})\)")
STATISTICS = re.compile(
    r"statistics (\S{1,40}): .*#gen drafts = (\d{1,12}), .*#gen tokens = (\d{1,12}), "
    r"#acc tokens = (\d{1,12})"
)
DURATIONS = re.compile(r"dur\(b,g,a\) = " + NUMBER + ", " + NUMBER + ", " + NUMBER + " ms")
EVAL = re.compile(r"(prompt )?eval time = *" + NUMBER + r" ms / *(\d{1,12}) (?:tokens|runs)")
DECODED = re.compile(r"decoded *(\d{1,12}) tokens in *" + NUMBER + " seconds")
EXAMPLE = re.compile(r"\bn_(draft|predict|drafted|accept) *= *(\d{1,12})")
EXAMPLE_RATE = re.compile(r"\baccept *= *[0-9.]+%")


class LlamaCppLog(LineReader):
    """Reader of logs of `llama-server`, `llama-speculative` and `llama-speculative-simple`."""

    kind = "llama.cpp log"

    def __init__(self) -> None:
        super().__init__()
        self._length: tuple[float, float] | None = None
        self._prompt_ms = self._eval_ms = self._eval_tokens = 0.0
        self._example: dict[str, float] = {}
        self._statistics: dict[str, tuple[float, float, float]] = {}

    def read(self, line: str) -> bool:
        if found := ACCEPTANCE.search(line):
            self._read_acceptance(line, float(found.group(1)), float(found.group(2)))
        elif found := PER_POSITION.search(line):
            self._read_positions(numbers_in(found.group(1)))
        elif found := STATISTICS.search(line):
            # Cumulative per drafter: the last line of each counts.
            name, drafts, drafted, accepted = found.groups()
            self._statistics[name] = float(drafts), float(drafted), float(accepted)
        elif found := EVAL.search(line):
            self._read_time(found)
        elif found := DECODED.search(line):
            tokens, seconds = float(found.group(1)), float(found.group(2))
            self._example.setdefault("predict", tokens)
            self.tally.mean("tokens_per_s", tokens / max(1e-9, seconds))
        elif found := EXAMPLE.search(line):
            self._example[found.group(1)] = float(found.group(2))
        else:
            return bool(EXAMPLE_RATE.search(line))
        return True

    def close(self) -> None:
        if self._eval_ms > 0.0 and self._eval_tokens > 1:
            rate = 1000.0 * self._eval_tokens / self._eval_ms
            self.tally.set_fact("tokens_per_s", rate)
            self.tally.set_fact(
                "prefill_share", self._prompt_ms / (self._prompt_ms + self._eval_ms)
            )
            self.tally.set_fact("batch", 1.0)
        self._close_example()
        if "num_drafted" not in self.tally.counts:
            for name, (drafts, drafted, accepted) in self._statistics.items():
                self.tally.count("num_drafts", drafts)
                self.tally.count("num_drafted", drafted)
                self.tally.count("num_accepted", accepted)
                if name.startswith("ngram"):
                    self.tally.set_fact("method", "ngram")

    def _close_example(self) -> None:
        values = self._example
        if "drafted" in values and "accept" in values:
            self.tally.count("num_drafted", values["drafted"])
            self.tally.count("num_accepted", values["accept"])
            # Every step emits what it accepts and one more.
            drafts = values.get("predict", 0.0) - values["accept"]
            if drafts > 0.0:
                self.tally.count("num_drafts", drafts)
        if values.get("draft"):
            self.tally.set_fact("k", values["draft"])

    def _read_acceptance(self, line: str, accepted: float, drafted: float) -> None:
        self.tally.count("num_accepted", accepted)
        self.tally.count("num_drafted", drafted)
        length = matched_number(MEAN_LENGTH, line)
        self._length = None
        if length is not None and length > 1.0:
            drafts = accepted / (length - 1.0)
            self.tally.count("num_drafts", drafts)
            self._length = (length, drafts)

    def _read_positions(self, rates: list[float]) -> None:
        if self._length is not None:
            self.tally.positions([rate * self._length[1] for rate in rates])

    def _read_time(self, found: re.Match[str]) -> None:
        is_prompt, milliseconds, tokens = found.groups()
        if is_prompt:
            self._prompt_ms += float(milliseconds)
        else:
            self._eval_ms += float(milliseconds)
            self._eval_tokens += float(tokens)
