"""One choice of drafter, K and batch size, with its predicted speedup."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from forerun.control.base import USUAL_WIDTH, Tree, usual_depth
from forerun.errors import InvalidProfile
from forerun.plan.acceptance import Acceptance
from forerun.theory.budget import tree_survival
from forerun.theory.cost import CostTable
from forerun.theory.intervals import Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftCandidate:
    """A drafter that a plan may use.

    Attributes:
        table: its costs at the temperature of the plan.
    """

    name: str
    table: CostTable
    acceptance: Acceptance


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A drafter at one K and batch size, with its predicted speed.

    Attributes:
        draft: name of the drafter; None decodes plainly.
        num_speculative_tokens: K; the nodes of a tree.
        tree: shape of every draft; None for chains.
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
    tree: Tree | None = None

    @property
    def shape(self) -> str:
        """Return K or the tree shape as text for tables."""
        k = f"K={self.num_speculative_tokens}"
        return k if self.tree is None else f"tree {self.tree}"

    @property
    def is_plain(self) -> bool:
        """Return whether nothing is drafted."""
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
            + _advice_on(table.contexts[-1], context)
        )
    tpot_s = table.plain_step_s(context, batch) * kappa.estimate / tau.estimate
    return Option(
        draft=candidate.name if k else None,
        num_speculative_tokens=k,
        batch=batch,
        acceptance_length=tau,
        cycle_cost=kappa,
        speedup=ratio(tau, kappa),
        tpot_s=tpot_s,
        tokens_per_s=batch / tpot_s,
    )


def tree_options(
    candidate: DraftCandidate,
    sibling_acceptance: float,
    *,
    max_nodes: int,
    batch: int,
    context: int,
) -> Iterator[Option]:
    """Yield the predicted speed of a drafter's best tree for every size and depth."""
    table, survival = candidate.table, candidate.acceptance.survival
    plain_s = table.plain_step_s(context, batch)
    first = [after / before if before else 0.0 for before, after in pairwise((1.0, *survival))]
    later = [sibling_acceptance] * (USUAL_WIDTH - 1)
    for depth in range(1, min(usual_depth(max_nodes), len(first)) + 1):
        accepted = accumulate(tree_survival(first, later, depth=depth, num_nodes=max_nodes))
        chain = table.cycle_cost_interval(depth, context, batch)
        for num_nodes, expected in enumerate(accepted, start=1):
            step_s = table.tree_cycle_s(num_nodes, depth, USUAL_WIDTH, context, batch)
            cost, tau = step_s / plain_s, 1.0 + expected
            kappa = Interval(
                estimate=cost,
                low=cost * chain.low / chain.estimate,
                high=cost * chain.high / chain.estimate,
            )
            length = Interval(estimate=tau, low=tau, high=tau)
            yield Option(
                draft=candidate.name,
                num_speculative_tokens=num_nodes,
                tree=Tree(num_nodes=num_nodes, depth=depth, width=USUAL_WIDTH),
                batch=batch,
                acceptance_length=length,
                cycle_cost=kappa,
                speedup=ratio(length, kappa),
                tpot_s=step_s / tau,
                tokens_per_s=batch * tau / step_s,
            )


def _advice_on(measured: int, context: int) -> str:
    """Return advice for a cost whose error is too large."""
    if context > measured:
        return f"context {context} is beyond the {measured} it measured: profile with --contexts"
    return (
        "profile again while the machine is idle or with a longer --budget-s, or plan smaller K "
        "with --num-speculative-tokens"
    )


def cycle_cost(table: CostTable, drafted: Sequence[float], context: int, batch: int) -> Interval:
    """Return kappa with its interval, averaged over the depths that drafts reach."""
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


def ratio(tau: Interval, kappa: Interval) -> Interval:
    """Return tau / kappa; the relative errors of both are taken as independent."""
    estimate = tau.estimate / kappa.estimate
    below = math.hypot(1 - tau.low / tau.estimate, 1 - kappa.estimate / kappa.high)
    above = math.hypot(tau.high / tau.estimate - 1, kappa.estimate / kappa.low - 1)
    return Interval(
        estimate=estimate, low=max(0.0, estimate * (1 - below)), high=estimate * (1 + above)
    )
