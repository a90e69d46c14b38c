"""A separate, smaller language model as drafter: greedy at T=0, sampled otherwise.

Cost per step: one pass over what the draft has not seen, then K - 1 passes of one row per sequence;
each pass reads the draft's weights once and scores batch x vocabulary logits. Where nothing but the
temperature shapes the laws, the model drafts all chains in one call if it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest, Outcome
from forerun.drafters.branch import Branch
from forerun.drafters.levels import Levels, draft_keys, draft_levels, race_keys
from forerun.errors import DrafterError
from forerun.models.base import LanguageModel, RowBatch, SampledChains, Span
from forerun.models.context import Context, pack
from forerun.sampling.choice import Choice, TokenSource
from forerun.sampling.largest import largest
from forerun.sampling.processors import failed_rows
from forerun.sampling.proposal import Assurance, Proposal
from forerun.theory.tree import TokenTree

__all__ = ["DraftModel"]

PREFILL_CHUNK = 256
GLANCE = 48
"""Last tokens that a probe is drafted from where there is more to catch up with."""
LEAST_READ = 32
"""Tokens that a draft must have read to be asked what it would have proposed."""
LEAST_SEEN = 4
"""Tokens not seen before that make it worth looking back."""


class DraftModel:
    """Drafts chains with a causal language model that shares the target's token ids.

    A probe that has much to catch up with glances at the last tokens alone, in the place of what
    was read before: whether the draft is any good shows there too, and prompts are read only once
    drafting is wanted. What a greedy probe reads, it looks back at: where would the next token have
    been proposed? That tells at once what would take a dozen probes.
    """

    method = "draft_model"

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._samples_chains = isinstance(model, SampledChains)
        self._branches: dict[str, Branch] = {}
        self._glances: dict[str, Branch] = {}
        self._looked: dict[str, int] = {}

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft up to K tokens for every request, one pass per level for the whole batch."""
        branches = [self._branch(r, p) for r, p in zip(requests, plans, strict=True)]
        growing = [branch for branch in branches if branch.budget > 0]
        proposals: dict[str, Proposal] = {}
        if growing:
            if self.model.vocab_size < self.vocab_size:
                refuse_unknown(growing, self.model.vocab_size)
            looking = [
                branch
                for branch, plan in zip(branches, plans, strict=True)
                if plan.probe and branch.budget and self._may_look_back(branch)
            ]
            if looking:
                self._look_back(looking)
            growing.sort(key=lambda branch: -branch.budget)
            names = [branch.request.request_id for branch in growing]
            proposals = dict(zip(names, self._draft(growing), strict=True))
        return [proposals.get(request.request_id) for request in requests]

    def _branch(self, request: DraftRequest, plan: Plan) -> Branch:
        name = request.request_id
        if self._glances:
            self._drop_glance(name)  # of a step that came to nothing
        branch = self._branches.get(name)
        if branch is None:
            branch = self._branches[name] = Branch.begin(request, self._open(request))
            branch.proven = True  # what others have left was
        if plan.probe and branch.context.num_pending > GLANCE:
            self._drop_branch(name)
            context = Context(self.model.store, request.ids[-GLANCE:])
            branch = self._glances[name] = Branch.begin(request, context)
        branch.follow(plan, self.model.max_context)
        return branch

    def _may_look_back(self, branch: Branch) -> bool:
        """Whether it is worth it, and right: were anything to shape the laws, it would not be."""
        is_greedy = branch.choice is Choice.DETERMINISTIC
        is_worth_it = len(self._unseen(branch)) >= LEAST_SEEN
        return is_greedy and is_worth_it and branch.may_chain(1, self.model.max_context)

    def _look_back(self, branches: Sequence[Branch]) -> None:
        """Read what is pending but its last token, and note which of it would have been proposed.

        Of the output only: the target has not written the prompt.
        """
        spans = [branch.context.span(branch.context.num_pending - 1) for branch in branches]
        seen = [self._unseen(branch) for branch in branches]
        starts = accumulate((span.num_chain for span in spans), initial=0)
        rows = [
            first + place - span.start - 1
            for first, span, places in zip(starts, spans, seen, strict=False)
            for place in places
        ]
        wanted = torch.tensor(rows, device=self.model.device)
        batch = replace(self._batch(spans, branches), logit_rows=wanted)
        best = iter(largest(self.model.forward(batch).logits[:, : self.vocab_size])[1].tolist())
        for branch, span, places in zip(branches, spans, seen, strict=True):
            came = branch.context.ids
            branch.hindsight = tuple(int(next(best) == came[at]) for at in places)
            self._looked[branch.request.request_id] = len(branch.request.ids)
            branch.context.commit(range(span.num_chain))
            branch.proven = False

    def _unseen(self, branch: Branch) -> range:
        """Output that is pending, but for what was looked back at before, by its place."""
        request, came = branch.request, branch.context.ids
        known = max(request.num_prompt, self._looked.get(request.request_id, 0))
        first = max(LEAST_READ, known - (len(request.ids) - len(came)))
        return range(max(first, branch.context.num_cached + 1), len(came))

    def _drop_glance(self, request_id: str) -> None:
        """Forget what was read for a probe, if there was any."""
        glance = self._glances.pop(request_id, None)
        if glance is not None:
            glance.context.close()

    def _open(self, request: DraftRequest) -> Context:
        """The draft's own view of a sequence."""
        return Context(self.model.store, request.ids, request.scope)

    def _draft(self, branches: Sequence[Branch]) -> list[Proposal]:
        """Proposals of branches with something to draft, the deepest first."""
        self._prefill(branches)
        depth = branches[0].budget
        batch = self._batch([branch.first_span() for branch in branches], branches)
        if all(branch.may_chain(depth, self.model.max_context) for branch in branches):
            choices = {branch.choice for branch in branches}
            stops = any(branch.stop is not None for branch in branches)
            if choices == {Choice.DETERMINISTIC} and not stops:
                chains = self.model.greedy_chain(batch, depth, self.vocab_size).unbind()
                after_chains(branches, depth)
                return [
                    greedy_proposal(b, chain) for b, chain in zip(branches, chains, strict=True)
                ]
            if self._samples_chains and not {Choice.SAMPLED, Choice.COUPLED} <= choices:
                levels = self._sampled_chains(branches, batch, depth, Choice.COUPLED in choices)
                after_chains(branches, num_levels(branches, levels))
                return proposals_of(branches, levels)
        return proposals_of(branches, draft_levels(self.model, branches, batch, self.vocab_size))

    def _sampled_chains(
        self, branches: Sequence[Branch], batch: RowBatch, depth: int, by_race: bool
    ) -> Levels:
        """All levels in one call; a greedy branch is right under either kind of noise."""
        assert isinstance(self.model, SampledChains)
        temperatures = torch.tensor([b.params.temperature for b in branches], dtype=torch.float32)
        keys = race_keys(branches, depth) if by_race else draft_keys(branches, depth)
        device = self.model.device
        stops = [branch.stop for branch in branches]
        drawn = self.model.sampled_chain(
            batch,
            keys.to(device),
            temperatures.to(device),
            self.vocab_size,
            by_race=by_race,
            stops=() if all(stop is None for stop in stops) else stops,
        )
        greedy = all(branch.choice is Choice.DETERMINISTIC for branch in branches)
        return Levels(
            tokens=drawn.tokens,
            laws=None if greedy else drawn.laws,
            stop_values=() if drawn.stop_values is None else measured(drawn.stop_values),
        )

    def _batch(self, spans: Sequence[Span], branches: Sequence[Branch]) -> RowBatch:
        """A pass over pending tokens that wants the last row of every branch."""
        ids = [
            t for b, s in zip(branches, spans, strict=True) for t in b.context.pending(s.num_chain)
        ]
        ends = accumulate(span.num_chain for span in spans)
        return pack(spans, ids, [end - 1 for end in ends], self.model.device)

    def _prefill(self, branches: Sequence[Branch]) -> None:
        """Feed long unseen prefixes in chunks until what is left fits one pass."""
        while long := [b for b in branches if b.context.num_pending > PREFILL_CHUNK]:
            batch = self._batch([b.context.span(PREFILL_CHUNK) for b in long], long)
            self.model.forward(replace(batch, logit_rows=batch.logit_rows[:0]))
            for branch in long:
                branch.context.commit(range(PREFILL_CHUNK))
                branch.proven = False

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the KV of accepted tokens."""
        for outcome in outcomes:
            name, verdict = outcome.request_id, outcome.verdict
            glance = self._glances.get(name)
            if glance is None:
                self._branches[name].commit(verdict.num_accepted)
                continue
            # Of a bonus token nobody has been told whether it would have been proposed.
            is_bonus = verdict.sources[-1] is TokenSource.BONUS
            self._looked[name] = len(glance.request.ids) - is_bonus
            self._drop_glance(name)

    def forget(self, request_id: str) -> None:
        """Give the sequence's slot back, its tokens kept for others where proposals proved them."""
        self._drop_glance(request_id)
        self._looked.pop(request_id, None)
        self._drop_branch(request_id)

    def _drop_branch(self, request_id: str) -> None:
        """Forget what was read, but for what was looked back at."""
        branch = self._branches.pop(request_id, None)
        if branch is not None:
            branch.context.close(branch.context.num_cached if branch.proven else 0)


