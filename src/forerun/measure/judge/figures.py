"""Figures of a draft (tau, beta, alpha, predicted speedup) and comparisons of two drafts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Literal

from forerun.measure.judge.judged import (
    JudgedPrompt,
    PredictedSpeedup,
    over_prompts,
    predicted_speedup,
)
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceFigures:
    """Figures of a draft over some prompts, with 95% intervals over prompts.

    Attributes:
        num_steps: that could draft all K tokens.
        num_tokens: emitted by the verifier, up to where a text begins to loop.
        acceptance_length: tau; None where no step drafted.
        acceptance_rate_per_position: beta, for positions 1 to K.
        acceptance_probability: alpha, teacher-forced over the target's own responses, by the rule
            deployed: sum of min(target, draft), which for greedy drafts is the target's
            probability of the draft's most likely token. None for drafters without a model.
        looped_share: completions that were cut where they began to loop.
        distinct_4gram_share: mean over completions, up to there.
        speedup: predicted; None without a cost table.
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
    """All figures of a draft that was judged with one set of sampling parameters.

    Attributes:
        prompts: what the figures were made of; none where they were read from a report.
    """

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
    """A figure of two drafts, and whether the difference between them is shown.

    Attributes:
        tag: of the prompts it is over; None for all.
    """

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
    """Compare tau, alpha and predicted speedup of two drafts, over all prompts and by tag.

    Raises:
        ValueError: they were judged at another temperature or K, or over other prompts.
    """
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
        "speedup": (speedup_of(before), speedup_of(after)),
    }
    for figure, (first, second) in pairs.items():
        if first is not None and second is not None:
            yield FigureChange(figure=figure, tag=tag, before=first, after=second)


def speedup_of(figures: AcceptanceFigures) -> Interval | None:
    return None if figures.speedup is None else figures.speedup.at_max_k
