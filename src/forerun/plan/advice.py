"""The best drafter, K and batch size, with the reasons and the break-even points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

from forerun.errors import InvalidProfile, InvalidRequest, Range, check_ranges
from forerun.plan.acceptance import Acceptance
from forerun.theory.cost import CostTable, with_batches
from forerun.theory.intervals import Interval, divide
from forerun.theory.speedup import break_even_alpha, break_even_rate

RANGES = (
    Range("context", 0, integer=True),
    Range("temperature", 0),
    Range("max_k", 1, high=1024, integer=True),
    Range("slo_tpot_s", 0, above_low=True, optional=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """The batch sizes, context and limits that a plan is for.

    Attributes:
        batches: sequences at once that are considered, ascending.
        context: committed tokens of every sequence, about halfway through its output.
        temperature: 0 for greedy drafts, above for sampled ones.
        slo_tpot_s: most seconds per output token (None: no limit).
    """

    batches: tuple[int, ...]
    context: int
    temperature: float = 0.0
    max_k: int = 16
    slo_tpot_s: float | None = None

    def __post_init__(self) -> None:
        check_ranges(self, *RANGES)
        ascending = all(before < after for before, after in pairwise(self.batches))
        if not self.batches or self.batches[0] < 1 or not ascending:
            raise InvalidRequest(
                f"batches is {list(self.batches)}; it must ascend from 1 or more, each once"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCandidate:
    """A drafter that a plan may use."""

    name: str
    table: CostTable
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A drafter at one K and batch size, with its predicted speed.

    Attributes:
        num_speculative_tokens: K.
        cycle_cost: kappa, in plain steps.
        speedup: tau / kappa with its 95% interval.
        tpot_s: seconds per output token of a sequence.
    """

    draft: str | None
    num_speculative_tokens: int
    batch: int
    acceptance_length: Interval
    cycle_cost: Interval
    speedup: Interval
    tpot_s: float
    tokens_per_s: float

    @property
    def is_plain(self) -> bool:
        return self.num_speculative_tokens == 0


def option_at(
    candidate: DraftCandidate, num_speculative_tokens: int, *, batch: int, context: int
) -> Option:
    """Return the predicted speed of a drafter at K, a batch size and a context."""
    k, table = num_speculative_tokens, candidate.table
    tau = candidate.acceptance.length(k)
    kappa = cycle_cost(table, candidate.acceptance.at(k).drafted, context, batch)
    if kappa.low <= 0:
        raise InvalidProfile(
            f"the profile with {candidate.name} is too rough at batch {batch}: a cycle at K={k} "
            f"takes {kappa.low:.2f} to {kappa.high:.2f} plain steps; "
            + _suggest(table.contexts[-1], context)
        )
    tpot_s = table.plain_step_s(context, batch) * kappa.estimate / tau.estimate
    return Option(
        draft=candidate.name if k else None,
        num_speculative_tokens=k,
        batch=batch,
        acceptance_length=tau,
        cycle_cost=kappa,
        speedup=divide(tau, kappa),
        tpot_s=tpot_s,
        tokens_per_s=batch / tpot_s,
    )


def _suggest(measured: int, context: int) -> str:
    """Return advice for a cost whose error is too large."""
    if context > measured:
        return f"context {context} is beyond the {measured} it measured: profile with --contexts"
    return (
        "profile again while the machine is idle or with a longer --budget-s, or plan smaller K "
        "with --num-speculative-tokens"
    )