def refuse_unknown(branches: Sequence[Branch], vocab_size: int) -> None:
    """Refuse texts with ids that only the target has, padding of its vocabulary most of the time.

    Raises:
        DrafterError: what the draft has not read yet holds one.
    """
    for branch in branches:
        highest = max(branch.context.pending(), default=0)
        if highest >= vocab_size:
            raise DrafterError(
                f"request {branch.request.request_id} holds token {highest}; the draft has "
                f"{vocab_size} and cannot read on"
            )


def after_chains(branches: Sequence[Branch], depth: int) -> None:
    """A chain feeds all its tokens but the last."""
    for branch in branches:
        branch.num_fed = depth - 1


def measured(values: Tensor) -> list[list[float]]:
    """Per branch, what was measured of it: -1 is nothing."""
    columns: list[list[float]] = values.t().tolist()
    return [[value for value in column if value != -1.0] for column in columns]


def num_levels(branches: Sequence[Branch], levels: Levels) -> int:
    """Levels that were drafted: without a stop rule on every branch, all of them."""
    if not levels.stop_values or any(branch.stop is None for branch in branches):
        return len(levels.tokens)
    return max(map(len, levels.stop_values))


def greedy_proposal(branch: Branch, chain: Tensor) -> Proposal:
    """A chain of argmaxes, cut to the budget."""
    tokens = chain[: branch.budget] if branch.budget < len(chain) else chain
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(branch.budget),
        choice=Choice.DETERMINISTIC,
        stop_reason=branch.limit,
        stop_values=branch.stop_values,
        hindsight=branch.hindsight,
        assurance=Assurance(tokens=tokens, draft_probs=None),
    )


