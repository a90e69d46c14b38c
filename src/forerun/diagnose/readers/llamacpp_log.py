"""Reads logs of llama.cpp's server and examples, of all versions."""

from __future__ import annotations

import re

from forerun.diagnose.readers.tally import NUMBER, Tally, matched_number, numbers_in

__all__ = ["LlamaCppLog"]

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


class LlamaCppLog:
    """Reader of `llama-server`, `llama-speculative` and `llama-speculative-simple`."""

    kind = "llama.cpp log"

    def __init__(self) -> None:
        self.tally = Tally()
        self._length: tuple[float, float] | None = None
        self._prompt_ms = self._eval_ms = self._eval_tokens = 0.0
        self._example: dict[str, float] = {}
        self._statistics: dict[str, tuple[float, float, float]] = {}

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        if found := ACCEPTANCE.search(line):
            self._read_acceptance(line, float(found.group(1)), float(found.group(2)))
        elif found := PER_POSITION.search(line):
            self._read_positions(numbers_in(found.group(1)))
        elif found := STATISTICS.search(line):
            # Cumulative per drafter: the last line of each counts.
            name, *counts = found.groups()
            self._statistics[name] = tuple(map(float, counts))  # type: ignore[assignment]
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
        """Add what follows from several lines together."""
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
