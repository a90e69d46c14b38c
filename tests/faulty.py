"""Drafters with something wrong in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.tree import TokenTree

VICTIM = "request-2"
"""The request that faults of one row strike: the third of an engine's first batch."""

Damage = Callable[[Proposal], Proposal]


class Faulty(Drafter):
    """A sound drafter with something wrong in it: override what goes wrong."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.method = inner.method
        self.required_features = inner.required_features
        self.num_proposals = 0
        self.num_observations = 0

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        self.num_proposals += 1
        return self.inner.propose(requests, plans)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        self.num_observations += 1
        self.inner.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self.inner.forget(request_id)


class RaisesAlways(Faulty):
    def propose(self, requests, plans):
        super().propose(requests, plans)
        raise RuntimeError("no luck")


class RaisesOnce(Faulty):
    """Raises on the third batch, after drafting; a request not forgotten then has half a state."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.half_done: set[str] = set()

    def propose(self, requests, plans):
        if not self.half_done.isdisjoint(request.request_id for request in requests):
            raise RuntimeError("half a state")
        proposals = super().propose(requests, plans)
        if self.num_proposals == 3:
            self.half_done = {request.request_id for request in requests}
            raise RuntimeError("out of luck")
        return proposals

    def forget(self, request_id):
        super().forget(request_id)
        self.half_done.discard(request_id)


class RaisesOnOneRow(Faulty):
    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        if any(request.request_id == VICTIM for request in requests):
            raise RuntimeError("not that one")
        return proposals


class WrongNumber(Faulty):
    def propose(self, requests, plans):
        return super().propose(requests, plans)[:-1]


class RaisesInObserve(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        raise RuntimeError("did not see")


class RaisesOnceInObserve(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        if self.num_observations == 2:
            raise RuntimeError("blinked")


class RaisesInObserveOfOneRow(Faulty):
    def observe(self, outcomes):
        super().observe(outcomes)
        if any(outcome.request_id == VICTIM for outcome in outcomes):
            raise RuntimeError("did not see that one")


class RaisesInForget(Faulty):
    def forget(self, request_id):
        super().forget(request_id)
        raise RuntimeError("cannot forget")


class Damaging(Faulty):
    """Damages every proposal of one request."""

    def __init__(self, inner: Drafter, damage: Damage) -> None:
        super().__init__(inner)
        self.damage = damage

    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        return [
            self.damage(proposal) if proposal and request.request_id == VICTIM else proposal
            for request, proposal in zip(requests, proposals, strict=True)
        ]


def longer(proposal: Proposal) -> Proposal:
    tokens = torch.cat([proposal.tokens, torch.tensor([1])])
    return replace(proposal, tokens=tokens, tree=TokenTree.chain(len(tokens)))


def too_many_nodes(proposal: Proposal) -> Proposal:
    for _ in range(4):
        proposal = longer(proposal)
    return proposal


def tokens_short_of_the_tree(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens[:-1])


def id_past_the_vocabulary(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens + 8)


def negative_id(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens - 8)


def fractional_ids(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=proposal.tokens + 0.5)


def nan_draft_probs(proposal: Proposal) -> Proposal:
    return replace(proposal, draft_probs=torch.full((proposal.num_drafted, 8), torch.nan))


def infinite_draft_probs(proposal: Proposal) -> Proposal:
    return replace(proposal, draft_probs=torch.full((proposal.num_drafted, 8), torch.inf))


def sampled(proposal: Proposal, probs: torch.Tensor | None) -> Proposal:
    return replace(proposal, choice=Choice.SAMPLED, draft_probs=probs)


def no_draft_probs(proposal: Proposal) -> Proposal:
    return sampled(proposal, None)


def draft_probs_of_another_vocabulary(proposal: Proposal) -> Proposal:
    return sampled(proposal, torch.full((proposal.num_drafted, 7), 1 / 7))


def draft_probs_short_of_a_row(proposal: Proposal) -> Proposal:
    return sampled(proposal, torch.full((proposal.num_drafted - 1, 8), 1 / 8))


def draft_probs_that_are_logits(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[3.0, 2, 1, 0, -1, -2, -3, 0]])
    return sampled(proposal, rows.expand(proposal.num_drafted, 8))


def negative_draft_probs(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[-0.5, 1.5, 0, 0, 0, 0, 0, 0]])
    tokens = torch.ones_like(proposal.tokens)
    return replace(sampled(proposal, rows.expand(proposal.num_drafted, 8)), tokens=tokens)


def impossible_draw(proposal: Proposal) -> Proposal:
    rows = torch.tensor([[0, 1.0, 0, 0, 0, 0, 0, 0]])
    tokens = torch.full_like(proposal.tokens, 5)
    return replace(sampled(proposal, rows.expand(proposal.num_drafted, 8)), tokens=tokens)


def draft_probs_without_nodes(proposal: Proposal) -> Proposal:
    rows = torch.full((proposal.num_drafted, 8), 1 / 8)
    return replace(sampled(proposal, rows), tokens=proposal.tokens[:0], tree=TokenTree.chain(0))


def draft_probs_rounded_to_bf16(proposal: Proposal) -> Proposal:
    """Each row adds up to 0.998: harmless to look at, a bias of the text nevertheless."""
    rows = torch.tensor([[0.9, *[0.1 / 7] * 7]]).bfloat16()
    return sampled(proposal, rows.expand(proposal.num_drafted, 8))


DAMAGES = (
    too_many_nodes,
    tokens_short_of_the_tree,
    id_past_the_vocabulary,
    negative_id,
    fractional_ids,
    nan_draft_probs,
    infinite_draft_probs,
    no_draft_probs,
    draft_probs_of_another_vocabulary,
    draft_probs_short_of_a_row,
    draft_probs_that_are_logits,
    negative_draft_probs,
    impossible_draw,
    draft_probs_without_nodes,
    draft_probs_rounded_to_bf16,
)
