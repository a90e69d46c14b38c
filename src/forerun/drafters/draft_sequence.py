"""State of one sequence in the draft model, across steps and within one step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from forerun.control.base import Plan, Tree
from forerun.drafters.base import DraftRequest
from forerun.models.base import Context, Span
from forerun.sampling.config import Choice, SamplingParams, draft_params
from forerun.sampling.proposal import Proposal
from forerun.theory.stop_rule import StopRule
from forerun.theory.tree import TokenTree

ONE_NODE = Tree(num_nodes=1, depth=1, width=1)


@dataclass(slots=True, kw_only=True, eq=False)
class DraftSequence:
    """The state that a draft model keeps per request, and the progress of its current chain.

    Attributes:
        context: its committed tokens and their rows in the draft's own KV cache.
        tree_params: of the distributions that a tree's nodes are chosen by.
        budget: the number of tokens to draft in this step.
        stop_reason: what set the budget: "budget" (the plan), "context" (the draft's own context),
            "stop_rule" or "invalid_probs".
        stop: the plan's rule for ending the draft before its budget.
        stop_values: what the rule measured before every node; None without a rule.
        num_fed: draft tokens of a chain that were fed; their rows are staged in the cache.
        tree_shape: the largest tree to draft; a chain is the tree of width 1.
        tree_rows: the draft tokens of a tree that were fed, as paths, in the order of their rows.
        num_tried: nodes on accepted paths of drawn trees that had children, the last committed
            token included, and a few to begin with.
        num_first: how often the first child of these was accepted.
        kv_verified: a proposal computed from all cached rows has been verified, so these rows may
            be offered to other requests that begin with the same tokens.
    """

    request: DraftRequest
    context: Context
    params: SamplingParams
    tree_params: SamplingParams
    choice: Choice
    budget: int = 0
    stop_reason: str = "budget"
    stop: StopRule | None = None
    stop_values: tuple[float, ...] | None = None
    num_chain: int = 0
    num_fed: int = 0
    tree_shape: Tree = ONE_NODE
    tree_choice: Choice = Choice.DETERMINISTIC
    tree_rows: Mapping[tuple[int, ...], int] = field(default_factory=dict)
    num_tried: float = 8.0
    num_first: float = 0.62 * 8
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
            tree_params=_ranking_params(params),
            choice=Choice.DETERMINISTIC if params.greedy else choice,
        )

    @property
    def name(self) -> str:
        return self.request.request_id

    @property
    def num_committed(self) -> int:
        """Number of prompt and output tokens at the start of the step."""
        return len(self.request.ids)

    def begin_step(self, plan: Plan, max_context: int) -> None:
        """Set this step's budget, cut to the draft's context, and its stop rule."""
        shape = plan.shape
        planned = min(shape.num_nodes, shape.depth)
        room = max(0, max_context - len(self.context.ids))
        self.budget = min(planned, room)
        self.stop_reason = "budget" if self.budget == planned else "context"
        self.stop, self.stop_values = plan.stop, None
        self.tree_shape = Tree(num_nodes=max(1, self.budget), depth=max(1, self.budget), width=1)
        self.tree_choice = self.choice
        if isinstance(shape, Tree) and shape.width > 1:
            self.tree_shape = replace(shape, depth=max(1, min(shape.depth, room)))
            self.tree_choice = self._choice_of_tree(plan)

    def _choice_of_tree(self, plan: Plan) -> Choice:
        """Return how nodes of a tree are chosen for the verification of the request."""
        verification = plan.verification or self.params.verification
        if verification == "walk":
            return Choice.DETERMINISTIC
        if self.choice is not Choice.SAMPLED:
            return self.choice
        if verification == "greedy_coupling":
            return Choice.TOP_AND_SAMPLED
        return Choice.WITHOUT_REPLACEMENT

    @property
    def branches(self) -> bool:
        """Whether this step's draft is a tree that may branch."""
        return self.tree_shape.width > 1

    def apply_stop_rule(self, values: Sequence[float]) -> None:
        """Cut the budget to the nodes before the first that the stop rule rejects.

        A NaN value comes from invalid probabilities; drafting ends before them, as it does where a
        token would be drawn from them. The first node is kept in any case; its NaN is not reported.
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
        """Whether `num_tokens` tokens, which may exceed the budget, can be drafted in one call."""
        fits = len(self.context.ids) + num_tokens - 1 <= max_context
        return fits and self.request.history is None and not self.params.has_processors

    @property
    def grows_in_one_call(self) -> bool:
        is_shaped = self.request.history is not None or self.tree_params.has_processors
        return self.tree_choice is Choice.DETERMINISTIC and not is_shaped

    def first_span(self) -> Span:
        self.num_chain = self.context.num_pending
        self.num_fed = 0
        self.tree_rows = {}
        return self.context.span(self.num_chain)

    def next_span(self) -> Span:
        span = self.context.span(1, num_staged=self.num_chain + self.num_fed)
        self.num_fed += 1
        return span

    def tree_span(self, tree: TokenTree, rows: Mapping[tuple[int, ...], int]) -> Span:
        """Return a span of the last committed token's row and a tree after it."""
        self.tree_rows = rows
        return self.context.span(1, tree, num_staged=self.num_chain - 1)

    def commit(self, accepted: Sequence[int]) -> None:
        """Commit the rows of pending and accepted tokens; the last drafts may have none."""
        if not self.tree_rows:
            self.context.commit(range(self.num_chain + min(len(accepted), self.num_fed)))
        else:
            paths = (tuple(accepted[: depth + 1]) for depth in range(len(accepted)))
            rows = [self.num_chain + self.tree_rows[p] for p in paths if p in self.tree_rows]
            self.context.commit([*range(self.num_chain), *rows])
        self.kv_verified = True

    @property
    def first_acceptance(self) -> float:
        return self.num_first / self.num_tried

    def learn(self, proposal: Proposal, path: Sequence[int]) -> None:
        """Count the accepted first children, which shape later trees of drawn tokens."""
        if proposal.choice is Choice.DETERMINISTIC:
            return
        for node, following in zip((-1, *path), (*path, None), strict=True):
            if children := proposal.tree.children(node):
                self.num_tried += 1
                self.num_first += following == children[0]

    def close(self) -> None:
        """Free the KV slot; its verified rows may be reused by other requests."""
        self.context.close(self.context.num_cached if self.kv_verified else 0)


def _ranking_params(params: SamplingParams) -> SamplingParams:
    """Return the sampling parameters of the distributions that rank the nodes of a tree."""
    if not params.greedy:
        return params
    return replace(params, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
