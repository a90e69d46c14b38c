"""One worker at a time: all others are stopped by a signal, so none can spin beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cells import Cell, Choice, Sample, Series
from client import KINDS, Answer, Kind, Worker, WorkerFailed
from protocol import SPECULATIVE, Setup

__all__ = ["Harness", "Lane", "Plan", "Running"]

WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        peers: names of kinds.
        rounds: rounds by batch size.
        choice_rounds: rounds by batch size in which every K is tried.
        max_tokens: emitted per prompt.
        prompts: token ids, all of one length; every round takes the next ones.
        choice_prompts: the same for the choice of K, none of them among `prompts`.
        environments: folder of the peers' environments.
        logs: folder for the workers' standard errors.
    """

    peers: tuple[str, ...]
    rounds: Mapping[int, int]
    choice_rounds: Mapping[int, int]
    max_tokens: int
    prompts: Sequence[Sequence[int]]
    choice_prompts: Sequence[Sequence[int]]
    environments: Path
    logs: Path


def batch_of(prompts: Sequence[Sequence[int]], batch: int, round_index: int) -> list[Sequence[int]]:
    """Prompts of one round; they begin anew when they run out."""
    first = batch * round_index
    return [prompts[(first + i) % len(prompts)] for i in range(batch)]


@dataclass(kw_only=True)
class Running:
    """A worker that is ready, with its versions and settings."""

    peer: str
    worker: Worker
    description: dict[str, Any]


