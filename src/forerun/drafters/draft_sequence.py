"""One sequence as the draft model sees it, across steps and within one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.models.base import Span
from forerun.models.context import Context
from forerun.sampling.choice import Choice
from forerun.sampling.config import SamplingParams, draft_params
from forerun.theory.stop_rule import StopRule

__all__ = ["DraftSequence"]


@dataclass(slots=True, kw_only=True, eq=False)
class DraftSequence:
    """The state that a draft model keeps per request, and the progress of its current chain.

    Attributes:
        request: the sequence to continue.
        context: its committed tokens and their rows in the draft's own KV cache.
        params: the request's sampling parameters at the draft's temperature.
        choice: how its draft tokens are chosen.
        budget: the number of tokens to draft in this step.
        stop_reason: what set the budget: "budget" (the plan), "context" (the draft's own context),
            "stop_rule" or "invalid_probs".
        stop: the plan's rule for ending the draft before its budget.
        stop_values: what the rule measured before every node; None without a rule.
        num_chain: pending committed tokens fed by the first pass.
        num_fed: draft tokens fed; their rows are staged in the cache.
        kv_verified: a proposal computed from all cached rows has been verified, so these rows may
            be offered to other requests that begin with the same tokens.
    """

    request: DraftRequest
    context: Context
    params: SamplingParams
    choice: Choice
    budget: int = 0
    stop_reason: str = "budget"
    stop: StopRule | None = None
    stop_values: tuple[float, ...] | None = None
    num_chain: int = 0
    num_fed: int = 0
    kv_verified: bool = True  # rows found in the cache were verified before they were offered

    @classmethod
    def begin(cls, request: DraftRequest, context: Context) -> DraftSequence:
        """Return the state of a request for which nothing has been drafted yet."""
        params = draft_params(request.params)
        choice = Choice.COUPLED if request.coupled else Choice.SAMPLED
        return cls(
            request=request,
            context=context,
            params=params,
            choice=Choice.DETERMINISTIC if params.greedy else choice,
        )

    @property
    def name(self) -> str:
        """Key of the request."""
        return self.request.request_id

    @property
    def num_committed(self) -> int:
        """Tokens of prompt and output at the start of the step."""
        return len(self.request.ids)

    def begin_step(self, plan: Plan, max_context: int) -> None:
        """Set this step's budget, cut to the draft's context, and its stop rule.

        Of a plan for a tree a chain takes the depth alone.
        """
        planned = min(plan.shape.num_nodes, plan.shape.depth)
        room = max(0, max_context - self.num_committed)
        self.budget = min(planned, room)
        self.stop_reason = "budget" if self.budget == planned else "context"
        self.stop, self.stop_values = plan.stop, None

    def apply_stop_rule(self, values: Sequence[float]) -> None:
        """Cut the budget to the nodes before the first that the stop rule rejects.

        A NaN value comes from invalid probabilities; drafting ends before them, as it does where a
        token would be drawn from them. The first node is kept in any case; its NaN is not reported.

        Args:
            values: what the rule measured before each node.
        """
        if self.stop is None:
            return
        for node, value in enumerate(values[: self.budget]):
            if math.isnan(value) or (node > 0 and self.stop.stops(value)):
                self.stop_reason = "invalid_probs" if math.isnan(value) else "stop_rule"
                self.budget = max(1, node)
                values = values[:node]
                break
        self.stop_values = tuple(values[: self.budget])

    def fits_one_call(self, num_tokens: int, max_context: int) -> bool:
        """Whether the model may draft `num_tokens` (perhaps more than the budget) in one call.

        The chain must fit the context, and only the temperature may shape its distributions.
        """
        fits = self.num_committed + num_tokens - 1 <= max_context
        return fits and self.request.history is None and not self.params.has_processors

    def first_span(self) -> Span:
        """Return the rows of all pending tokens."""
        self.num_chain = self.context.num_pending
        self.num_fed = 0
        return self.context.span(self.num_chain)

    def next_span(self) -> Span:
        """Return the row of one more draft token."""
        span = self.context.span(1, num_staged=self.num_chain + self.num_fed)
        self.num_fed += 1
        return span

    def commit(self, num_accepted: int) -> None:
        """Keep the rows of pending and accepted tokens; the last draft token may have no row."""
        self.context.commit(range(self.num_chain + min(num_accepted, self.num_fed)))
        self.kv_verified = True

    def close(self) -> None:
        """Give the cache slot back; verified rows may serve other requests."""
        self.context.close(self.context.num_cached if self.kv_verified else 0)
