"""Reads logs of SGLang, whose accept rate has two meanings in different versions."""

from __future__ import annotations

import re
from itertools import pairwise

from forerun.diagnose.readers.tally import NUMBER, Tally, matched_number

__all__ = ["SglangLog", "num_draft_tokens_of"]

LENGTH = re.compile(r"accept len: " + NUMBER)
RATE = re.compile(r"accept rate: " + NUMBER)
RUNNING = re.compile(r"#running-req: " + NUMBER)
THROUGHPUT = re.compile(r"gen throughput \(token/s\): " + NUMBER)
GRAPH = re.compile(r"(?:cuda|cpu|npu) graph: (True|False)")
STEPS = re.compile(r"speculative_num_steps=" + NUMBER)
DRAFT_TOKENS = re.compile(r"speculative_num_draft_tokens=" + NUMBER)
ALGORITHM = re.compile(r"speculative_algorithm='?([A-Z0-9]{3,20})")
ADAPTIVE = re.compile(r"Adaptive spec params updated: steps (\d{1,3}) -> (\d{1,3})")
METHODS = {
    "EAGLE": "eagle",
    "EAGLE3": "eagle",
    "NEXTN": "mtp",
    "STANDALONE": "draft_model",
    "NGRAM": "ngram",
    "DFLASH": "block",
    "DSPARK": "block",
}
MAX_DRAFT_TOKENS = 64


class SglangLog:
    """Reader of SGLang's scheduler lines and start-up arguments."""

    kind = "SGLang log"

    def __init__(self) -> None:
        self.tally = Tally()
        self._pairs: list[tuple[float, float]] = []
        self._changes: list[tuple[int, int]] = []

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        if "Decode batch" in line:
            return self._read_decode(line)
        if found := ADAPTIVE.search(line):
            self._changes.append((int(found.group(1)), int(found.group(2))))
            return True
        if found := ALGORITHM.search(line):
            self.tally.set_fact("method", METHODS.get(found.group(1), "other"))
            self.tally.set_fact("k", matched_number(STEPS, line))
            if (nodes := matched_number(DRAFT_TOKENS, line)) and "k" not in self.tally.facts:
                self.tally.set_fact("k", nodes - 1)
            return True
        return False

    def close(self) -> None:
        """Decide the meaning of the accept rate, and hence K, from all lines."""
        if self._changes:
            self.tally.set_fact("adaptive_k", True)
            rising = [after > before for before, after in self._changes]
            turns = sum(one != other for one, other in pairwise(rising))
            if len(self._changes) >= 8 and turns >= len(self._changes) // 2:
                self.tally.set_fact("adaptive_stuck", True)
        nodes = num_draft_tokens_of(self._pairs)
        if nodes is not None:
            self.tally.set_fact("k", nodes - 1)

    def _read_decode(self, line: str) -> bool:
        running = matched_number(RUNNING, line)
        weight = max(1.0, running) if running is not None else 1.0
        length, rate = matched_number(LENGTH, line), matched_number(RATE, line)
        if length is not None and length >= 1.0:
            self.tally.mean("acceptance_length", length, weight)
            if rate:
                self._pairs.append((length, rate))
        if running is not None:
            self.tally.mean("batch", weight)
        if (speed := matched_number(THROUGHPUT, line)) is not None:
            self.tally.mean("tokens_per_s", speed)
        if found := GRAPH.search(line):
            self.tally.mean("graph_hit_share", float(found.group(1) == "True"))
        return True


def num_draft_tokens_of(pairs: list[tuple[float, float]]) -> int | None:
    """Return how many tokens a pass verifies, K + 1, from accept lengths and rates.

    The rate once was length / n with the bonus token on both sides, and now is
    (length - 1) / (n - 1). The n that explains all lines to within their rounding, under either
    meaning, is taken; None where none does, or where both meanings explain them differently.
    """
    fitting = {
        n
        for n in range(2, MAX_DRAFT_TOKENS + 1)
        for bonus in (0, 1)
        if pairs and all(explains(n, bonus, length, rate) for length, rate in pairs)
    }
    return fitting.pop() if len(fitting) == 1 else None


def explains(n: int, bonus: int, length: float, rate: float) -> bool:
    """Whether a line fits n tokens per pass, with `bonus` of them left out of the rate."""
    predicted = (length - bonus) / (n - bonus)
    return length <= n + 0.005 and abs(predicted - rate) <= 0.005 + 0.006 / n