def cycle_cost(table: CostTable, drafted: Sequence[float], context: int, batch: int) -> Interval:
    shares = [before - after for before, after in pairwise((1.0, *drafted, 0.0))]
    kappas = [
        (share, table.cycle_cost_interval(depth, context, batch))
        for depth, share in enumerate(shares)
        if share
    ]
    return Interval(
        estimate=math.fsum(share * kappa.estimate for share, kappa in kappas),
        low=math.fsum(share * kappa.low for share, kappa in kappas),
        high=math.fsum(share * kappa.high for share, kappa in kappas),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakEven:
    """Break-even acceptance and draft cost of a drafter at one K and batch size.

    Attributes:
        draft_acceptance_rate: accepted / drafted; above 1 no draft can pay.
        acceptance_probability: the constant alpha; None where none is enough.
        draft_cost: what a drafted token may take in plain steps; negative where even free drafts
            would not pay.
    """

    num_speculative_tokens: int
    batch: int
    draft_acceptance_rate: float
    acceptance_probability: float | None
    draft_cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The result of a plan: the best options, alternatives and remarks.

    Attributes:
        per_batch: the best at every batch size, whatever the latency.
        curves: every K by drafter, at the batch of `best`.
        break_even: by drafter that could be used, at its own best K there.
    """

    best: Option
    per_batch: tuple[Option, ...]
    curves: tuple[tuple[str, tuple[Option, ...]], ...]
    break_even: tuple[tuple[str, BreakEven], ...]
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, object]:
        return {
            "best": asdict(self.best),
            "per_batch": [asdict(option) for option in self.per_batch],
            "curves": {name: [asdict(option) for option in curve] for name, curve in self.curves},
            "break_even": {name: asdict(found) for name, found in self.break_even},
            "remarks": list(self.remarks),
        }


def advise(candidates: Sequence[DraftCandidate], config: PlanConfig) -> Advice:
    """Compare every drafter at every K and batch, and choose the best."""
    if not candidates:
        raise InvalidRequest("a plan compares drafters, and none is given; name one or more")
    measured = candidates[0].table.batches[-1]
    candidates = [replace(c, table=with_batches(c.table, config.batches)) for c in candidates]
    found = {batch: options_of(candidates, config, batch) for batch in config.batches}
    per_batch = tuple(best_of(options) for options in found.values())
    allowed = [option for options in found.values() for option in options if keeps(option, config)]
    if not allowed:
        raise InvalidRequest(unreachable(candidates, config, per_batch))
    best = max(allowed, key=lambda option: option.tokens_per_s)
    curves = tuple((c.name, tuple(options_of([c], config, best.batch))) for c in candidates)
    ks = {name: best_of(curve[1:]).num_speculative_tokens for name, curve in curves}
    return Advice(
        best=best,
        per_batch=per_batch,
        curves=curves,
        break_even=tuple(
            (c.name, break_even(c, ks[c.name], best.batch, config.context)) for c in candidates
        ),
        remarks=tuple(remarks(candidates, config, best, measured)),
    )


def options_of(
    candidates: Iterable[DraftCandidate], config: PlanConfig, batch: int
) -> list[Option]:
    """Return plain decoding and every drafter at every K whose acceptance is known."""
    found: list[Option] = []
    for candidate in candidates:
        deepest = min(config.max_k, len(candidate.acceptance.survival))
        found += (
            option_at(candidate, k, batch=batch, context=config.context)
            for k in range(bool(found), deepest + 1)
        )
    return found


def best_of(options: Iterable[Option]) -> Option:
    """Return the fastest option at one batch size; of equals, the first."""
    return max(options, key=lambda option: option.tokens_per_s)


def keeps(option: Option, config: PlanConfig) -> bool:
    """Whether the option's time per token is within the latency limit."""
    return config.slo_tpot_s is None or option.tpot_s <= config.slo_tpot_s


def break_even(candidate: DraftCandidate, k: int, batch: int, context: int) -> BreakEven:
    """Return the acceptance and the draft cost at which the drafter equals plain decoding."""
    table = candidate.table
    costs = {
        "draft_cost": table.draft_cost(context, batch),
        "verify_cost": table.verify_cost(k + 1, context, batch),
        "overhead": table.overhead(k, context, batch),
    }
    tau = candidate.acceptance.length(k).estimate
    return BreakEven(
        num_speculative_tokens=k,
        batch=batch,
        draft_acceptance_rate=break_even_rate(k, **costs),
        acceptance_probability=break_even_alpha(k, table.cycle_cost(k, context, batch)),
        draft_cost=(tau - costs["verify_cost"] - costs["overhead"]) / k,
    )


def unreachable(
    candidates: Sequence[DraftCandidate], config: PlanConfig, per_batch: Sequence[Option]
) -> str:
    """Explain in a message why no option is within the latency limit."""
    nearest = min(per_batch, key=lambda option: option.tpot_s)
    plain_s = candidates[0].table.plain_step_s(config.context, nearest.batch)
    how = "plain" if nearest.is_plain else f"{nearest.draft} at K={nearest.num_speculative_tokens}"
    assert config.slo_tpot_s is not None
    return (
        f"{1e3 * config.slo_tpot_s:.3g} ms per token cannot be kept: at batch {nearest.batch} a "
        f"plain step takes {1e3 * plain_s:.3g} ms and the best there is ({how}) "
        f"{1e3 * nearest.tpot_s:.3g} ms per token"
    )


def remarks(
    candidates: Sequence[DraftCandidate], config: PlanConfig, best: Option, measured_batch: int
) -> Iterator[str]:
    used = next((c for c in candidates if c.name == best.draft), candidates[0])
    table, k = used.table, best.num_speculative_tokens
    plain_s = table.plain_step_s(config.context, best.batch)
    if config.slo_tpot_s is not None and config.slo_tpot_s < plain_s:
        yield (
            f"the limit of {1e3 * config.slo_tpot_s:.3g} ms per token is below the plain step of "
            f"{1e3 * plain_s:.3g} ms: only speculation keeps it, on average, and while drafts are "
            "accepted as assumed"
        )
    if k and not best.speedup.is_above(1.0):
        yield "the interval of the speedup reaches down to 1: a gain is not shown"
    if k and k == len(used.acceptance.survival) and not used.acceptance.is_constant:
        yield f"acceptance is known for {k} positions only; a larger K might be better"
    if used.acceptance.num_requests == 1:
        yield "acceptance comes from a single request; its error is not in the interval"
    if not used.acceptance.num_requests:
        yield "acceptance is taken as given; its error is not in the interval"
    if best.cycle_cost.low == best.cycle_cost.high and k:
        yield "the costs have no known error; it is not in the interval"
    if best.batch > measured_batch:
        yield (
            f"batch {best.batch} is beyond the {measured_batch} measured: rows of more sequences "
            "are taken to cost what more rows of the same sequences do"
        )
    if config.context > table.contexts[-1]:
        yield f"context {config.context} is beyond {table.contexts[-1]}: an extrapolation"
