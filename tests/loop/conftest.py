"""A loop beside an engine on its own thread, with requests that go on meanwhile."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.conftest import STEP_TIMES
from tests.system.conftest import byte_tokenizer, save_model

from forerun.engine import shadow, step
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.thread import AsyncEngine
from forerun.loop import run as loop_run
from forerun.loop.config import LoopConfig
from forerun.loop.journal import Journal
from forerun.loop.run import Loop
from forerun.loop.store import TrafficStore
from forerun.sampling.config import SamplingParams
from forerun.server.metrics import StepTotals

K = 3
PROMPTS = [f"def f{n}(left, right):" for n in range(12)]


@dataclass
class TrialClock:
    """Stands for the clock of a draft on trial, which every reading moves on by `tick_s`.

    A draft is timed by two readings, so that it takes as long as one of a step with fixed times.
    """

    tick_s: float = STEP_TIMES[0]
    now_s: float = 0.0

    def monotonic(self) -> float:
        self.now_s += self.tick_s
        return self.now_s


@pytest.fixture(autouse=True)
def trial_clock(monkeypatch) -> TrialClock:
    """Give steps of the kernels and drafts on trial fixed times too."""
    clock = TrialClock()
    monkeypatch.setattr(shadow, "time", clock)
    monkeypatch.setattr(step.CycleClock, "durations", lambda _: STEP_TIMES)
    return clock


@dataclass(frozen=True)
class Drafts:
    """Folders: the target, a draft that mostly agrees with it, and one that does not."""

    target: Path
    near: Path
    far: Path


@pytest.fixture(scope="session")
def drafts(tmp_path_factory) -> Drafts:
    root = tmp_path_factory.mktemp("drafts")
    found = Drafts(*(root / name for name in ("target", "near", "far")))
    save_model(found.target, num_layers=4, seed=0)
    save_model(found.near, num_layers=4, seed=0, noise=0.005)
    save_model(found.far, num_layers=4, seed=1)
    for folder in (found.target, found.near, found.far):
        byte_tokenizer().save_pretrained(folder)
    return found


def params(n: int, seeded: bool) -> SamplingParams:
    drawn = {"temperature": 1.0, "seed": n} if seeded else {"temperature": 0.0}
    return SamplingParams(max_tokens=24, ignore_eos=True, **drawn)


@dataclass
class Traffic:
    """Requests on some threads, one after the other; texts by request."""

    running: AsyncEngine
    texts: dict[tuple[str, bool], set[tuple[int, ...]]] = field(default_factory=dict)
    num_asked: int = 0
    num_answered: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def ask(self, first: int) -> None:
        number = first
        while not self.stop.is_set():
            place, seeded = number % len(PROMPTS), bool(number % 2)
            self.num_asked += 1
            ticket = self.running.submit(PROMPTS[place], params(place, seeded))
            output = ticket.result(timeout_s=120)
            assert output.completions[0].finish_reason == "length"
            self.num_answered += 1
            self.texts.setdefault((PROMPTS[place], seeded), set()).add(output.token_ids)
            number += 1


@contextmanager
def traffic(running: AsyncEngine, num_threads: int = 3):
    asking = Traffic(running)
    threads = [threading.Thread(target=asking.ask, args=(4 * n,)) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield asking
    finally:
        asking.stop.set()
        for thread in threads:
            thread.join()


def load(drafts: Drafts, draft: Path | None, runner: str = "eager") -> Engine:
    config = EngineConfig(
        runner=runner,
        num_speculative_tokens=K,
        controller="fixed",
        max_batch=4,
        max_context=96,
    )
    return Engine.load(drafts.target, draft, dtype="float32", config=config)


@pytest.fixture
def open_loop(drafts, tmp_path, monkeypatch) -> Callable[..., tuple[Loop, AsyncEngine]]:
    """Return a function that opens a loop over a draft in service and what a training makes."""
    monkeypatch.setattr(loop_run, "POLL_S", 0.02)
    with ExitStack() as stack:

        def open_one(served: Path, trained: Path, runner: str = "eager", **changes):
            def train(command, log, limit_s, is_stopped):
                out = Path(command[command.index("--out") + 1]) / "draft"
                out.parent.mkdir(parents=True, exist_ok=True)
                shutil.copytree(trained, out, dirs_exist_ok=True)

            monkeypatch.setattr(loop_run, "run_training", train)
            settings = {"shadow_requests": 30, "settle_requests": 30, "min_texts": 1}
            config = LoopConfig(
                serve=("x",), folder=tmp_path / "loop", shadow_share=0.5, **(settings | changes)
            )
            journal = stack.enter_context(Journal(config.folder))
            engine = load(drafts, served, runner)
            store = TrafficStore(config.folder / "texts", engine.tokenizer.decode)
            stack.enter_context(store)
            running = stack.enter_context(AsyncEngine(engine))
            totals = StepTotals()
            totals.num_changes["position 1"] = 0
            parts = {"target": str(drafts.target), "draft": str(served), "dtype": "float32"}
            return Loop(config, journal, store, running, totals=totals, **parts), running

        yield open_one
