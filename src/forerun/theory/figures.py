"""Figures of a run: steps, tokens, tau, beta, alpha, kappa and speedup, each with its interval.

They are computed from groups: what was counted and timed together. Steps of one group depend on
each other, groups do not, so that intervals are over groups: the cycles of one request, the seconds
of a server, the parts of a trace, the prompts of a judgement, the blocks of a comparison.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import reduce
from itertools import groupby, zip_longest
from operator import add
from typing import Any

from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.intervals import DiscountedRatio, Interval, bootstrap_ratio, student_quantile
from forerun.theory.record import StepRecord

MIN_PLAIN_STEPS = 8
"""Measured plain steps, counted per sequence, from which a baseline is used."""
MIN_PLAIN_GROUPS = 3
"""Groups that these steps must come from."""
DURATIONS = ("draft_s", "verify_s", "other_s")
INTERVALS = ("acceptance_length", "acceptance_probability", "cycle_cost", "speedup")


@dataclass(slots=True, kw_only=True)
class Seconds:
    """Numbers of cycles, of their steps and tokens, and the sums of their durations in seconds."""

    num_cycles: int = 0
    num_steps: int = 0
    num_tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    other_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.draft_s + self.verify_s + self.other_s

    def add(self, cycle: Sequence[StepRecord]) -> None:
        """Add the cycle that these records share."""
        first = cycle[0]
        self.num_cycles += 1
        self.num_steps += len(cycle)
        self.num_tokens += sum(record.num_emitted for record in cycle)
        self.draft_s += first.draft_s
        self.verify_s += first.verify_s
        self.other_s += first.other_s

    def include(self, other: Seconds) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


def merge_seconds(parts: Iterable[Seconds]) -> Seconds:
    """Sum cycles of several kinds or batch sizes."""
    total = Seconds()
    for part in parts:
        total.include(part)
    return total


@dataclass(slots=True, kw_only=True)
class Group:
    """What was counted and timed together.

    Attributes:
        acceptance: counts of all steps, plain ones included.
        num_tokens: emitted, after stop truncation.
        alphas: acceptance probabilities of single positions, where they were computed.
        methods: steps by drafter, "plain" where none was asked, "no proposal" where none was made.
        sum_k: sum of K over the steps.
        decoded: times of the cycles that read no prompt, by number of sequences.
        plain: those of the plain steps among them that a baseline may rest on.
    """

    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    num_tokens: int = 0
    alphas: Sequence[float] = ()
    methods: Counter[str] = field(default_factory=Counter)
    sum_k: int = 0
    decoded: dict[int, Seconds] = field(default_factory=dict)
    plain: dict[int, Seconds] = field(default_factory=dict)


class Grouping:
    """Divides the cycles of an engine into groups, at most `most` of which are kept.

    A plain step after one with a draft is not measured for the baseline: drafting leaves the
    target's weights uncached, which plain decoding does not. A step in which a drafter was asked
    and found nothing is not plain. Steps that read prompts are not timed.

    Args:
        key: of the group that a cycle belongs to, from its first record.
    """

    def __init__(self, key: Callable[[StepRecord], float], most: int | None = None) -> None:
        self.key = key
        self.groups: deque[tuple[float, Group]] = deque(maxlen=most)
        self._follows_draft = True

    def add(self, records: Iterable[StepRecord]) -> None:
        """Count steps, in order; the records of one cycle must come in one call."""
        for _, cycle in groupby(records, key=lambda record: record.cycle_id):
            self._add_cycle(list(cycle))

    def _add_cycle(self, cycle: Sequence[StepRecord]) -> None:
        key = self.key(cycle[0])
        if not self.groups or self.groups[-1][0] != key:
            self.begin_group(key)
        group = self.groups[-1][1]
        for record in cycle:
            counts = record.depth_drafted, record.num_accepted
            group.acceptance.add(*counts, num_drafted=record.num_drafted)
            group.num_tokens += record.num_emitted
            group.sum_k += record.k_budget
            asked = "no proposal" if record.k_budget else "plain"
            group.methods[record.method if record.num_drafted else asked] += 1
        drafts = any(record.k_budget for record in cycle)
        follows_draft, self._follows_draft = self._follows_draft, drafts
        if not cycle[0].num_prefill_rows:
            group.decoded.setdefault(len(cycle), Seconds()).add(cycle)
            if not (drafts or follows_draft):
                group.plain.setdefault(len(cycle), Seconds()).add(cycle)

    def begin_group(self, key: float) -> None:
        self.groups.append((key, Group()))


def observe_plain(
    baselines: dict[int, DiscountedRatio], group: Group, memory: float = 1.0
) -> dict[int, DiscountedRatio]:
    """Add a group's measured plain steps to the seconds per token by number of sequences."""
    for size, times in group.plain.items():
        baseline = baselines.setdefault(size, DiscountedRatio(memory))
        baseline.observe(times.num_tokens, times.total_s)
    return baselines


