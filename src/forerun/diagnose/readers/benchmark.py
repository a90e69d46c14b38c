"""Reads results of benchmark clients: `vllm bench serve` blocks and one-line summaries."""

from __future__ import annotations

import re

from forerun.diagnose.readers.tally import NUMBER, Tally, matched_number

__all__ = ["BenchmarkOutput"]


def label(text: str) -> re.Pattern[str]:
    """Return the pattern of a label, a colon, blanks and a number."""
    return re.compile(r"^\s*" + re.escape(text) + r":\s+" + NUMBER + r"\s*$")


COUNTS = {
    "num_drafts": label("Drafts"),
    "num_drafted": label("Draft tokens"),
    "num_accepted": label("Accepted tokens"),
}
GAUGES = {
    "acceptance_length": (label("Acceptance length"), 1.0),
    "draft_acceptance_rate": (label("Acceptance rate (%)"), 0.01),
    "tokens_per_s": (label("Output token throughput (tok/s)"), 1.0),
    "ttft_s": (label("Mean TTFT (ms)"), 0.001),
}
BATCH = label("Peak concurrent requests")
KNOWN = re.compile(
    r"^\s*(?:=+ ?(?:Serving Benchmark Result|Speculative Decoding|=*).*=+|-+.*-+|"
    r"Per-position acceptance \(%\):?|(?:Successful|Failed) requests:.*|Benchmark duration.*|"
    r"Total (?:input|generated) tokens:.*|(?:Mean|Median|P\d\d) \w+ \(ms\):.*|"
    r"(?:Request|Total [Tt]oken) throughput.*|Peak .*)\s*$"
)
POSITION = re.compile(r"^\s*Position (\d{1,2}):\s+" + NUMBER + r"\s*$")
SUMMARY = re.compile(r"Throughput: " + NUMBER + r" token/s, Acceptance length: " + NUMBER)


class BenchmarkOutput:
    """Reader of the tables of labels and values that benchmark clients print."""

    kind = "benchmark output"

    def __init__(self) -> None:
        self.tally = Tally()
        self._rates: dict[int, float] = {}

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        for name, pattern in COUNTS.items():
            if (value := matched_number(pattern, line)) is not None:
                self.tally.count(name, value)
                return True
        for name, (pattern, factor) in GAUGES.items():
            if (value := matched_number(pattern, line)) is not None:
                self.tally.set_fact(name, value * factor)
                return True
        if found := POSITION.match(line):
            self._rates[int(found.group(1))] = float(found.group(2)) / 100.0
            return True
        if found := SUMMARY.search(line):
            self.tally.set_fact("tokens_per_s", float(found.group(1)))
            self.tally.set_fact("acceptance_length", float(found.group(2)))
            return True
        return bool(KNOWN.match(line))

    def close(self) -> None:
        """Join the positions to one list, where none is missing."""
        if self._rates and sorted(self._rates) == list(range(len(self._rates))):
            rates = [self._rates[index] for index in range(len(self._rates))]
            self.tally.set_fact("acceptance_rate_per_position", rates)
