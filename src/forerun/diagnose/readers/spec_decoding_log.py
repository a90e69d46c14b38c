"""Reads the "SpecDecoding metrics" lines of vLLM and LMDeploy, and related lines."""

from __future__ import annotations

import re

from forerun.diagnose.readers.tally import NUMBER, Tally, matched_number, numbers_in

__all__ = ["SpecDecodingLog"]

LENGTH = re.compile(r"Mean acceptance length: " + NUMBER)
ACCEPTED = re.compile(r"Accepted: " + NUMBER + " tokens")
DRAFTED = re.compile(r"Drafted: " + NUMBER + " tokens")
POSITIONS = re.compile(r"Per-position acceptance rate: ([0-9., ]{1,600})")
THROUGHPUT = re.compile(r"Avg generation throughput: " + NUMBER)
RUNNING = re.compile(r"Running: " + NUMBER)
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
METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle",
    "draft_model": "draft_model",
    "mtp": "mtp",
    "deepseek_mtp": "mtp",
    "ngram": "ngram",
    "suffix": "ngram",
    "medusa": "other",
    "dflash": "block",
}


PROCESS = re.compile(r"\bpid[=: ] ?(\d{1,10})\b")
MAX_PROCESSES = 256
MAX_SHOWN = 6
MIN_DRAFTED = 100
"""Draft tokens of a process, for its acceptance to be compared with that of others."""
SAME_RUN = 0.15
"""Acceptance of processes that serve one draft differs by less; they are averaged."""


class SpecDecodingLog:
    """Reader of vLLM's log, and of LMDeploy's, which orders the same fields differently.

    Lines name the process that wrote them. Processes whose acceptance differs are separate runs:
    they are not averaged, and the figures are those of the run that accepts least.
    """

    def __init__(self) -> None:
        self.tally = Tally()
        self.kind = "vLLM log"
        self._runs: dict[str, Tally] = {}
        self._old: tuple[float, float, float, float] | None = None

    def read(self, line: str) -> bool:
        """Read one line; False if it is of another format."""
        if "SpecDecoding metrics:" in line:
            return self._read_metrics(line)
        if rate := THROUGHPUT.search(line):
            running = matched_number(RUNNING, line)
            # An interval in which nothing ran at its end was not busy all along.
            run = self._run(line)
            if running:
                run.mean("tokens_per_s", float(rate.group(1)))
                run.mean("batch", max(1.0, running))
            if (hits := matched_number(HITS, line)) is not None:
                run.facts["prefix_hit_rate"] = hits / 100.0
            return True
        if found := OLD.search(line):
            self._old = tuple(map(float, found.groups()))  # type: ignore[assignment]
            return True
        if found := CONFIGURED.search(line):
            self.tally.set_fact("method", METHODS.get(found.group(1), "other"))
            self.tally.set_fact("k", matched_number(NUM_SPEC, line))
            return True
        return False

    def close(self) -> None:
        """Choose or join runs; of cumulative counters only the last line is used."""
        self._close_runs()
        if self._old is None:
            return
        k, accepted, drafted, _ = self._old
        for name, value in (("num_accepted", accepted), ("num_drafted", drafted)):
            self.tally.count(name, value)
        self.tally.set_fact("k", k)
        if k:
            self.tally.count("num_drafts", drafted / k)

    def _run(self, line: str) -> Tally:
        """The tally of the process that wrote a line."""
        found = PROCESS.search(line)
        name = found.group(1) if found else ""
        if name not in self._runs and len(self._runs) >= MAX_PROCESSES:
            name = next(iter(self._runs))
        return self._runs.setdefault(name, Tally())

    def _close_runs(self) -> None:
        rates = {
            name: run.counts["num_accepted"] / run.counts["num_drafted"]
            for name, run in self._runs.items()
            if run.counts.get("num_drafted", 0.0) >= MIN_DRAFTED
        }
        if len(rates) < 2 or max(rates.values()) - min(rates.values()) < SAME_RUN:
            for run in self._runs.values():
                self.tally.include(run)
            return
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

    def _read_metrics(self, line: str) -> bool:
        accepted, drafted = matched_number(ACCEPTED, line), matched_number(DRAFTED, line)
        found = POSITIONS.search(line)
        rates = numbers_in(found.group(1)) if found else []
        if accepted is None or drafted is None:
            return False
        run = self._run(line)
        if "metrics: Draft acceptance rate" in line:
            self.kind = "LMDeploy log"
            if rate := LMDEPLOY_RATE.search(line):
                run.mean("tokens_per_s", float(rate.group(2)))
        length = matched_number(LENGTH, line)
        drafts = drafts_of(accepted, drafted, length, len(rates))
        run.count("num_accepted", accepted)
        run.count("num_drafted", drafted)
        if drafts:
            run.count("num_drafts", drafts)
            run.positions([rate * drafts for rate in rates])
        return True


def drafts_of(
    accepted: float, drafted: float, length: float | None, num_positions: int
) -> float | None:
    """Return the number of drafts of a line that reports acceptance length and tokens only."""
    if length is not None and length > 1.0 and accepted > 0.0:
        # Two decimals of a length near 1 say little: there, the number of positions says more.
        by_length = accepted / (length - 1.0)
        by_positions = drafted / num_positions if num_positions else by_length
        return by_length if length > 1.2 else by_positions
    return drafted / num_positions if num_positions else None