@dataclass(kw_only=True)
class Lane:
    """One peer in one cell.

    Attributes:
        peer: name of its kind.
        cell: arm and batch size.
        series: its measured calls.
        running: the worker of every K it can be asked for; plain decoding is K=0.
        warm: every K that has been called.
    """

    peer: str
    cell: Cell
    series: Series
    running: dict[int, Running] = field(default_factory=dict)
    warm: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class Harness:
    """Measures peers in turns; everything found so far is always in `found`.

    Attributes:
        plan: what to measure.
        tell: called with a line about what happens next.
        kinds: how each peer is run.
        found: samples and failures per peer and cell.
        choices: the K of every peer that drafts.
        descriptions: versions and settings per worker.
        idle_s: processor seconds that workers used while they were stopped.
    """

    plan: Plan
    tell: Callable[[str], None]
    kinds: Mapping[str, Kind] = field(default_factory=lambda: KINDS)
    found: dict[tuple[str, Cell], Series] = field(default_factory=dict)
    choices: list[Choice] = field(default_factory=list)
    descriptions: dict[str, dict[str, Any]] = field(default_factory=dict)
    idle_s: float = 0.0

    def measure(self, setup: Setup) -> None:
        """All peers on one pair of models."""
        with self.workers(setup) as running:
            for batch, num_rounds in self.plan.rounds.items():
                lanes = self.lanes(batch, running)
                for lane in lanes:
                    if len(lane.running) > 1:
                        self.choose(lane)
                self.rounds(batch, num_rounds, lanes)

    @contextmanager
    def workers(self, setup: Setup) -> Iterator[list[Running]]:
        """Every worker, loaded one after another and stopped; failures are noted and left out."""
        with ExitStack() as stack:
            running = []
            for peer in self.plan.peers:
                for own in self.kinds[peer].setups(setup):
                    self.tell(f"starting {label(peer, own)}")
                    try:
                        running.append(self.start(peer, own, stack))
                    except WorkerFailed as failure:
                        self.note(peer, own.arms, str(failure))
            yield running

    def start(self, peer: str, setup: Setup, stack: ExitStack) -> Running:
        """One worker, ready and stopped; the stack ends it."""
        kind, plan = self.kinds[peer], self.plan
        name = label(peer, setup)
        worker = Worker(
            kind.command(plan.environments),
            kind.variables(plan.environments, setup.threads),
            setup,
            plan.logs / f"{name.replace(' ', '-').replace('/', '-')}.log",
        )
        stack.callback(worker.stop)
        worker.begin()
        description = worker.receive()
        self.descriptions[name] = description
        worker.suspend()
        return Running(peer=peer, worker=worker, description=description)

    def note(self, peer: str, arms: Sequence[str], failure: str) -> None:
        """A worker that does not start fails all cells of its arms, and the run goes on."""
        self.tell(f"{peer} failed: {failure}")
        for arm in arms:
            for batch in self.plan.rounds:
                series = self.series(peer, Cell(arm=arm, batch=batch))
                series.failure = series.failure or failure

    def lanes(self, batch: int, workers: Sequence[Running]) -> list[Lane]:
        """Every peer and arm that takes so many prompts at once and has not failed."""
        found: dict[tuple[str, Cell], Lane] = {}
        for running in workers:
            kind, setup = self.kinds[running.peer], running.worker.setup
            for arm in setup.arms:
                key = running.peer, Cell(arm=arm, batch=batch)
                if batch > 1 and arm not in kind.batched_arms:
                    continue
                if key not in found:
                    found[key] = Lane(peer=key[0], cell=key[1], series=self.series(*key))
                    found[key].series.failure = None  # of a worker for another K
                for k in setup.ks if arm == SPECULATIVE else [0]:
                    found[key].running[k] = running
        return list(found.values())

    def choose(self, lane: Lane) -> None:
        """Keep the K of a lane that is fastest on the prompts set aside for this."""
        batch = lane.cell.batch
        seconds = dict.fromkeys(lane.running, 0.0)
        num_rounds = self.plan.choice_rounds[batch]
        self.tell(f"batch {batch}: {lane.peer} chooses K")
        for index in range(num_rounds):
            prompts = batch_of(self.plan.choice_prompts, batch, index)
            for k in lane.running:
                answer = self.call(lane, k, prompts)
                if answer is None:
                    return
                seconds[k] += answer.seconds
        best = min(seconds, key=seconds.__getitem__)
        tokens = num_rounds * batch * self.plan.max_tokens
        speeds = {k: tokens / spent_s for k, spent_s in seconds.items()}
        self.choices.append(Choice(peer=lane.peer, batch=batch, best=best, tokens_per_s=speeds))
        lane.running = {best: lane.running[best]}

    def rounds(self, batch: int, num_rounds: int, lanes: Sequence[Lane]) -> None:
        """Every peer and arm on the same prompts before the next prompts come, in rotated order."""
        for index in range(num_rounds):
            self.tell(f"batch {batch}: round {index + 1} of {num_rounds}")
            prompts = batch_of(self.plan.prompts, batch, index)
            shift = index % max(1, len(lanes))
            for lane in (*lanes[shift:], *lanes[:shift]):
                (k,) = lane.running if len(lane.running) == 1 else (None,)
                if k is None or (answer := self.call(lane, k, prompts)) is None:
                    continue
                lane.series.samples[index] = Sample(
                    round=index, seconds=answer.seconds, tokens=answer.tokens
                )

    def call(self, lane: Lane, k: int, prompts: Sequence[Sequence[int]]) -> Answer | None:
        """One call, after an unmeasured one the first time; None where the lane has failed."""
        if lane.series.failure is not None:
            return None
        running = lane.running[k]
        try:
            with self.awake(running.worker):
                if k not in lane.warm:
                    running.worker.call(k, prompts, WARM_UP_TOKENS)
                    lane.warm.add(k)
                answer = running.worker.call(k, prompts, self.plan.max_tokens)
        except WorkerFailed as failure:
            lane.series.failure = str(failure)
            self.tell(f"{lane.peer} failed: {failure}")
            return None
        if any(len(tokens) != self.plan.max_tokens for tokens in answer.tokens):
            lengths = sorted({len(tokens) for tokens in answer.tokens})
            lane.series.failure = f"emitted {lengths} tokens instead of {self.plan.max_tokens}"
            return None
        running.description["settings"] = answer.settings
        return answer

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


def label(peer: str, setup: Setup) -> str:
    """Peer and arms of a worker, and its K where it has one only."""
    only = f" K={setup.ks[0]}" if len(setup.ks) == 1 and SPECULATIVE in setup.arms else ""
    return f"{peer} {'+'.join(setup.arms)}{only}"
