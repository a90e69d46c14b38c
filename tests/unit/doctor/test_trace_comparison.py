"""Comparisons of acceptance: how often they see what is not there, and whether what is."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from forerun.doctor.readers.trace_totals import (
    OUTCOMES,
    Comparison,
    StretchCounts,
    Stretches,
    compare,
    with_previous,
)
from forerun.theory.intervals import student_quantile
from forerun.trace.columns import Columns

K = 4
NUM_STEPS = 30


def drafting(accepted: NDArray[np.int64]) -> Columns:
    """Requests by steps; every step drafts K."""
    requests, steps = accepted.shape
    number = requests * steps
    return with_previous(
        {
            "request": np.repeat(np.arange(requests), steps),
            "step": np.tile(np.arange(steps), requests),
            "cycle_id": np.tile(np.arange(steps), requests),
            "t_s": np.arange(number) / 100.0,
            "num_accepted": accepted.ravel(),
            "expected_accepted": accepted.ravel().astype(float),
            "num_drafted": np.full(number, K),
            "depth_drafted": np.full(number, K),
            "k_budget": np.full(number, K),
            "batch_rows": np.full(number, K + 1),
            "context_tokens": np.tile(np.arange(steps), requests) + 100,
        }
    )


def stretches_of(steps: Columns) -> Stretches:
    stretches = Stretches()
    stretches.add(steps, [f"r{index}" for index in range(steps["request"].max() + 1)])
    return stretches


def after(accepted: NDArray[np.int64], outcome: str, others: tuple[str, ...]) -> Comparison:
    places = stretches_of(drafting(accepted)).by("previous")
    low = places.place == OUTCOMES.index(outcome)
    high = np.isin(places.place, [OUTCOMES.index(other) for other in others])
    found = compare(places, high, low)
    assert found is not None
    return found


def texts(seed: int, num_requests: int, steps: int = NUM_STEPS) -> NDArray[np.int64]:
    """Easy and hard requests, whose steps depend on nothing else."""
    generator = np.random.default_rng(seed)
    ease = generator.uniform(0.4, 0.9, (num_requests, 1))
    return generator.binomial(K, ease, (num_requests, steps)).astype(np.int64)


def test_a_tag_that_means_nothing_is_seldom_taken_for_one_that_does():
    seen = naive = 0
    for seed in range(200):
        places = stretches_of(drafting(texts(seed, 16))).by("all")
        found = compare(places, places.stretch % 2 == 0, places.stretch % 2 == 1)
        assert found is not None
        seen += found.t > student_quantile(0.98, found.freedom)
        naive += found.difference > 2.05 * (0.3 / np.sqrt(8 * NUM_STEPS))
    assert seen <= 10, "2% of 200 are 4"
    assert naive > 20, "taking steps for independent, that would happen all the time"


def test_requests_that_begin_well_do_not_seem_to_fall_off():
    """Of few steps each: among the others of a step that went well, fewer did."""
    found = after(texts(1, 400, steps=5), "full", ("none", "partial"))
    assert abs(found.t) < 3.0
    assert abs(found.difference) < 0.03


def test_what_follows_a_full_acceptance_is_seen_where_it_is_worse():
    accepted = texts(2, 12, steps=60)
    for row in accepted:
        for step in range(1, len(row)):
            if row[step - 1] == K:
                row[step] //= 2
    found = after(accepted, "full", ("none", "partial"))
    assert found.p_value < 1e-3 and found.difference > 0.05
    sound = after(texts(2, 12, steps=60), "full", ("none", "partial"))
    assert sound.p_value > 0.01


def test_deeper_drafts_are_no_worse_for_being_deep():
    steps = drafting(np.tile([0, 1, 2, 3], (8, 10)))
    depth = np.tile(np.where(np.arange(40) < 20, 2, 8), 8)
    places = stretches_of({**steps, "depth_drafted": depth}).by("index")
    cut = places.place < 2
    found = compare(places, cut, ~cut)
    assert found is not None and abs(found.difference) < 0.1


@pytest.mark.parametrize(
    ("freedom", "expected"), [(5.0, 3.365), (10.0, 2.764), (30.0, 2.457), (1e9, 2.326)]
)
def test_quantiles_are_students(freedom: float, expected: float):
    assert student_quantile(0.99, freedom) == pytest.approx(expected, rel=0.01)


def test_what_stretches_have_in_common_cancels_in_a_difference():
    """Texts differ much, but each accepts a tenth less on the second side: that is certain."""
    shares = np.linspace(0.2, 0.8, 10)
    num_steps = np.full(20, 1000.0)
    means = np.concatenate([shares, shares - 0.1])
    places = StretchCounts(
        stretch=np.tile(np.arange(10), 2),
        place=np.repeat([0, 1], 10),
        num_steps=num_steps,
        num_first=num_steps * means,
        total=num_steps * means,
        squares=num_steps * means**2,
    )
    found = compare(places, places.place == 0, places.place == 1)
    assert found is not None and found.difference == pytest.approx(0.1)
    assert found.error < 0.05
    assert found.p_value < 0.01
