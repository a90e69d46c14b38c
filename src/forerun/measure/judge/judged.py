"""Results of single held-out prompts, intervals over prompts, and the predicted speedup.

Whole prompts are resampled, because the steps of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval, bootstrap_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPrompt:
    """A prompt that no draft is trained on.

    Attributes:
        prompt_ids: its tokens, chat template included.
        tag: its label, such as a domain; figures are given by it.
        response_ids: what the target itself answered under the judge's parameters; None where it
            has not been asked yet.
    """

    prompt_ids: tuple[int, ...]
    tag: str = ""
    response_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedPrompt:
    """The results of a draft on one prompt.

    Only steps that could draft all K tokens count, so that tau is 1 + the sum of beta: neither the
    step that ends the prefill nor the last ones, whose K is cut to what the request has left. Nor
    does any step after the first repeated 32-gram of its text.

    Attributes:
        num_context_tokens: tokens before each of those steps, summed.
        num_tokens: emitted tokens, up to the first repeated 32-gram.
        alphas: acceptance probability at every position of the target's own response, the draft
            reading what the target wrote; empty for drafters without a model.
    """

    tag: str
    acceptance: AcceptanceCounts
    num_context_tokens: int
    num_tokens: int
    looped: bool
    distinct_4gram_share: float
    alphas: tuple[float, ...]


def over_prompts(
    numerators: Sequence[float],
    denominators: Sequence[float],
    bounds: tuple[float, float],
    *,
    seed: int,
) -> Interval | None:
    """Return sum(numerators) / sum(denominators) with a 95% bootstrap interval over prompts."""
    seen = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    if not seen:
        return None
    above, below = zip(*seen, strict=True)
    if len(seen) == 1:
        return Interval(estimate=above[0] / below[0], low=bounds[0], high=bounds[1])
    return bootstrap_ratio(above, below, seed=seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedSpeedup:
    """Predicted speedup of speculative over plain decoding.

    Attributes:
        num_speculative_tokens: the K in 0..max of highest speedup; 0 if drafting costs more
            than it saves.
        best: speedup at the best K, which the one half of the prompts chooses for the other; 1
            where plain decoding (K = 0) is best.
        per_k: speedup at K = 1, 2, ...
    """

    num_speculative_tokens: int
    best: Interval
    per_k: tuple[Interval, ...]

    @property
    def at_max_k(self) -> Interval:
        return self.per_k[-1]

    @property
    def best_drafting(self) -> float:
        """Highest predicted speedup over all K above 0, by which drafts are ranked.

        Not `best`, which is 1 of all drafts that do not pay yet.
        """
        return max(speedup.estimate for speedup in self.per_k)


@dataclass(frozen=True, slots=True, kw_only=True)
class CycleCost:
    """Cost of a step with K drafted tokens, in plain steps (kappa)."""

    num_speculative_tokens: int
    cost: Interval


def predicted_speedup(
    prompts: Sequence[JudgedPrompt], table: CostTable, max_k: int, *, seed: int
) -> PredictedSpeedup | None:
    """Predict the speedup, tau over kappa, for one sequence at the mean context of the steps.

    The best of several K is flattered by the prompts it won on. So every second prompt chooses the
    K that the others are scored at, and the other way round.
    """
    prompts = [prompt for prompt in prompts if prompt.acceptance.num_steps]
    if not prompts:
        return None
    num_steps = sum(prompt.acceptance.num_steps for prompt in prompts)
    context = round(sum(prompt.num_context_tokens for prompt in prompts) / num_steps)
    cycles = [
        CycleCost(num_speculative_tokens=k, cost=table.cycle_cost_interval(k, context))
        for k in range(max_k + 1)
    ]
    if any(cycle.cost.low <= 0 for cycle in cycles):
        return None
    even, odd = prompts[::2], prompts[1::2]
    chosen = [best_of(odd or even, cycles), best_of(even, cycles)]
    best_k = best_of(prompts, cycles).num_speculative_tokens
    best = speedup_of(prompts, [chosen[i % 2] for i in range(len(prompts))], seed)
    if best_k == 0 or best.estimate < 1.0:  # plain decoding can always be had
        best_k, best = 0, Interval(estimate=1.0, low=1.0, high=1.0)
    return PredictedSpeedup(
        num_speculative_tokens=best_k,
        best=best,
        per_k=tuple(speedup_of(prompts, [cycle] * len(prompts), seed) for cycle in cycles[1:]),
    )


def _num_emitted(prompt: JudgedPrompt, cycle: CycleCost) -> int:
    return prompt.acceptance.with_chains_of(cycle.num_speculative_tokens).num_emitted


def best_of(prompts: Sequence[JudgedPrompt], cycles: Sequence[CycleCost]) -> CycleCost:
    """Return the K with the highest predicted speedup, and its cost; the smallest K in a tie."""

    def speedup(cycle: CycleCost) -> float:
        return sum(_num_emitted(prompt, cycle) for prompt in prompts) / cycle.cost.estimate

    return max(cycles, key=speedup)


def speedup_of(prompts: Sequence[JudgedPrompt], cycles: Sequence[CycleCost], seed: int) -> Interval:
    """Return the predicted speedup over plain decoding, where every prompt has its own K.

    The errors of prompts and table are independent of each other, so they add up in quadrature.
    """
    pairs = [*zip(prompts, cycles, strict=True)]
    emitted = [float(_num_emitted(prompt, cycle)) for prompt, cycle in pairs]
    spent = [prompt.acceptance.num_steps * cycle.cost.estimate for prompt, cycle in pairs]
    bounds = (
        min(1 / cycle.cost.estimate for cycle in cycles),
        max((1 + cycle.num_speculative_tokens) / cycle.cost.estimate for cycle in cycles),
    )
    found = over_prompts(emitted, spent, bounds, seed=seed)
    assert found is not None
    slower = max(cycle.cost.high / cycle.cost.estimate for cycle in cycles)
    faster = min(cycle.cost.low / cycle.cost.estimate for cycle in cycles)
    below = math.hypot(found.estimate - found.low, found.estimate * (1 - 1 / slower))
    above = math.hypot(found.high - found.estimate, found.estimate * (1 / faster - 1))
    return Interval(
        estimate=found.estimate,
        low=max(0.0, found.estimate - below),
        high=found.estimate + above,
    )
