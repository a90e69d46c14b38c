"""A separate, smaller language model as drafter: greedy at T=0, sampled otherwise.

Cost per step: one pass over what the draft has not seen, then K - 1 passes of one row per sequence;
each pass reads the draft's weights once and scores batch x vocabulary logits. Where nothing but the
temperature shapes the distributions, the model drafts all chains in one call if it can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.branch import Branch
from forerun.drafters.glance import CLOSE_LOOK, Past
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


class DraftModel:
    """Drafts chains with a causal language model that shares the target's token ids.

    A probe that has much to catch up with glances at the last tokens alone (`Past`), in the place
    of what was read before: prompts are read only once drafting is wanted.
    """

    method = "draft_model"
    required_features: tuple[int, ...] = ()

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._samples_chains = isinstance(model, SampledChains)
        self._branches: dict[str, Branch] = {}
        self._glances: dict[str, Branch] = {}
        self._pasts: defaultdict[str, Past] = defaultdict(Past)

    @torch.inference_mode()
    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft up to K tokens for every request, one pass per level for the whole batch."""
        branches = [self._branch(r, p) for r, p in zip(requests, plans, strict=True)]
        growing = [branch for branch in branches if branch.budget > 0]
        proposals: dict[str, Proposal] = {}
        if growing:
            self._refuse_unknown(growing)
            probing = [b for b, p in zip(branches, plans, strict=True) if p.probe and b.budget]
            if probing:
                proposals = self._look_back(probing)
                growing = [branch for branch in growing if branch.name not in proposals]
        if growing:
            growing.sort(key=lambda branch: -branch.budget)
            names = [branch.name for branch in growing]
            proposals |= zip(names, self._draft(growing), strict=True)
        return [proposals.get(request.request_id) for request in requests]

    def _refuse_unknown(self, branches: Sequence[Branch]) -> None:
        """Refuse texts with ids that only the target has, where it has more."""
        if self.model.vocab_size < self.vocab_size:
            refuse_unknown(branches, self.model.vocab_size)

    def _branch(self, request: DraftRequest, plan: Plan) -> Branch:
        name = request.request_id
        if self._glances:
            self._drop_glance(name)  # of a step that came to nothing
        branch = self._branches.get(name)
        if branch is None:
            branch = self._branches[name] = Branch.begin(request, self._open(request))
            branch.proven = True  # what others have left was
        reach = self._pasts[name].reach(branch) if plan.probe else branch.context.num_pending
        if branch.context.num_pending > reach:
            self._pasts[name].see(branch.context.num_cached + 1)
            self._drop_branch(name)
            context = Context(self.model.store, request.ids[-reach:])
            branch = self._glances[name] = Branch.begin(request, context)
        branch.follow(plan, self.model.max_context)
        return branch

    def _look_back(self, probing: Sequence[Branch]) -> dict[str, Proposal]:
        """Read what is pending, and note which of it would have been proposed.

        Returns:
            Proposals of those whose draft ends with the token that the same passes give.
        """
        proposals, closer = self._look(probing)
        if closer:
            for branch in closer:
                self._widen(branch)
            self._refuse_unknown(closer)
            proposals |= self._look(closer)[0]
        return proposals

    def _look(self, probing: Sequence[Branch]) -> tuple[dict[str, Proposal], list[Branch]]:
        """One pass over what is pending, logits of at most `MOST_SEEN` + 1 rows per request.

        Returns:
            As `_look_back`, and who should read more.
        """
        asked = [(branch, self._pasts[branch.name].places(branch)) for branch in probing]
        looking = [(branch, places) for branch, places in asked if places]
        if not looking:
            return {}, []
        spans: list[Span] = []
        rows: list[int] = []
        first = 0
        for branch, places in looking:
            span = branch.first_span() if branch.ends_there else branch.all_but_last()
            start = first - span.start - 1
            rows += range(start + places.start, start + places.stop + branch.ends_there)
            first += span.num_chain
            spans.append(span)
        batch = replace(
            self._batch(spans, [branch for branch, _ in looking]),
            logit_rows=torch.tensor(rows, device=self.model.device),
        )
        best = largest(self.model.forward(batch).logits[:, : self.vocab_size])[1]
        return self._looked(looking, best)

    def _looked(
        self, looking: Sequence[tuple[Branch, range]], best: Tensor
    ) -> tuple[dict[str, Proposal], list[Branch]]:
        """Compare the most likely tokens with those that came."""
        proposals, closer = {}, []
        tokens, row = best.tolist(), 0
        for branch, places in looking:
            came = branch.context.ids
            would = tokens[row : row + len(places)]
            right = [token == came[at] for token, at in zip(would, places, strict=True)]
            row += len(places)
            if not self._pasts[branch.name].look(branch, places, right):
                closer.append(branch)
            elif branch.ends_there:
                proposals[branch.name] = greedy_proposal(branch, best[row : row + 1])
            else:
                branch.context.commit(range(branch.context.num_pending - 1))
                branch.proven = False
            row += branch.ends_there
        return proposals, closer

    def _widen(self, glance: Branch) -> None:
        """Read more in the place of a glance, all there is if that is not too much."""
        request = glance.request
        glance.context.close()
        if len(request.ids) <= CLOSE_LOOK:
            glance.context = self._open(request)
            glance.proven = True  # what others have left was
            self._branches[glance.name] = self._glances.pop(glance.name)
        else:
            glance.context = Context(self.model.store, request.ids[-CLOSE_LOOK:])

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
            draft_probs=None if greedy else drawn.probs,
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

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Commit the KV of accepted tokens; other tokens are read before the next draft."""
        for outcome in outcomes:
            name, verdict = outcome.request_id, outcome.verdict
            if outcome.proposal is None or verdict is None:
                continue  # nothing was staged
            glance = self._glances.get(name)
            if glance is None:
                self._branches[name].commit(verdict.num_accepted)
                continue
            # Of a bonus token nobody has been told whether it would have been proposed.
            is_bonus = verdict.sources[-1] is TokenSource.BONUS
            self._pasts[name].see(len(glance.request.ids) - is_bonus)
            self._drop_glance(name)

    def forget(self, request_id: str) -> None:
        """Give the sequence's slot back, its tokens kept for others where proposals proved them."""
        self._drop_glance(request_id)
        self._pasts.pop(request_id, None)
        self._drop_branch(request_id)

    def _drop_branch(self, request_id: str) -> None:
        """Forget what was read."""
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
    """The finished chains, each up to the first distribution that is NaN.

    Where the draft fails may depend on what it drew before. To refuse the whole chain would then be
    to drop drawn tokens for what they are, which biases the text; to end it there is not. A failure
    at the first node depends on committed tokens alone and is left for the engine to refuse.
    """
    for branch, values in zip(branches, levels.stop_values, strict=False):
        branch.end(values)
    if levels.draft_probs is None:
        chains = levels.tokens.t().unbind()
        return [greedy_proposal(b, chain) for b, chain in zip(branches, chains, strict=True)]
    failed = [*zip(*failed_rows(levels.draft_probs).tolist(), strict=True)]
    return [
        sampled_proposal(branch, levels, index, failed[index])
        for index, branch in enumerate(branches)
    ]


def sampled_proposal(
    branch: Branch, levels: Levels, index: int, failed: Sequence[bool]
) -> Proposal:
    """A chain with the rows it was drawn from, unless it is deterministic after all."""
    assert levels.draft_probs is not None
    tokens = levels.tokens[: branch.budget, index]
    if branch.choice is Choice.DETERMINISTIC:
        return greedy_proposal(branch, tokens)
    num_valid = next((n for n in range(branch.budget) if failed[n]), branch.budget)
    length = max(1, num_valid)
    tokens, draft_probs = tokens[:length], levels.draft_probs[:length, index]
    return Proposal(
        tokens=tokens,
        tree=TokenTree.chain(length),
        choice=branch.choice,
        draft_probs=draft_probs,
        stop_reason=branch.limit if length == branch.budget else "invalid_probs",
        stop_values=None if branch.stop_values is None else branch.stop_values[:length],
        assurance=Assurance(tokens=tokens, draft_probs=draft_probs) if num_valid else None,
    )
