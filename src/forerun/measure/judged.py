"""Figures of a judged draft over held-out prompts, their intervals, and the predicted speedup.

Whole prompts are resampled, because the steps of one prompt are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Literal

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval, bootstrap_ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationPrompt:
    """A prompt that no draft is trained on.

    Attributes:
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
        estimate=found.estimate, low=max(0.0, found.estimate - below), high=found.estimate + above
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures:
    """Figures of a draft over some prompts, with 95% intervals over prompts.

    Attributes:
        num_steps: that could draft all K tokens.
        acceptance_length: tau; None where no step drafted.
        acceptance_rate_per_position: beta, for positions 1 to K.
        acceptance_probability: alpha, teacher-forced over the target's own responses, by the rule
            deployed: sum of min(target, draft), which for greedy drafts is the target's
            probability of the draft's most likely token. None for drafters without a model.
        looped_share: completions that were cut where they began to loop.
        distinct_4gram_share: mean over completions, up to there.
    """

    num_prompts: int
    num_steps: int
    num_tokens: int
    acceptance_length: Interval | None
    acceptance_rate_per_position: tuple[Interval, ...]
    acceptance_probability: Interval | None
    looped_share: float
    distinct_4gram_share: float
    mean_context: float
    speedup: PredictedSpeedup | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftFigures:
    """All figures of a draft that was judged with one set of sampling parameters."""

    draft: str
    temperature: float
    num_speculative_tokens: int
    overall: AcceptanceFigures
    by_tag: dict[str, AcceptanceFigures]
    prompts: tuple[JudgedPrompt, ...] = field(default=(), repr=False)

    def to_dict(self) -> dict[str, object]:
        """Return JSON values without the single prompts."""
        values = asdict(self)
        del values["prompts"]
        return values


def judge_figures(
    draft: str,
    temperature: float,
    num_speculative_tokens: int,
    prompts: Sequence[JudgedPrompt],
    costs: CostTable | None = None,
    *,
    seed: int = 0,
) -> DraftFigures:
    def over(chosen: Sequence[JudgedPrompt]) -> AcceptanceFigures:
        return _figures_of(chosen, num_speculative_tokens, costs, seed=seed)

    tags = sorted({prompt.tag for prompt in prompts})
    overall = over(prompts)
    by_tag = {tag: over([p for p in prompts if p.tag == tag]) for tag in tags}
    return DraftFigures(
        draft=draft,
        temperature=temperature,
        num_speculative_tokens=num_speculative_tokens,
        overall=overall,
        by_tag=by_tag,
        prompts=tuple(prompts),
    )


def _figures_of(
    prompts: Sequence[JudgedPrompt],
    num_speculative_tokens: int,
    costs: CostTable | None,
    *,
    seed: int,
) -> AcceptanceFigures:
    counts = [prompt.acceptance for prompt in prompts]
    num_steps = sum(count.num_steps for count in counts)
    contexts = sum(prompt.num_context_tokens for prompt in prompts)
    alpha = over_prompts(
        [sum(prompt.alphas) for prompt in prompts],
        [len(prompt.alphas) for prompt in prompts],
        (0.0, 1.0),
        seed=seed,
    )
    speedup = None
    if costs is not None:
        speedup = predicted_speedup(prompts, costs, num_speculative_tokens, seed=seed)
    return AcceptanceFigures(
        num_prompts=len(prompts),
        num_steps=num_steps,
        num_tokens=sum(prompt.num_tokens for prompt in prompts),
        acceptance_length=over_prompts(
            [count.num_emitted for count in counts],
            [count.num_steps for count in counts],
            (1.0, 1.0 + num_speculative_tokens),
            seed=seed,
        ),
        acceptance_rate_per_position=_beta_of(prompts, num_speculative_tokens, seed),
        acceptance_probability=alpha,
        looped_share=mean(float(prompt.looped) for prompt in prompts),
        distinct_4gram_share=mean(prompt.distinct_4gram_share for prompt in prompts),
        mean_context=contexts / num_steps if num_steps else 0.0,
        speedup=speedup,
    )


def _beta_of(
    prompts: Sequence[JudgedPrompt], num_speculative_tokens: int, seed: int
) -> tuple[Interval, ...]:
    """Return the share of steps accepted through each position that was drafted (beta)."""
    found = []
    for position in range(1, num_speculative_tokens + 1):
        counts = [p.acceptance for p in prompts if p.acceptance.max_depth >= position]
        accepted = [each.accepted_per_position[position - 1] for each in counts]
        drafted = [each.drafted_per_position[position - 1] for each in counts]
        interval = over_prompts(accepted, drafted, (0.0, 1.0), seed=seed)
        if interval is not None:
            found.append(interval)
    return tuple(found)


Finding = Literal["higher", "lower", "no difference shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of two drafts, and whether the difference between them is shown."""

    figure: str
    tag: str | None
    before: Interval
    after: Interval

    @property
    def finding(self) -> Finding:
        """Whether the figure is higher, lower, or no difference is shown."""
        return finding(self.before, self.after)

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as JSON values."""
        return {**asdict(self), "finding": self.finding}


def finding(before: Interval, after: Interval) -> Finding:
    """Compare two 95% intervals: a difference is shown where they do not overlap."""
    if after.is_above(before.high):
        return "higher"
    return "lower" if after.is_below(before.low) else "no difference shown"


def changes(before: DraftFigures, after: DraftFigures) -> tuple[FigureChange, ...]:
    """Compare tau, alpha and predicted speedup of two drafts, over all prompts and by tag."""
    for name in ("temperature", "num_speculative_tokens"):
        if getattr(before, name) != getattr(after, name):
            raise ValueError(
                f"{name} is {getattr(before, name)} before and {getattr(after, name)} after; "
                "figures compare where both are judged alike"
            )
    if [prompt.tag for prompt in before.prompts] != [prompt.tag for prompt in after.prompts]:
        raise ValueError("the two drafts were not judged on the same prompts")
    pairs: list[tuple[str | None, AcceptanceFigures, AcceptanceFigures]]
    pairs = [(None, before.overall, after.overall)]
    if len(before.by_tag) > 1:
        pairs += [(tag, before.by_tag[tag], after.by_tag[tag]) for tag in before.by_tag]
    return tuple(change for pair in pairs for change in changes_of(*pair))


def changes_of(
    tag: str | None, before: AcceptanceFigures, after: AcceptanceFigures
) -> Iterator[FigureChange]:
    """Yield the comparison of each figure that is known for both drafts."""
    pairs = {
        "acceptance_length": (before.acceptance_length, after.acceptance_length),
        "acceptance_probability": (before.acceptance_probability, after.acceptance_probability),
        "speedup": (_at_max_k(before), _at_max_k(after)),
    }
    for figure, (first, second) in pairs.items():
        if first is not None and second is not None:
            yield FigureChange(figure=figure, tag=tag, before=first, after=second)


def _at_max_k(figures: AcceptanceFigures) -> Interval | None:
    return None if figures.speedup is None else figures.speedup.at_max_k
