"""The best drafter, K and batch size, with the reasons and the break-even points."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from forerun.errors import InvalidRequest
from forerun.pictures import BASELINE, COLOURS, picture
from forerun.plan.config import PlanConfig
from forerun.plan.costs import with_batches
from forerun.plan.option import DraftCandidate, Option, option_at, tree_options
from forerun.theory.speedup import break_even_alpha, break_even_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
        best: the highest throughput within the latency limit.
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
        """Return the plan as values for JSON."""
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
        raise InvalidRequest("a plan compares drafters, and none is given")
    measured = candidates[0].table.batches[-1]
    candidates = covering(candidates, config.batches)
    found = {batch: options_of(candidates, config, batch) for batch in config.batches}
    per_batch = tuple(best_of(options) for options in found.values())
    allowed = [option for options in found.values() for option in options if keeps(option, config)]
    if not allowed:
        raise InvalidRequest(unreachable(candidates, config, per_batch))
    best = max(allowed, key=lambda option: option.tokens_per_s)
    chains = replace(config, sibling_acceptance=None)
    curves = tuple((c.name, tuple(options_of([c], chains, best.batch))) for c in candidates)
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


def covering(candidates: Iterable[DraftCandidate], batches: Sequence[int]) -> list[DraftCandidate]:
    return [replace(c, table=with_batches(c.table, batches)) for c in candidates]


def options_of(
    candidates: Iterable[DraftCandidate], config: PlanConfig, batch: int
) -> list[Option]:
    """Return plain decoding and every drafter at every K or tree whose acceptance is known."""
    found: list[Option] = []
    for candidate in candidates:
        deepest = min(config.max_k, len(candidate.acceptance.survival))
        found += (
            option_at(candidate, k, batch=batch, context=config.context)
            for k in range(bool(found), deepest + 1)
        )
        if config.sibling_acceptance is not None:
            found += tree_options(
                candidate,
                config.sibling_acceptance,
                max_nodes=config.max_k,
                batch=batch,
                context=config.context,
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
    how = "plain" if nearest.is_plain else f"{nearest.draft} at {nearest.shape}"
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
    if best.tree is not None:
        yield "acceptance of further children is taken as given; its error is not in the interval"
    if (
        k
        and best.tree is None
        and k == len(used.acceptance.survival)
        and not used.acceptance.is_constant
    ):
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


def plot(advice: Advice, path: Path) -> None:
    """Draw the speedup over K at the batch of the plan, with its 95% interval."""
    with picture([path], width=6.4, height=4.0) as figure:
        draw(figure.subplots(), advice)


def draw(axes: Axes, advice: Advice) -> None:
    """Draw a line and a band per drafter, and mark the chosen option."""
    for index, (name, curve) in enumerate(advice.curves):
        colour = COLOURS[index % len(COLOURS)]
        ks = [option.num_speculative_tokens for option in curve]
        found = [option.speedup for option in curve]
        axes.plot(
            ks, [s.estimate for s in found], marker="o", markersize=3, color=colour, label=name
        )
        axes.fill_between(
            ks,
            [s.low for s in found],
            [s.high for s in found],
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    best = advice.best
    axes.plot(
        best.num_speculative_tokens,
        best.speedup.estimate,
        marker="o",
        markersize=11,
        markerfacecolor="none",
        color="black",
        linestyle="none",
        label="plan",
    )
    axes.axhline(1.0, color=BASELINE, linewidth=1, linestyle=":")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("K: most drafted tokens per step")
    axes.set_ylabel(f"predicted speedup at batch {best.batch} (95% interval)")
    axes.legend()