def proposals_of(branches: Sequence[Branch], levels: Levels) -> list[Proposal]:
    """The finished chains, each up to the first law that is NaN.

    Where the draft fails may depend on what it drew before. To refuse the whole chain would then be
    to drop drawn tokens for what they are, which biases the text; to end it there is not. A failure
    at the first node depends on committed tokens alone and is left for the engine to refuse.
    """
    for branch, values in zip(branches, levels.stop_values, strict=False):
        branch.end(values)
    if levels.laws is None:
        chains = levels.tokens.t().unbind()
        return [greedy_proposal(b, chain) for b, chain in zip(branches, chains, strict=True)]
    failed = [*zip(*failed_rows(levels.laws).tolist(), strict=True)]
    return [
        sampled_proposal(branch, levels, index, failed[index])
        for index, branch in enumerate(branches)
    ]


def sampled_proposal(
    branch: Branch, levels: Levels, index: int, failed: Sequence[bool]
) -> Proposal:
    """A chain with the rows it was drawn from, unless it is deterministic after all."""
    assert levels.laws is not None
    tokens = levels.tokens[: branch.budget, index]
    if branch.choice is Choice.DETERMINISTIC:
        return greedy_proposal(branch, tokens)
    num_lawful = next((n for n in range(branch.budget) if failed[n]), branch.budget)
    length = max(1, num_lawful)
    tokens, laws = tokens[:length], levels.laws[:length, index]
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(length),
        choice=branch.choice,
        draft_probs=laws,
        stop_reason=branch.limit if length == branch.budget else "no_law",
        stop_values=None if branch.stop_values is None else branch.stop_values[:length],
        assurance=Assurance(tokens=tokens, draft_probs=laws) if num_lawful else None,
    )