def find_baselines(groups: Iterable[Group]) -> dict[int, DiscountedRatio]:
    """Return plain seconds per token by number of sequences, where enough steps were measured."""
    found: dict[int, DiscountedRatio] = {}
    for group in groups:
        observe_plain(found, group)
    return {
        size: ratio
        for size, ratio in found.items()
        if ratio.num_pairs >= MIN_PLAIN_GROUPS and ratio.x >= MIN_PLAIN_STEPS
    }


RatioInterval = Callable[[Sequence[float], Sequence[float], tuple[float, float]], Interval | None]
"""Interval of sum(numerators) / sum(denominators) over groups, within bounds."""


def interval_of(ratio: DiscountedRatio, error: float, bounds: tuple[float, float]) -> Interval:
    """Return a ratio with its 95% interval; with one pair or no counts it is the bounds."""
    value, (least, most) = ratio.ratio, bounds
    if not math.isfinite(error):
        return Interval(estimate=value, low=least, high=most)
    low, high = max(least, value * (1.0 - error)), min(most, value * (1.0 + error))
    return Interval(estimate=value, low=low, high=high)


def estimate_ratio(
    numerators: Sequence[float], denominators: Sequence[float], bounds: tuple[float, float]
) -> Interval | None:
    """Return the ratio estimator with Student's interval, which is cheap for many groups."""
    ratio = DiscountedRatio(1.0)
    for above, below in zip(numerators, denominators, strict=True):
        if below > 0:
            ratio.observe(below, above)
    if not ratio.num_pairs:
        return None
    error = ratio.relative_error
    if math.isfinite(error):
        error *= student_quantile(0.975, ratio.num_pairs - 1)
    return interval_of(ratio, error, bounds)


