"""Reads Prometheus metrics of any engine, and converts counters and gauges to facts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from forerun.doctor.evidence import AS_FAST, MAX_NUMBER, SLOWER, EvidenceCheck, load_table
from forerun.doctor.readers.engine_logs import MAX_POSITIONS, LineReader, Tally, positive
from forerun.theory.intervals import student_tail

SAMPLE = re.compile(
    r"^([a-zA-Z_:][a-zA-Z0-9_:]{0,200})(?:\{(.{0,4000})\})?\s+(\S{1,40})(?:\s+-?\d{1,20})?\s*$"
)
PHASE = re.compile(r"(?:^|,)\s*phase=\"(\w{1,20})\"")
POSITION = re.compile(r"(?:^|,)\s*(?:token_)?position=\"(\d{1,3})\"")
MAX_SERIES = 200_000

_TABLE = load_table("engines")["metrics"]
COUNTERS: Mapping[str, str] = _TABLE["counters"]
POSITIONS: Mapping[str, str] = _TABLE["positions"]
GAUGES: Mapping[str, str] = _TABLE["gauges"]
RATIOS: Mapping[str, tuple[str, str]] = _TABLE["ratios"]
NAMES: Mapping[str, str] = _TABLE["kinds"]
"""Name of an engine's metrics page, by the prefix of its metrics' names."""
OWN, *_ = PREFIXES = tuple(NAMES)


@dataclass(slots=True)
class Metrics:
    """Samples of Prometheus metrics, summed over all labels except the draft position.

    Attributes:
        totals: by name without `_total`; seconds of a phase of our own steps by name and phase.
    """

    totals: dict[str, float] = field(default_factory=dict)
    positions: dict[str, dict[int, float]] = field(default_factory=dict)
    num_samples: int = 0

    def add(self, name: str, labels: str, value: float) -> None:
        if self.num_samples >= MAX_SERIES or not abs(value) < MAX_NUMBER:  # false for NaN
            return
        self.num_samples += 1
        name = name.removesuffix("_total")
        position = POSITION.search(labels)
        if position is not None:
            index = int(position.group(1))
            if index < MAX_POSITIONS:
                places = self.positions.setdefault(name, {})
                places[index] = places.get(index, 0.0) + value
        elif name.startswith(PREFIXES):
            if name == CYCLE_SECONDS and (phase := PHASE.search(labels)) is not None:
                name = f"{name}:{phase.group(1)}"
            self.totals[name] = self.totals.get(name, 0.0) + value

    def since(self, earlier: Metrics) -> Metrics:
        """Return the growth of counters since an earlier sample; gauges stay as they are."""
        return Metrics(
            totals={
                name: value if _is_gauge(name) else grown(value, earlier.totals.get(name, 0.0))
                for name, value in self.totals.items()
            },
            positions={
                name: {
                    index: grown(value, earlier.positions.get(name, {}).get(index, 0.0))
                    for index, value in places.items()
                }
                for name, places in self.positions.items()
            },
            num_samples=self.num_samples,
        )

    def include(self, other: Metrics) -> None:
        """Add the samples of another object to these."""
        for name, value in other.totals.items():
            self.totals[name] = self.totals.get(name, 0.0) + value
        for name, places in other.positions.items():
            known = self.positions.setdefault(name, {})
            for place, value in places.items():
                known[place] = known.get(place, 0.0) + value


def _is_gauge(name: str) -> bool:
    gauges = ("_accept_rate", "_draft_overhead", "_running", "speedup_low", "speedup_high")
    return name in GAUGES or name.endswith(gauges)


def grown(now: float, before: float) -> float:
    """Return the growth of a counter between two samples; after a reset it starts at 0."""
    return now - before if now >= before else now


def is_metric_line(line: str) -> bool:
    return line.startswith((*PREFIXES, "# HELP ", "# TYPE "))


class PrometheusText(LineReader):
    """Reader of the Prometheus text format."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics()
        self.kind = "metrics"

    def read(self, line: str) -> bool:
        """Read one line; lines of other programs are accepted and ignored."""
        if line.startswith("#"):
            return line.startswith(("# HELP ", "# TYPE ", "# EOF"))
        found = SAMPLE.match(line)
        if found is None:
            return False
        try:
            value = float(found.group(3))
        except ValueError:
            return False
        self.metrics.add(found.group(1), found.group(2) or "", value)
        self._name(found.group(1))
        return True

    def close(self) -> None:
        self.tally = metrics_of(self.metrics)

    def _name(self, name: str) -> None:
        for prefix in PREFIXES:
            # vLLM with forerun's plug-in has others of our own metrics, but not this one.
            known = CYCLE_SECONDS if prefix == OWN else prefix
            if name.startswith(known) and self.kind != NAMES[OWN]:
                self.kind = NAMES[prefix]


def read_page(text: str) -> PrometheusText:
    """Read a whole page of metrics."""
    page = PrometheusText()
    for line in text.splitlines():
        page.read(line)
    return page


