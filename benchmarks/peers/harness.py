"""One worker at a time: all others are stopped by a signal, so none can spin beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cells import Cell, Sample, Series
from client import KINDS, Kind, Worker, WorkerFailed
from protocol import Setup

__all__ = ["Harness", "Plan", "Running"]

WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured of every size.

    Attributes:
        peers: names of KINDS.
        rounds: rounds by batch size.
        max_tokens: emitted per prompt.
        prompts: token ids, all of one length; every round takes the next ones.
        environments: folder of the peers' environments.
        logs: folder for the workers' standard errors.
    """

    peers: tuple[str, ...]
    rounds: Mapping[int, int]
    max_tokens: int
    prompts: Sequence[Sequence[int]]
    environments: Path
    logs: Path

    def batch_of(self, batch: int, round_index: int) -> list[Sequence[int]]:
        """Prompts of one round; they begin anew when they run out."""
        first = batch * round_index
        return [self.prompts[(first + i) % len(self.prompts)] for i in range(batch)]


@dataclass(kw_only=True)
class Running:
    """A worker that is ready, with what it said of itself."""

    peer: str
    arms: tuple[str, ...]
    worker: Worker
    description: dict[str, Any]


@dataclass(kw_only=True)
class Harness:
    """Measures peers in turns; everything found so far is always in `found`.

    Attributes:
        plan: what to measure.
        tell: told what happens next.
        found: samples and failures per peer and cell.
        descriptions: versions and settings per peer, size and arms.
        idle_s: processor seconds that workers used while they were stopped.
    """

    plan: Plan
    tell: Callable[[str], None]
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    found: dict[tuple[str, Cell], Series] = field(default_factory=dict)
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    idle_s: float = 0.0

    def measure(self, size: str, setup: Setup) -> None:
        """All peers on one pair of models."""
        with self.workers(size, setup) as workers:
            for batch, num_rounds in self.plan.rounds.items():
                self.rounds(size, batch, num_rounds, workers)

    @contextmanager
    def workers(self, size: str, setup: Setup) -> Iterator[list[Running]]:
        """Every worker, loaded one after another and stopped; failures are noted and left out."""
        with ExitStack() as stack:
            running = []
            for peer in self.plan.peers:
                for arms in self.kinds[peer].arms_per_worker:
                    self.tell(f"{size}: starting {peer} {' and '.join(arms)}")
                    with self.noting(size, peer, arms):
                        running.append(self.start(size, peer, arms, setup, stack))
            yield running

    def start(
        self, size: str, peer: str, arms: tuple[str, ...], setup: Setup, stack: ExitStack
    ) -> Running:
        """One worker, ready and stopped; the stack ends it."""
        kind, plan = self.kinds[peer], self.plan
        worker = Worker(
            kind.command(plan.environments),
            kind.variables(plan.environments, setup.threads),
            replace(setup, arms=list(arms)),
            plan.logs / f"{peer}-{size}-{'-'.join(arms)}.log",
        )
        stack.callback(worker.stop)
        worker.begin()
        description = worker.receive()
        self.descriptions[f"{peer} {size} {'+'.join(arms)}"] = description
        worker.suspend()
        return Running(peer=peer, arms=arms, worker=worker, description=description)

    @contextmanager
    def noting(self, size: str, peer: str, arms: Sequence[str]) -> Iterator[None]:
        """A failure belongs to all cells of these arms, and the run goes on."""
        try:
            yield
        except WorkerFailed as failure:
            self.tell(f"{size}: {peer} failed: {failure}")
            for arm in arms:
                for batch in self.plan.rounds:
                    series = self.series(peer, Cell(size=size, arm=arm, batch=batch))
                    series.failure = series.failure or str(failure)

    def rounds(self, size: str, batch: int, num_rounds: int, workers: Sequence[Running]) -> None:
        """Every peer and arm on the same prompts before the next prompts come, in rotated order."""
        lanes = [
            (running, arm)
            for running in workers
            for arm in running.arms
            if batch == 1 or arm in self.kinds[running.peer].batched_arms
        ]
        for index in range(num_rounds):
            self.tell(f"{size}, batch {batch}: round {index + 1} of {num_rounds}")
            shift = index % max(1, len(lanes))
            for running, arm in (*lanes[shift:], *lanes[:shift]):
                series = self.series(running.peer, Cell(size=size, arm=arm, batch=batch))
                if series.failure is None:
                    self.visit(running, arm, series, batch, index)

    def visit(self, running: Running, arm: str, series: Series, batch: int, index: int) -> None:
        """One measured call, after an unmeasured one the first time."""
        prompts = self.plan.batch_of(batch, index)
        worker = running.worker
        try:
            with self.awake(worker):
                if not series.samples:
                    worker.call(arm, prompts, WARM_UP_TOKENS)
                answer = worker.call(arm, prompts, self.plan.max_tokens)
        except WorkerFailed as failure:
            series.failure = str(failure)
            self.tell(f"{running.peer} failed: {failure}")
            return
        if any(len(tokens) != self.plan.max_tokens for tokens in answer.tokens):
            lengths = sorted({len(tokens) for tokens in answer.tokens})
            series.failure = f"emitted {lengths} tokens instead of {self.plan.max_tokens}"
            return
        running.description["settings"] = answer.settings
        series.samples[index] = Sample(round=index, seconds=answer.seconds, tokens=answer.tokens)

    @contextmanager
    def awake(self, worker: Worker) -> Iterator[None]:
        """Let one worker run; what it used while it was stopped is added up: it should be 0."""
        self.idle_s += worker.resume()
        try:
            yield
        finally:
            with suppress(WorkerFailed):
                worker.suspend()

    def series(self, peer: str, cell: Cell) -> Series:
        """Where samples of one peer and cell go."""
        return self.found.setdefault((peer, cell), Series())
