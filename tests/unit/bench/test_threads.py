from __future__ import annotations

import pytest
import torch

from forerun.bench.threads import NUM_TOKENS, use_best_threads


@pytest.fixture
def threads(monkeypatch):
    """A pretended number of threads, so that the process keeps its own."""
    state = {"now": 4}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["now"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(now=count))
    return state


class Engine:
    """Takes the time its number of threads takes."""

    def __init__(self, clock, threads, seconds):
        self.clock, self.threads, self.seconds = clock, threads, seconds

    def generate(self, prompts, params):
        self.clock.now_s += self.seconds[self.threads["now"]]
        return []


@pytest.mark.parametrize(("seconds", "best"), [({1: 2.0, 4: 1.0}, 4), ({1: 1.0, 4: 2.0}, 1)])
def test_the_faster_number_is_kept(clock, threads, seconds, best):
    pace_s = use_best_threads(Engine(clock, threads, seconds), "x", clock)
    assert threads["now"] == best
    assert pace_s == pytest.approx(1.0 / NUM_TOKENS)
