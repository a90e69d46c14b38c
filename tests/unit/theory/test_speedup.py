"""Closed forms, published optima and hand-worked cases."""

from __future__ import annotations

import pytest

from forerun.theory.speedup import (
    acceptance_length,
    best_k,
    break_even_alpha,
    break_even_rate,
    conditional_acceptance,
    constant_acceptance_length,
    constant_survival,
    cycle_cost,
    speedup,
    survival,
)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.65, 0.9, 0.999])
@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_constant_acceptance_length_is_the_geometric_sum(alpha, k):
    expected = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert constant_acceptance_length(alpha, k) == pytest.approx(expected, rel=1e-12)


def test_certain_acceptance_emits_every_draft_and_the_bonus():
    assert constant_acceptance_length(1.0, 7) == 8.0
    assert constant_acceptance_length(1.0 - 1e-15, 7) == pytest.approx(8.0, abs=1e-12)


def test_the_same_figures_as_conditional_and_as_survival_differ():
    figures = (0.8, 0.8, 0.5, 0.5, 0.2)
    assert acceptance_length(survival(figures)) == pytest.approx(2.952)
    assert acceptance_length(figures) == pytest.approx(3.8)


def test_survival_is_the_running_product():
    assert survival([0.9, 0.5, 0.0, 0.7]) == pytest.approx((0.9, 0.45, 0.0, 0.0))
    assert constant_survival(0.5, 3) == (0.5, 0.25, 0.125)


def test_conditional_acceptance_is_what_survival_was_made_of():
    assert conditional_acceptance(survival([0.9, 0.5, 0.7])) == pytest.approx((0.9, 0.5, 0.7))
    assert conditional_acceptance((0.9, 0.0, 0.0)) == (0.9, 0.0, 0.0)


def test_cycle_cost_adds_up():
    assert cycle_cost(5, draft_cost=0.1, verify_cost=1.2, overhead=0.05) == pytest.approx(1.75)


@pytest.mark.parametrize(
    ("alpha", "k", "draft_cost", "expected"),
    [(0.4, 5, 0.05, 1.33), (0.4, 5, 0.1, 1.11), (0.4, 5, 0.2, 0.83), (0.15, 10, 0.05, 0.78)],
)
def test_speedup_with_free_verification(alpha, k, draft_cost, expected):
    kappa = cycle_cost(k, draft_cost=draft_cost, verify_cost=1.0)
    assert speedup(constant_acceptance_length(alpha, k), kappa) == pytest.approx(expected, abs=5e-3)


BREAK_EVEN_ALPHA = [  # c, v, o, then alpha at K = 3, 5, 10
    (0.02, 1.0, 0.0, (0.06, 0.09, 0.17)),
    (0.05, 1.0, 0.0, (0.13, 0.20, 0.33)),
    (0.10, 1.0, 0.0, (0.23, 0.33, 0.50)),
    (0.20, 1.0, 0.0, (0.39, 0.51, 0.67)),
    (0.02, 1.2, 0.1, (0.27, 0.29, 0.33)),
    (0.05, 1.2, 0.1, (0.32, 0.36, 0.44)),
    (0.10, 1.2, 0.1, (0.39, 0.45, 0.57)),
    (0.20, 1.2, 0.1, (0.51, 0.58, 0.70)),
    (0.02, 1.5, 0.2, (0.46, 0.45, 0.47)),
    (0.05, 1.5, 0.2, (0.49, 0.49, 0.55)),
    (0.10, 1.5, 0.2, (0.54, 0.56, 0.63)),
    (0.20, 1.5, 0.2, (0.64, 0.66, 0.74)),
]


@pytest.mark.parametrize(("draft_cost", "verify_cost", "overhead", "expected"), BREAK_EVEN_ALPHA)
def test_break_even_alpha(draft_cost, verify_cost, overhead, expected):
    for k, alpha in zip((3, 5, 10), expected, strict=True):
        kappa = cycle_cost(k, draft_cost=draft_cost, verify_cost=verify_cost, overhead=overhead)
        assert break_even_alpha(k, kappa) == pytest.approx(alpha, abs=5.1e-3)


