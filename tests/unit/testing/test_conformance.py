"""The conformance suite passes drafters that keep the contract and catches those that break it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.faulty import (
    Damaging,
    Faulty,
    RaisesInForget,
    RaisesInObserve,
    RaisesOnce,
    WrongNumber,
    draft_probs_that_are_logits,
    id_past_the_vocabulary,
    too_many_nodes,
)
from tests.tabular import TabularModel

from forerun.drafters.base import Drafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.sampling.proposal import Proposal
from forerun.testing.conformance import check_drafter
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")


@pytest.fixture(scope="module")
def target() -> TabularModel:
    return tiny.tabular(0)


def check(factory: Callable[[], Drafter], target: TabularModel, num_sampled: int = 8) -> None:
    check_drafter(factory, target, tiny.tokenizer(), max_tokens=14, num_sampled=num_sampled)


@pytest.fixture(scope="module")
def sound(target: TabularModel) -> Callable[[], Drafter]:
    draft = tiny.cousin(target, 5)
    return lambda: tiny.drafting(draft, 8)


def test_a_draft_model_passes(sound, target):
    check(sound, target)


def test_the_suffix_drafter_passes(target):
    check(SuffixDrafter, target)


class ChangesIds(Faulty):
    """Works in the engine's own list."""

    def propose(self, requests, plans):
        proposals = super().propose(requests, plans)
        requests[0].ids.append(1)
        return proposals


class ForgetsTwice(Faulty):
    """Raises for requests that it does not know."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.known: set[str] = set()

    def propose(self, requests, plans):
        self.known.update(request.request_id for request in requests)
        return super().propose(requests, plans)

    def forget(self, request_id):
        self.known.remove(request_id)


class Unreproducible(Faulty):
    """Guesses with a generator of its own."""

    def propose(self, requests, plans):
        return [
            p if p is None or p.draft_probs is not None else shuffled(p)
            for p in super().propose(requests, plans)
        ]


def shuffled(proposal: Proposal) -> Proposal:
    return replace(proposal, tokens=torch.randint(0, 8, proposal.tokens.shape))


class FlatterRows(Faulty):
    """Says that its tokens were drawn from rows flatter than the real ones."""

    def propose(self, requests, plans):
        return [p and flatter(p) for p in super().propose(requests, plans)]


def flatter(proposal: Proposal) -> Proposal:
    rows = proposal.draft_probs
    return proposal if rows is None else replace(proposal, draft_probs=(rows + 1 / 8) / 2)


class PrunesDrawnTokens(Faulty):
    """Ends a chain before the first token that turned out to be unlikely."""

    def propose(self, requests, plans):
        return [p and pruned(p) for p in super().propose(requests, plans)]


def pruned(proposal: Proposal) -> Proposal:
    if proposal.draft_probs is None or not proposal.tree.is_chain:
        return proposal
    drawn = proposal.draft_probs.gather(-1, proposal.tokens[:, None])[:, 0]
    kept = int((drawn > 0.3).cumprod(-1).sum())
    tokens, rows = proposal.tokens[:kept], proposal.draft_probs[:kept]
    return replace(proposal, tokens=tokens, tree=TokenTree.chain(kept), draft_probs=rows)


class NoName(Faulty):
    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.method = ""


class ForgetsNothing(Faulty):
    """Keeps the tokens it has read, and takes a later request of the same name for the old one."""

    def __init__(self, inner: Drafter) -> None:
        super().__init__(inner)
        self.lengths: dict[str, int] = {}

    def propose(self, requests, plans):
        for request in requests:
            if len(request.ids) < self.lengths.get(request.request_id, 0):
                raise RuntimeError("a text became shorter")
            self.lengths[request.request_id] = len(request.ids)
        return super().propose(requests, plans)


def damaging(damage: Callable[[Proposal], Proposal]) -> Callable[[Drafter], Drafter]:
    return lambda inner: Damaging(inner, damage)


PLANTED: Sequence[tuple[Callable[[Drafter], Drafter], str]] = (
    (NoName, "method is ''"),
    (ForgetsTwice, "forget raised KeyError"),
    (RaisesInForget, "forget raised RuntimeError"),
    (RaisesInObserve, "did not see"),
    (RaisesOnce, "out of luck"),
    (WrongNumber, "proposals for"),
    (ChangesIds, "propose changed the ids"),
    (ForgetsNothing, "a text became shorter"),
    (damaging(too_many_nodes), "8 nodes, but K is 4"),
    (damaging(id_past_the_vocabulary), "outside 0..7"),
    (damaging(draft_probs_that_are_logits), "draft_probs are no distributions"),
    (Unreproducible, "two fresh drafters propose differently"),
    (FlatterRows, "likelier under draft_probs than draws"),
    (PrunesDrawnTokens, "likelier under draft_probs than draws"),
)


@pytest.mark.parametrize(("broken", "message"), PLANTED, ids=[message for _, message in PLANTED])
def test_a_broken_drafter_is_caught(broken, message, sound, target):
    with pytest.raises(AssertionError, match=message):
        check(lambda: broken(sound()), target)


def test_what_is_no_drafter_is_refused(target):
    with pytest.raises(AssertionError, match="object is no subclass of Drafter"):
        check(object, target)


def test_too_few_prompts_are_refused(sound, target):
    with pytest.raises(AssertionError, match="at least 3 prompts, not 1"):
        check_drafter(sound, target, tiny.tokenizer(), prompts=[[1]])
