from __future__ import annotations

import pytest
import torch

from forerun.measure.bench.compare import NUM_TOKENS, on_best_threads


@pytest.fixture
def threads(monkeypatch):
    """A pretended number of threads, so that the process keeps its own."""
    state = {"now": 4}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["now"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(now=count))
    return state


class Engine:
    """Takes the time it is told."""

    def __init__(self, clock, num_threads, seconds):
        self.clock, self.num_threads, self.seconds = clock, num_threads, seconds

    def generate(self, prompts, params):
        self.clock.now_s += self.seconds
        return []


@pytest.mark.parametrize(("seconds", "best"), [({1: 2.0, 4: 1.0}, 4), ({1: 1.0, 4: 2.0}, 1)])
def test_the_faster_number_is_kept(clock, threads, seconds, best):
    engine, pace_s = on_best_threads(lambda n: Engine(clock, n, seconds[n]), "x", clock)
    assert engine.num_threads == best
    assert threads["now"] == best
    assert pace_s == pytest.approx(1.0 / NUM_TOKENS)


def test_the_number_asked_for_is_the_only_one_tried(clock, threads):
    engine, _ = on_best_threads(lambda n: Engine(clock, n, {3: 1.0}[n]), "x", clock, 3)
    assert (engine.num_threads, threads["now"]) == (3, 3)


def test_a_runner_that_sets_torch_to_one_thread_finds_it_so(clock, threads):
    def load(num_threads):
        threads["now"] = 1
        return Engine(clock, num_threads, 1.0 / num_threads)

    engine, _ = on_best_threads(load, "x", clock)
    assert engine.num_threads == 4
    assert threads["now"] == 1
