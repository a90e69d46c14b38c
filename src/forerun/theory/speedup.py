"""Speedup of speculative decoding: tokens per step over cost per step.

Costs are in plain decode steps throughout: c is one drafted token, v the target pass over K + 1
rows, o everything else a speculative cycle adds. alpha is the acceptance probability of a position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

BISECTIONS = 60  # halves [0, 1] to below the resolution of a double


@dataclass(frozen=True, slots=True, kw_only=True)
class BestK:
    """The K with the highest speedup, with tau, kappa and the speedup at this K.

    Attributes:
        num_speculative_tokens: K; 0 says that speculation never pays.
        speedup: tau / kappa; 1 at K = 0.
    """

    num_speculative_tokens: int
    acceptance_length: float
    cycle_cost: float
    speedup: float


def survival(conditional: Sequence[float]) -> tuple[float, ...]:
    """Return P(accepted through i) from the conditional acceptance of each position."""
    for position, probability in enumerate(conditional, start=1):
        _check_probability(probability, f"conditional acceptance at position {position}")
    return tuple(accumulate(conditional, mul))


def conditional_acceptance(survival: Sequence[float]) -> tuple[float, ...]:
    """Return P(position i accepted | all before it accepted), or 0 where that never happens."""
    pairs = pairwise((1.0, *survival))
    return tuple(after / before if before else 0.0 for before, after in pairs)


def constant_survival(alpha: float, num_speculative_tokens: int) -> tuple[float, ...]:
    """Return alpha, alpha^2, ..., alpha^K."""
    return survival([alpha] * num_speculative_tokens)


def acceptance_length(survival: Sequence[float]) -> float:
    """Return tau = 1 + sum of P(accepted through i), the tokens emitted per step.

    Raises:
        ValueError: a probability is outside [0, 1] or larger than the one before it.
    """
    before = 1.0
    for position, probability in enumerate(survival, start=1):
        _check_probability(probability, f"survival at position {position}")
        if probability > before:
            raise ValueError(
                f"survival at position {position} is {probability}, above {before} before it; "
                "pass conditional acceptance through survival() first"
            )
        before = probability
    return 1.0 + sum(survival)


def constant_acceptance_length(alpha: float, num_speculative_tokens: int) -> float:
    """Return tau = (1 - alpha^(K+1)) / (1 - alpha), or K + 1 in the limit alpha = 1.

    Summed term by term, which loses no digits near alpha = 1.

    Raises:
        ValueError: alpha is outside [0, 1] or K is negative.

    Source: Leviathan et al. 2023 (2211.17192), equation 1.
    """
    _check_k(num_speculative_tokens, minimum=0)
    return acceptance_length(constant_survival(alpha, num_speculative_tokens))


def cycle_cost(
    num_speculative_tokens: int, *, draft_cost: float, verify_cost: float, overhead: float = 0.0
) -> float:
    """Return kappa = K c + v(K + 1) + o."""
    _check_k(num_speculative_tokens, minimum=0)
    costs = {"draft_cost": draft_cost, "verify_cost": verify_cost, "overhead": overhead}
    for name, cost in costs.items():
        if not cost >= 0.0:
            raise ValueError(f"{name} is {cost}; it must be 0 or more plain steps")
    kappa = num_speculative_tokens * draft_cost + verify_cost + overhead
    if kappa == 0.0:
        raise ValueError("a cycle of cost 0; give the measured verify_cost")
    return kappa


def speedup(acceptance_length: float, cycle_cost: float) -> float:
    """Return tau / kappa: plain over speculative time per emitted token.

    With v = 1 and o = 0 this is theorem 3.8 of Leviathan et al. 2023 (2211.17192).
    """
    return acceptance_length / cycle_cost


def break_even_rate(
    num_speculative_tokens: int, *, draft_cost: float, verify_cost: float, overhead: float = 0.0
) -> float:
    """Return r* = c + (v(K + 1) + o - 1) / K, the accepted / drafted of the break-even point.

    Exact for every acceptance profile, since tau = 1 + r K. Above 1 no draft can pay at this K;
    negative if the cycle is cheaper than a plain step.

    Raises:
        ValueError: K is below 1, or a cost is negative.
    """
    _check_k(num_speculative_tokens, minimum=1)
    kappa = cycle_cost(
        num_speculative_tokens, draft_cost=draft_cost, verify_cost=verify_cost, overhead=overhead
    )
    return (kappa - 1.0) / num_speculative_tokens


def break_even_alpha(num_speculative_tokens: int, cycle_cost: float) -> float | None:
    """Return the constant alpha at which tau equals kappa, or None if even 1 is too little."""
    _check_k(num_speculative_tokens, minimum=1)
    if cycle_cost > num_speculative_tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if constant_acceptance_length(middle, num_speculative_tokens) < cycle_cost:
            low = middle
        else:
            high = middle
    return high


def best_k(survival: Sequence[float], cycle_cost_of: Callable[[int], float]) -> BestK:
    """Return the K in 0..len(survival) of highest speedup, the smallest among equals.

    K = 0 is plain decoding, of tau 1 and kappa 1 by definition, so the result is never less
    than 1 and K = 0 says that no draft length pays.

    Args:
        survival: P(accepted through i), as long as the largest K to consider.
        cycle_cost_of: kappa for K >= 1, in plain steps.
    """
    best = BestK(num_speculative_tokens=0, acceptance_length=1.0, cycle_cost=1.0, speedup=1.0)
    for k in range(1, len(survival) + 1):
        tau, kappa = acceptance_length(survival[:k]), cycle_cost_of(k)
        if (gain := speedup(tau, kappa)) > best.speedup:
            best = BestK(
                num_speculative_tokens=k, acceptance_length=tau, cycle_cost=kappa, speedup=gain
            )
    return best


def _check_probability(value: float, what: str) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{what} is {value}; it must be in [0, 1]")


def _check_k(num_speculative_tokens: int, minimum: int) -> None:
    if num_speculative_tokens < minimum:
        raise ValueError(
            f"num_speculative_tokens is {num_speculative_tokens}; it must be at least {minimum}"
        )
