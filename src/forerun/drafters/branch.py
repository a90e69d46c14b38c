"""One sequence as the draft model sees it."""

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

__all__ = ["Branch"]


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """What is kept of a request between steps, and how far its chain got in this one.

    Attributes:
        request: what to continue.
        context: the draft's own view of it.
        params: the request's parameters with the draft's temperature.
        choice: how its nodes are chosen.
        budget: tokens to draft in this step.
        limit: what set the budget: "budget" of the plan, the draft's own "context", "stop_rule", or
            "invalid_probs".
        stop: the plan's rule for ending the draft before its budget.
        stop_values: what the rule measured before every node; None without one.
        hindsight: which of the last committed tokens would have been proposed; None unless asked.
        num_chain: pending committed tokens fed by the first pass.
        num_fed: drafted tokens fed, all of them staged.
        proven: a proposal made from all that is cached has been verified; what a failing draft
            leaves must not serve others.
    """

    request: DraftRequest
    context: Context
    params: SamplingParams
    choice: Choice
    budget: int = 0
    limit: str = "budget"
    stop: StopRule | None = None
    stop_values: tuple[float, ...] | None = None
    hindsight: tuple[int, ...] | None = None
    num_chain: int = 0
    num_fed: int = 0
    proven: bool = False

    @classmethod
    def begin(cls, request: DraftRequest, context: Context) -> Branch:
        """The branch of a request that has not been drafted for yet."""
        params = draft_params(request.params)
        choice = Choice.COUPLED if request.coupled else Choice.SAMPLED
        return cls(
            request=request,
            context=context,
            params=params,
            choice=Choice.DETERMINISTIC if params.greedy else choice,
        )

    def follow(self, plan: Plan, max_context: int) -> None:
        """Take this step's K, cut to the room the draft has for its tokens, and its stop rule."""
        room = max(0, max_context - self.num_committed)
        self.budget = min(plan.num_speculative_tokens, room)
        self.limit = "budget" if self.budget == plan.num_speculative_tokens else "context"
        self.stop, self.stop_values, self.hindsight = plan.stop, None, None

    def end(self, values: Sequence[float]) -> None:
        """Cut the budget to the nodes the rule leaves, by what it measured before each.

        A distribution that is NaN measures nothing: drafting ends before it, as where it was to be
        drawn from. The first node is there in any case, then without a value anybody could learn
        from.
        """
        if self.stop is None:
            return
        for node, value in enumerate(values[: self.budget]):
            if math.isnan(value) or (node > 0 and self.stop.stops(value)):
                self.limit = "invalid_probs" if math.isnan(value) else "stop_rule"
                self.budget = max(1, node)
                values = values[:node]
                break
        self.stop_values = tuple(values[: self.budget])

    def may_chain(self, num_tokens: int, max_context: int) -> bool:
        """Whether a chain of `num_tokens`, maybe past its own budget, can be had in one call.

        It must fit, and nothing but the temperature may shape its distributions.
        """
        fits = self.num_committed + num_tokens - 1 <= max_context
        return fits and self.is_shaped_by_temperature_alone

    @property
    def is_shaped_by_temperature_alone(self) -> bool:
        """Whether its distributions are the model's own at a temperature, whatever came before."""
        return self.request.history is None and not self.params.has_processors

    @property
    def name(self) -> str:
        """Of the request."""
        return self.request.request_id

    @property
    def looks_back(self) -> bool:
        """Whether its proposals are the most likely tokens, whatever came before."""
        return self.choice is Choice.DETERMINISTIC and self.is_shaped_by_temperature_alone

    @property
    def ends_there(self) -> bool:
        """Whether the most likely token behind what is pending is all that it is to propose."""
        return self.looks_back and self.budget == 1 and self.stop is None

    @property
    def num_committed(self) -> int:
        """Tokens of prompt and output at the start of the step."""
        return len(self.request.ids)

    def first_span(self) -> Span:
        """All pending tokens."""
        self.num_chain = self.context.num_pending
        self.num_fed = 0
        return self.context.span(self.num_chain)

    def all_but_last(self) -> Span:
        """Pending tokens but the last, to be committed before it is fed."""
        return self.context.span(self.context.num_pending - 1)

    def next_span(self) -> Span:
        """One drafted token more."""
        span = self.context.span(1, num_staged=self.num_chain + self.num_fed)
        self.num_fed += 1
        return span

    def commit(self, num_accepted: int) -> None:
        """Keep the rows of accepted tokens; the last drafted token may never have been fed."""
        self.context.commit(range(self.num_chain + min(num_accepted, self.num_fed)))
        self.proven = True
