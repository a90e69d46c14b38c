from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from forerun.sampling import noise
from forerun.sampling.noise import (
    Purpose,
    chain_keys,
    draw,
    exponential,
    position_key,
    request_key,
    step_key,
    uniform,
)

LARGEST = 1 - 2.0**-53
PINNED_REQUEST = -6411193824288604561
PINNED_POSITION = -3299055701910764849
PINNED_STEP = 4779030811136684683


def chi_square(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Statistic in units of its standard deviation from its mean; about N(0, 1) for many cells."""
    expected = probs * counts.sum()
    freedom = len(probs) - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return (statistic - freedom) / math.sqrt(2 * freedom)


def test_keys_are_pinned() -> None:
    """A seed must give the same text in every version and on every machine."""
    assert request_key(0, 0) == PINNED_REQUEST
    assert position_key(PINNED_REQUEST, 7) == PINNED_POSITION
    assert step_key(PINNED_REQUEST, 7, 2, Purpose.ACCEPT) == PINNED_STEP


def test_keys_of_different_draws_differ_and_fit_int64() -> None:
    keys = []
    for request in (request_key(seed, index) for seed in range(3) for index in range(3)):
        keys += [position_key(request, position) for position in range(40)]
        keys += [
            step_key(request, num_committed, node, purpose)
            for num_committed, node, purpose in product(range(40), range(8), Purpose)
            if purpose is not Purpose.TARGET
        ]
    assert len(set(keys)) == len(keys)
    torch.tensor(keys, dtype=torch.int64)  # raises on overflow


def test_seeds_count_modulo_two_to_the_64th() -> None:
    assert request_key(-1, 0) == request_key(2**64 - 1, 0)
    assert request_key(2**64 * 10**300 + 5, 0) == request_key(5, 0)


def test_chain_keys_are_step_keys_in_order() -> None:
    assert chain_keys(5, 9, 2) == [
        step_key(5, 9, 0, Purpose.ACCEPT),
        step_key(5, 9, 1, Purpose.ACCEPT),
        step_key(5, 9, 0, Purpose.RECOVERED),
        step_key(5, 9, 0, Purpose.BONUS),
    ]


def test_uniforms_reach_both_ends_of_their_interval_but_not_one() -> None:
    ends = uniform(torch.tensor([0, 2**63 - 1, -(2**63), -1]))
    assert ends.tolist() == [0.0, 0.5 - 2.0**-53, 0.5, LARGEST]


@pytest.mark.parametrize("purpose", [p for p in Purpose if p is not Purpose.TARGET])
def test_uniforms_of_consecutive_keys_are_uniform_and_independent(purpose: Purpose) -> None:
    keys = [step_key(request_key(0, 0), n, 0, purpose) for n in range(8_001)]
    values = uniform(torch.tensor(keys))
    cells = (values * 10).long()
    pairs = torch.bincount(cells[:-1] * 10 + cells[1:], minlength=100)
    assert abs(chi_square(pairs.double(), torch.full((100,), 0.01))) < 4


def test_purposes_of_one_draw_are_independent() -> None:
    keys = [[step_key(1, n, 0, p) for p in (Purpose.DRAFT, Purpose.ACCEPT)] for n in range(8_000)]
    cells = (uniform(torch.tensor(keys)) * 10).long()
    pairs = torch.bincount(cells[:, 0] * 10 + cells[:, 1], minlength=100)
    assert abs(chi_square(pairs.double(), torch.full((100,), 0.01))) < 4


def test_clocks_are_those_of_the_scalar_arithmetic() -> None:
    """Wrapping int64 tensors compute what Python integers do, so any device draws the same bits."""
    mask = 2**64 - 1
    key = position_key(request_key(3, 1), 11)
    clocks = exponential(torch.tensor([key]), 50)[0]
    for token in range(50):
        bits = (key + (token + 1) * 0x9E3779B97F4A7C15) & mask
        bits = ((bits ^ bits >> 30) * 0xBF58476D1CE4E5B9) & mask
        bits = ((bits ^ bits >> 27) * 0x94D049BB133111EB) & mask
        bits ^= bits >> 31
        expected = -math.log1p(-((bits >> 12) + 0.5) * 2.0**-52)
        assert clocks[token].item() == pytest.approx(expected, rel=1e-7)


def test_clocks_do_not_depend_on_batch_or_chunk() -> None:
    keys = torch.arange(40) * 123_456_789
    vocab_size = 150_000  # 28 rows per chunk
    together = exponential(keys, vocab_size)
    alone = exponential(keys[33:34], vocab_size)
    assert torch.equal(together[33:34], alone)


def test_clocks_are_positive_finite_and_exponential() -> None:
    clocks = exponential(torch.arange(100), 1000).flatten()
    assert clocks.min() > 0
    assert clocks.isfinite().all()
    quantiles = (-(-clocks.double()).expm1() * 100).long().clamp(max=99)
    counts = torch.bincount(quantiles, minlength=100)
    assert abs(chi_square(counts.double(), torch.full((100,), 0.01))) < 4


@pytest.mark.parametrize(
    ("uniform_value", "token"),
    [
        (0.0, 1),
        (math.nextafter(0.25, 0), 1),
        (0.25, 3),
        (math.nextafter(0.75, 0), 3),
        (0.75, 4),
        (LARGEST, 4),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 2.0**-140, 2.0**120])
def test_draw_switches_exactly_at_its_breakpoints(
    uniform_value: float, token: int, scale: float
) -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 2.0, 1.0, 0.0]]) * scale
    assert draw(weights, torch.tensor([uniform_value], dtype=torch.float64)).item() == token


def test_draw_never_returns_a_zero_weight_at_the_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.empty(2000, 97).exponential_(generator=generator) ** 8
    weights[torch.empty(2000, 97).uniform_(generator=generator) < 0.7] = 0
    weights[:, 50] = 1e-30
    rows = torch.arange(2000)
    for value in (0.0, 2.0**-53, 0.5, LARGEST):
        tokens = draw(weights, torch.full((2000,), value, dtype=torch.float64))
        assert (weights[rows, tokens] > 0).all()


@pytest.mark.parametrize(("raised", "value", "token"), [(1, 0.25, 2), (4, LARGEST, 3)])
def test_draw_survives_a_scan_that_rounds_in_another_order(
    monkeypatch: pytest.MonkeyPatch, raised: int, value: float, token: int
) -> None:
    """A device may add in parallel: the sum at a zero weight may then exceed its neighbours'."""
    cumsum = torch.Tensor.cumsum

    def jittered(self: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
        sums = cumsum(self, dim, dtype=dtype)
        sums[..., raised] *= 1 + 2.0**-50
        return sums

    monkeypatch.setattr(torch.Tensor, "cumsum", jittered)
    monkeypatch.setattr(noise, "scans_in_order", lambda device: False)
    weights = torch.tensor([[1.0, 0.0, 2.0, 1.0, 0.0, 0.0]])
    assert draw(weights, torch.tensor([value], dtype=torch.float64)).item() == token


def test_draw_follows_the_weights() -> None:
    weights = torch.tensor([3.0, 0.0, 1.0, 4.0, 2.0])
    keys = torch.tensor([step_key(7, n, 0, Purpose.DRAFT) for n in range(8_000)])
    tokens = draw(weights.expand(8_000, 5), uniform(keys))
    counts = torch.bincount(tokens, minlength=5).double()
    assert counts[1] == 0
    possible = weights > 0
    assert abs(chi_square(counts[possible], weights[possible] / 10)) < 4
