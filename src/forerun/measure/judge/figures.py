"""Figures of a draft (tau, beta, alpha, predicted speedup), comparisons, and the ledger.

The acceptance ledger says why a step emits fewer than K + 1 tokens, in tokens per step. Starting
from the measured length, one assumption after another is added, always in the same order: only
prompts of the tag the draft was made for; temperature 1; the draft reads the target's text instead
of its own. What is then missing to K + 1 is capacity, which only a better draft provides. The items
add up by construction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from forerun.theory.intervals import Interval, bootstrap


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
        mean_context: tokens before a step.
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
    """Compute the figures over all prompts, and over the prompts of each tag."""

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
    """Compute the figures over some prompts, at least one."""
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
        drafted, accepted = [], []
        for prompt in prompts:
            steps = prompt.acceptance.steps.items()
            drafted.append(sum(n for (depth, _), n in steps if depth >= position))
            accepted.append(sum(n for (_, taken), n in steps if taken >= position))
        interval = over_prompts(accepted, drafted, (0.0, 1.0), seed=seed)
        if interval is not None:
            found.append(interval)
    return tuple(found)


Finding = Literal["higher", "lower", "not shown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureChange:
    """A figure of two drafts, and whether the difference between them is shown.

    Attributes:
        figure: its name in `AcceptanceFigures`.
        tag: of the prompts it is over; None for all.
    """

    figure: str
    tag: str | None
    before: Interval
    after: Interval

    @property
    def finding(self) -> Finding:
        """Whether the figure is higher, lower, or not shown to differ."""
        return finding(self.before, self.after)

    def to_dict(self) -> dict[str, object]:
        """Return the comparison as JSON values."""
        return {**asdict(self), "finding": self.finding}


def finding(before: Interval, after: Interval) -> Finding:
    """Compare two 95% intervals: a difference is shown where they do not overlap."""
    if after.is_above(before.high):
        return "higher"
    return "lower" if after.is_below(before.low) else "not shown"


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


Length = tuple[float, float]
"""Emitted tokens and steps of one prompt; lengths are ratios of their sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerItem:
    """Expected gain in tokens per step from one further assumption.

    Attributes:
        gain: tokens per step; below 0 where it costs acceptance.
        length: expected tokens per step with this and everything before it.
    """

    name: str
    gain: Interval
    length: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Acceptance ledger of a draft: measured tau, gains and capacity, which sum to K + 1.

    Attributes:
        measured: tau as deployed, over all prompts.
        capacity: what remains.
        limit: K + 1.
    """

    draft: str
    measured: Interval
    items: tuple[LedgerItem, ...]
    capacity: Interval
    limit: int


def ledger_of(deployed: DraftFigures, sampled: DraftFigures, in_domain: str | None) -> Ledger:
    """Compute the ledger of one draft.

    Token by token verification is what the last supposition reckons with. Block verification
    accepts a little more, so under it that item is a little low, and capacity as much high.
    """
    check(deployed, sampled, in_domain)
    k = deployed.num_speculative_tokens
    inside = [i for i, p in enumerate(deployed.prompts) if in_domain in (None, p.tag)]
    outside = [i for i in range(len(deployed.prompts)) if i not in set(inside)]
    names, lengths = assumptions(
        [deployed.prompts[i] for i in inside], [sampled.prompts[i] for i in inside], k
    )
    elsewhere = [_measured_length(deployed.prompts[i]) for i in outside]

    def interval(statistic: Callable[[list[float]], float]) -> Interval:
        def of_groups(groups: Sequence[Sequence[int]]) -> float:
            within = [[length[i] for i in groups[0]] for length in lengths]
            everywhere = within[0] + [elsewhere[i] for i in groups[1]]
            return statistic([_mean_length(everywhere), *map(_mean_length, within)])

        return bootstrap(of_groups, [len(inside), len(outside)], seed=0)

    def item(n: int, name: str) -> LedgerItem:
        gain = interval(lambda levels: levels[n] - levels[n - 1])
        return LedgerItem(name=name, gain=gain, length=interval(lambda levels: levels[n]))

    return Ledger(
        draft=deployed.draft,
        measured=interval(lambda levels: levels[0]),
        items=tuple(item(n, name) for n, name in enumerate(names, start=1)),
        capacity=interval(lambda levels: k + 1 - levels[-1]),
        limit=k + 1,
    )


def check(deployed: DraftFigures, sampled: DraftFigures, in_domain: str | None) -> None:
    """Refuse figures that come from different prompts or different K."""
    if sampled.temperature != 1:
        raise ValueError(f"the sampled figures are at temperature {sampled.temperature}, not 1")
    tags = [prompt.tag for prompt in deployed.prompts]
    if (
        tags != [prompt.tag for prompt in sampled.prompts]
        or deployed.num_speculative_tokens != sampled.num_speculative_tokens
    ):
        raise ValueError("the two figures are not of the same prompts at the same K")
    if in_domain is not None and in_domain not in tags:
        raise ValueError(f"no held-out prompt has the tag {in_domain!r}; there are {set(tags)}")


def assumptions(
    deployed: Sequence[JudgedPrompt], sampled: Sequence[JudgedPrompt], k: int
) -> tuple[list[str], list[list[Length]]]:
    """Return the names of the assumptions and the lengths of the in-domain prompts under each."""
    names = ["in-domain prompts", "temperature 1"]
    lengths = [[*map(_measured_length, deployed)], [*map(_measured_length, sampled)]]
    if any(prompt.alphas for prompt in sampled):
        names.append("teacher-forced prefix")
        lengths.append([teacher_forced_length(prompt.alphas, k) for prompt in sampled])
    return names, lengths


def _measured_length(prompt: JudgedPrompt) -> Length:
    return float(prompt.acceptance.num_emitted), float(prompt.acceptance.num_steps)


def _mean_length(lengths: Sequence[Length]) -> float:
    num_steps = sum(steps for _, steps in lengths)
    return sum(emitted for emitted, _ in lengths) / num_steps if num_steps else 1.0


def teacher_forced_length(alphas: Sequence[float], num_speculative_tokens: int) -> Length:
    """Return the expected tokens and steps if every position is accepted with its alpha.

    The text is the target's. A step begins after the token that ended the one before; the first
    begins at the second token, for the prefill yields the first. With alphas of 0 and 1, which
    greedy decoding has, this is what the verifier does.
    """
    k = num_speculative_tokens
    begins = [0.0] * (len(alphas) + 1)  # probability that a step begins at a position
    begins[1:2] = [1.0]
    emitted = steps = 0.0
    for start in range(1, len(alphas) - k):
        through = begins[start]
        steps += through
        emitted += through
        for position in range(start, start + k):
            onwards = through * alphas[position]
            begins[position + 1] += through - onwards
            emitted += onwards
            through = onwards
        begins[start + k + 1] += through
    return emitted, steps