OUTPUT_TOKENS = {"vllm:generation_tokens", "sglang:generation_tokens", "llamacpp:tokens_predicted"}


def metrics_of(metrics: Metrics) -> Tally:
    """Convert counters, positions, gauges and ratios to facts."""
    tally = Tally()
    totals = metrics.totals
    for name, fact in COUNTERS.items():
        if name in totals:
            tally.count(fact, totals[name])
    for name, fact in GAUGES.items():
        # A gauge of 0 means that nothing ran.
        if (value := positive(totals, name)) is not None:
            tally.set_fact(fact, value)
    for fact, (over, under) in RATIOS.items():
        if over in totals and (below := positive(totals, under)) is not None:
            tally.set_fact(fact, totals[over] / below)
    _add_positions(tally, metrics)
    drafts = [tally.counts[fact] for fact in ("num_drafts", "num_drafted") if fact in tally.counts]
    if drafts and not any(drafts):
        for name in totals.keys() & OUTPUT_TOKENS:  # every token took a plain step
            tally.count("num_steps", totals[name])
    _add_sglang(tally, totals)
    _add_own(tally, totals)
    add_cycles(tally, totals)
    return tally


def _add_positions(tally: Tally, metrics: Metrics) -> None:
    for name, places in metrics.positions.items():
        values = [places.get(index, 0.0) for index in range(max(places) + 1)]
        if POSITIONS.get(name) == "accepted":
            tally.positions(values)
        elif name in POSITIONS:
            tally.set_fact("drafted_per_position", values)
            if "num_drafts" not in tally.counts:
                tally.count("num_drafts", values[0])


def _add_sglang(tally: Tally, totals: Mapping[str, float]) -> None:
    """Add SGLang's acceptance length as tokens per verify call; SGLang does not count drafts."""
    calls = positive(totals, "sglang:spec_verify_calls")
    tokens = positive(totals, "sglang:generation_tokens")
    if calls and tokens and tokens >= calls:
        tally.facts["acceptance_length"] = tokens / calls
    nodes = positive(totals, "sglang:spec_num_draft_tokens")
    if nodes and "k" not in tally.facts:
        tally.set_fact("k", nodes - 1)


CYCLE_SECONDS = "forerun:cycle_seconds"
NORMAL_95 = 1.96
MIN_OFF_SHARE = 0.25
"""Share of steps without a draft that is more than the first and last step of every request."""


def _add_own(tally: Tally, totals: Mapping[str, float]) -> None:
    cycles = positive(totals, "forerun:cycles")
    parts = {
        f"{phase}_s": totals[name]
        for phase in ("draft", "verify", "other")
        if (name := f"{CYCLE_SECONDS}:{phase}") in totals
    }
    if not cycles or not parts:
        return
    tally.set_fact("cycle_s", sum(parts.values()) / cycles)
    for fact, seconds in parts.items():
        tally.set_fact(fact, seconds / cycles)
    if steps := positive(totals, "forerun:sequence_steps"):
        tally.counts["num_steps"] = steps
        tally.set_fact("batch", max(1.0, steps / cycles))
        off = 1.0 - tally.counts.get("num_drafts", 0.0) / steps
        if off >= MIN_OFF_SHARE:  # only a controller decodes so many steps plainly
            tally.set_fact("off_share", off)
        tally.checks += _check_speed(totals, off)


MOSTLY_OFF = 0.5
"""Share of plain steps from which on drafts are not why decoding is slower than it was."""


def _check_speed(totals: Mapping[str, float], off_share: float) -> Iterator[EvidenceCheck]:
    """Test whether decode steps are slower than plain ones, from the 95% interval of the ratio."""
    name = "forerun:speedup"
    found, low, high = (positive(totals, name + end) for end in ("", "_low", "_high"))
    if found is None or low is None or high is None:
        return
    error = max(1e-9, (high - low) / (2.0 * NORMAL_95))
    yield EvidenceCheck(
        name="slower_than_plain",
        p_value=student_tail((SLOWER - found) / error, math.inf),
        is_large=found < SLOWER and off_share < MOSTLY_OFF,
        is_absent=found >= AS_FAST,
        words=f"speedup {found:.2f} ({low:.2f} to {high:.2f})",
    )


def add_cycles(tally: Tally, totals: Mapping[str, float]) -> None:
    seconds = positive(totals, "vllm:request_decode_time_seconds_sum")
    tokens = positive(totals, "vllm:request_generation_tokens_sum")
    requests = totals.get("vllm:request_decode_time_seconds_count", 0.0)
    if seconds and tokens and tokens > requests:
        tally.set_fact("tokens_per_s", (tokens - requests) / seconds)
    prefill = positive(totals, "vllm:request_prefill_time_seconds_sum")
    if seconds and prefill:
        tally.set_fact("prefill_share", prefill / (prefill + seconds))