def resample_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    bounds: tuple[float, float] = (0.0, math.inf),
    *,
    seed: int,
    num_resamples: int = 2000,
) -> Interval | None:
    """Return the ratio with its bootstrap interval, for few groups; of one group, the bounds."""
    seen = [pair for pair in zip(numerators, denominators, strict=True) if pair[1] > 0]
    if not seen:
        return None
    above, below = zip(*seen, strict=True)
    if len(seen) == 1:
        return Interval(estimate=above[0] / below[0], low=bounds[0], high=bounds[1])
    return bootstrap_ratio(above, below, seed=seed, num_resamples=num_resamples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of a run, with 95% intervals over its groups.

    Attributes:
        num_steps: that drafted; the others are `num_plain_steps`.
        acceptance_length: tau of the steps that drafted; None where none did.
        acceptance_rate_per_position: beta.
        acceptance_probability: alpha; None where it was not computed.
        cycle_cost: kappa; None where it was not measured.
        speedup: over plain decoding; None where too little was measured.
    """

    num_groups: int = 0
    num_steps: int = 0
    num_plain_steps: int = 0
    num_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    acceptance_length: Interval | None = None
    acceptance_rate_per_position: tuple[Interval, ...] = ()
    acceptance_probability: Interval | None = None
    cycle_cost: Interval | None = None
    speedup: Interval | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """The values by field name, from which a kind of figures with more fields is made."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted over drafted nodes; not comparable across K."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    def to_dict(self) -> dict[str, object]:
        """Return JSON values: the rate of accepted drafts too, and every interval by its ends."""
        found: dict[str, object] = {"draft_acceptance_rate": self.draft_acceptance_rate}
        for name, value in self.fields.items():
            if isinstance(value, Interval):
                found |= {name: value.estimate, f"{name}_ci": [value.low, value.high]}
            elif name in INTERVALS:
                found |= {name: None, f"{name}_ci": None}
            elif isinstance(value, tuple):
                found[name] = [v.estimate if isinstance(v, Interval) else v for v in value]
            else:
                found[name] = value
        return found


def summarise_groups(
    groups: Sequence[Group], ratio_interval: RatioInterval = estimate_ratio
) -> Figures:
    """Return the figures that follow from counts, without those of costs."""
    counts = [group.acceptance.drafting for group in groups]
    pooled = reduce(add, counts, AcceptanceCounts())
    drafted, accepted = (
        [*zip_longest(*(getattr(count, name) for count in counts), fillvalue=0)]
        for name in ("drafted_per_position", "accepted_per_position")
    )
    num_steps = sum(group.acceptance.num_steps for group in groups)
    return Figures(
        num_groups=len(groups),
        num_steps=pooled.num_steps,
        num_plain_steps=num_steps - pooled.num_steps,
        num_tokens=sum(group.num_tokens for group in groups),
        num_drafted=pooled.num_drafted,
        num_accepted=pooled.num_accepted,
        drafted_per_position=tuple(map(sum, drafted)),
        accepted_per_position=tuple(map(sum, accepted)),
        acceptance_length=ratio_interval(
            [count.num_emitted for count in counts],
            [count.num_steps for count in counts],
            (1.0, 1.0 + pooled.max_depth),
        ),
        acceptance_rate_per_position=tuple(
            rate
            for above, below in zip(accepted, drafted, strict=True)
            if (rate := ratio_interval(above, below, (0.0, 1.0))) is not None
        ),
        acceptance_probability=ratio_interval(
            [sum(group.alphas) for group in groups],
            [len(group.alphas) for group in groups],
            (0.0, 1.0),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainComparison:
    """Times of decode steps beside those of plain steps for the same tokens.

    Attributes:
        speedup: None without a baseline or with fewer than two groups.
        seconds: of the steps that are compared; of all decode steps where none is.
        plain_token_s: seconds per token of plain steps.
        share_compared: of the tokens, the share of the numbers of sequences that are compared.
        relative_error: of the speedup, with the degrees of freedom of its estimate.
    """

    speedup: Interval | None
    seconds: Seconds
    relative_error: float = math.inf
    freedom: int = 1
    plain_token_s: float = 0.0
    share_compared: float = 0.0


def compare_with_plain(
    groups: Sequence[Group], baselines: Mapping[int, DiscountedRatio] | None = None
) -> PlainComparison:
    """Compare the time of all decode steps with that of plain steps for as many tokens.

    Steps without a draft count too, for a user waits for them. The baseline of a step is the mean
    time per token of plain steps of exactly as many sequences: two sequences share a pass, so that
    sizes that are only alike would make a larger batch look like a speedup. Steps of sizes without
    a baseline are left out. Which plain steps are measured is said in `Grouping`. The errors of the
    baselines and of the ratio over groups are taken as independent.
    """
    baselines = find_baselines(groups) if baselines is None else baselines
    paid = DiscountedRatio(1.0)
    everything, compared = Seconds(), Seconds()
    as_plain_s = dict.fromkeys(baselines, 0.0)
    for group in groups:
        seconds = plain_s = 0.0
        for size, times in group.decoded.items():
            everything.include(times)
            if size in baselines:
                compared.include(times)
                seconds += times.total_s
                expected_s = times.num_tokens * baselines[size].ratio
                as_plain_s[size] += expected_s
                plain_s += expected_s
        if seconds > 0.0:
            paid.observe(seconds, plain_s)
    if not math.isfinite(paid.relative_error):
        return PlainComparison(speedup=None, seconds=everything)
    used = [size for size in baselines if as_plain_s[size]]
    errors = [as_plain_s[size] / paid.y * baselines[size].relative_error for size in used]
    fewest = min(paid.num_pairs, *(baselines[size].num_pairs for size in used))
    relative_error = math.hypot(paid.relative_error, *errors)
    error = student_quantile(0.975, fewest - 1) * relative_error
    return PlainComparison(
        speedup=interval_of(paid, error, (0.0, math.inf)),
        seconds=compared,
        relative_error=relative_error,
        freedom=fewest - 1,
        plain_token_s=paid.y / compared.num_tokens,
        share_compared=compared.num_tokens / everything.num_tokens,
    )
