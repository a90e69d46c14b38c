"""Effects on a plan of a better or faster draft, a larger batch or a longer context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace

from forerun.plan.acceptance import improved
from forerun.plan.advice import best_of, covering, options_of
from forerun.plan.config import PlanConfig
from forerun.plan.costs import with_draft_cost
from forerun.plan.option import DraftCandidate, Option

FEWER_REJECTIONS = (0.25, 0.5)
DRAFT_FACTORS = (0.5, 0.0)
BATCH_FACTORS = (2, 8, 32)
CONTEXT_FACTORS = (4,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One changed condition, and the best option under it.

    Attributes:
        option: the best drafter and K after the change.
    """

    name: str
    option: Option

    def to_dict(self) -> dict[str, object]:
        """Return the scenario as values for JSON."""
        return asdict(self)


def scenarios(
    candidates: Sequence[DraftCandidate], config: PlanConfig, batch: int
) -> Iterator[Scenario]:
    """Yield the best option after each change, with all other conditions as planned at `batch`."""

    def best(
        changed: Sequence[DraftCandidate], batch: int = batch, context: int | None = None
    ) -> Option:
        there = config if context is None else replace(config, context=context)
        return best_of(options_of(changed, there, batch))

    larger = [batch * times for times in BATCH_FACTORS]
    candidates = covering(candidates, [*config.batches, *larger])
    yield Scenario(name="as planned", option=best(candidates))
    for share in FEWER_REJECTIONS:
        aligned = [replace(c, acceptance=improved(c.acceptance, share)) for c in candidates]
        yield Scenario(name=f"{share:.0%} fewer rejections", option=best(aligned))
    for factor in DRAFT_FACTORS:
        faster = [replace(c, table=with_draft_cost(c.table, factor=factor)) for c in candidates]
        name = f"drafting {1 / factor:g}x as fast" if factor else "drafting free"
        yield Scenario(name=name, option=best(faster))
    for size in larger:
        yield Scenario(name=f"batch {size}", option=best(candidates, size))
    longest = min(candidate.table.contexts[-1] for candidate in candidates)
    for times in CONTEXT_FACTORS if longest > config.context else ():
        context = max(1, config.context) * times
        yield Scenario(name=f"context {context}", option=best(candidates, context=context))