def test_break_even_alpha_has_ends():
    assert break_even_alpha(4, 5.1) is None
    assert break_even_alpha(4, 5.0) == pytest.approx(1.0)
    assert break_even_alpha(4, 0.9) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize(
    ("k", "draft_cost", "verify_cost", "overhead", "expected"),
    [(5, 0.05, 1.0, 0.0, 0.05), (5, 0.2, 1.3, 0.2, 0.3), (5, 0.4, 1.5, 0.5, 0.6)],
)
def test_break_even_rate(k, draft_cost, verify_cost, overhead, expected):
    rate = break_even_rate(k, draft_cost=draft_cost, verify_cost=verify_cost, overhead=overhead)
    assert rate == pytest.approx(expected)


def test_speedup_is_one_at_break_even_for_any_profile():
    costs = {"draft_cost": 0.1, "verify_cost": 1.25, "overhead": 0.05}
    rate = break_even_rate(4, **costs)
    for profile in ((0.7, 0.0, 0.0, 0.0), (0.175, 0.175, 0.175, 0.175), (0.4, 0.2, 0.1, 0.0)):
        assert sum(profile) / 4 == pytest.approx(rate)
        assert speedup(acceptance_length(profile), cycle_cost(4, **costs)) == pytest.approx(1.0)


BEST_K = [  # alpha, c, K*, speedup with free verification
    (0.5, 0.01, 5, 1.88),
    (0.6, 0.01, 7, 2.30),
    (0.7, 0.01, 9, 2.97),
    (0.8, 0.01, 14, 4.23),
    (0.9, 0.01, 24, 7.49),
    (0.4, 0.05, 2, 1.42),
    (0.5, 0.05, 3, 1.63),
    (0.6, 0.05, 4, 1.92),
    (0.7, 0.05, 6, 2.35),
    (0.8, 0.05, 8, 3.09),
    (0.9, 0.05, 13, 4.67),
    (0.5, 0.10, 2, 1.46),
    (0.6, 0.10, 3, 1.67),
    (0.7, 0.10, 4, 1.98),
    (0.8, 0.10, 6, 2.47),
    (0.9, 0.10, 10, 3.43),
]


@pytest.mark.parametrize(("alpha", "draft_cost", "k", "expected"), BEST_K)
def test_best_k_for_constant_alpha(alpha, draft_cost, k, expected):
    best = best_k(
        constant_survival(alpha, 40),
        lambda k: cycle_cost(k, draft_cost=draft_cost, verify_cost=1.0),
    )
    assert best.num_speculative_tokens == k
    assert best.speedup == pytest.approx(expected, abs=5.1e-3)
    assert best.speedup == pytest.approx(best.acceptance_length / best.cycle_cost)


def test_best_k_stops_before_a_cliff_in_the_verify_cost():
    best = best_k(
        constant_survival(0.95, 16),
        lambda k: cycle_cost(k, draft_cost=0.01, verify_cost=1.3 if k < 8 else 3.9),
    )
    assert best.num_speculative_tokens == 7


def test_speculation_never_pays_when_the_draft_is_as_slow_as_the_target():
    best = best_k(
        constant_survival(0.9, 20), lambda k: cycle_cost(k, draft_cost=1.0, verify_cost=1.0)
    )
    assert (best.num_speculative_tokens, best.speedup) == (0, 1.0)


def test_of_equal_speedups_the_smaller_k_wins():
    best = best_k((0.5, 0.25), lambda k: {1: 1.2, 2: 1.4}[k])
    assert best.num_speculative_tokens == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: constant_acceptance_length(1.1, 3), "position 1 is 1.1"),
        (lambda: constant_acceptance_length(float("nan"), 3), "is nan"),
        (lambda: constant_acceptance_length(0.5, -1), "num_speculative_tokens is -1"),
        (lambda: survival([0.5, -0.1]), "position 2 is -0.1"),
        (lambda: acceptance_length([0.3, 0.4]), "position 2 is 0.4, above 0.3"),
        (lambda: cycle_cost(-1, draft_cost=0.1, verify_cost=1.0), "num_speculative_tokens is -1"),
        (lambda: cycle_cost(3, draft_cost=-0.1, verify_cost=1.0), "draft_cost is -0.1"),
        (lambda: cycle_cost(3, draft_cost=0.1, verify_cost=float("nan")), "verify_cost is nan"),
        (lambda: cycle_cost(0, draft_cost=0.1, verify_cost=0.0), "cost 0"),
        (lambda: break_even_rate(0, draft_cost=0.1, verify_cost=1.0), "at least 1"),
        (lambda: break_even_alpha(0, 1.0), "at least 1"),
    ],
)
def test_impossible_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
