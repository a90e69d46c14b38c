"""A rate that may change: precise while it stays, quick where it moves."""

from __future__ import annotations

import random

import pytest

from forerun.theory.drift import DriftingRate, Memory


def fed(outcomes: list[bool], memory: Memory | None = None) -> DriftingRate:
    rate = DriftingRate(memory or Memory())
    for outcome in outcomes:
        rate.observe(outcome)
    return rate


def coin(share: float, count: int, seed: int = 0) -> list[bool]:
    generator = random.Random(seed)
    return [generator.random() < share for _ in range(count)]


def test_without_observations_it_is_the_prior():
    assert DriftingRate(Memory()).mean(0.3, 4.0) == 0.3


def test_one_observation_weighs_one_beside_the_prior():
    assert fed([True]).mean(0.5, 4.0) == pytest.approx(3 / 5)


def test_weights_fade_by_the_slow_memory():
    rate = fed([True, False], Memory(slow=0.9, fast=0.5))
    assert rate.trials == pytest.approx(1.9)
    assert rate.wins == pytest.approx(0.9)


def test_a_steady_rate_is_found():
    means = [fed(coin(0.8, 400, seed)).mean(0.5, 4.0) for seed in range(40)]
    assert sum(means) / len(means) == pytest.approx(0.8, abs=0.03)


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.02), (0.02, 0.8), (0.65, 0.1)])
def test_a_change_is_believed_within_a_few_trials(before, after):
    rate = fed(coin(before, 300) + coin(after, 15, seed=5))
    assert abs(rate.mean(0.5, 1.0) - after) < abs(rate.mean(0.5, 1.0) - before)
    assert rate.num_changes >= 1


def test_what_does_not_change_is_seldom_called_a_change():
    changes = [fed(coin(0.7, 1000, seed)).num_changes for seed in range(10)]
    assert sum(changes) / 10_000 < 0.005


def test_shortening_leaves_the_short_memory():
    rate = fed(coin(0.7, 100))
    rate.shorten()
    assert (rate.trials, rate.wins) == (rate.fast_trials, rate.fast_wins)


@pytest.mark.parametrize("changes", [{"fast": 0.99}, {"slow": 1.0}, {"fast": 0.0}, {"surprise": 0}])
def test_memories_that_are_none_are_refused(changes):
    with pytest.raises(ValueError, match="fast < slow"):
        Memory(**changes)
