from __future__ import annotations

import pytest
import torch

from forerun.measure import rigs as bandwidth
from forerun.measure.rigs import Stopwatch, read_bandwidth, torch_threads
from forerun.models.memory import available_bytes

CPU = torch.device("cpu")


class Ticks:
    """Every second reading comes a planned time after the one before."""

    def __init__(self, times_s) -> None:
        self.times_s = list(times_s)
        self.now_s = 0.0
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        if self.count % 2 == 0:
            self.now_s += self.times_s.pop(0) if self.times_s else 1.0
        return self.now_s


def test_the_best_pass_counts():
    bytes_per_s, buffer_bytes = read_bandwidth(8000, Stopwatch(Ticks([4.0, 0.5, 2.0]), CPU), 1)
    assert buffer_bytes == 8000
    assert bytes_per_s == pytest.approx(16000)


def test_the_buffer_never_takes_more_than_half_of_the_memory(monkeypatch):
    assert available_bytes(CPU) > 0
    monkeypatch.setattr(bandwidth, "available_bytes", lambda device: 1600)
    assert read_bandwidth(10**15, Stopwatch(Ticks([]), CPU), 1)[1] == 800


def test_torch_has_its_threads_back_afterwards():
    before = torch.get_num_threads()
    with torch_threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
