"""A drafter that proposes trees: exact whatever it guesses, and branches are worth their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel
from transformers import PreTrainedModel

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal, TokenSource
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

NextLogits = Callable[[list[int]], torch.Tensor]
PARENTS = (-1, -1, 0, 0, 1, 1, 5)
"""Two guesses, two for what follows each of them, and one token more under the last one."""
FIRST_OF_TWO = (0, 2, 4)


class Branching(Drafter):
    """Knows the target and lets every first guess be its second best token.

    Always accepted is the path of last children: nodes 1, 5 and 6, where 6 is a best guess.
    """

    method = "branching"
    required_features: tuple[int, ...] = ()

    def __init__(self, next_logits: NextLogits, *, first_chain_only: bool = False) -> None:
        self.next_logits = next_logits
        self.first_chain_only = first_chain_only

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        return [
            self.tree(list(request.ids), plan.num_speculative_tokens)
            for request, plan in zip(requests, plans, strict=True)
        ]

    def tree(self, ids: list[int], num_nodes: int) -> Proposal:
        tree = TokenTree(PARENTS[:num_nodes])
        tokens: list[int] = []
        for node, parent in enumerate(tree.parents):
            before = [tokens[above] for above in tree.path(parent)]
            best, second = self.next_logits(ids + before).topk(2).indices.tolist()
            tokens.append(second if node in FIRST_OF_TWO else best)
        if self.first_chain_only:
            tree, tokens = TokenTree.chain(len(tokens[:3:2])), tokens[:3:2]  # nodes 0 and 2
        return Proposal(
            tokens=torch.tensor(tokens, dtype=torch.int64), tree=tree, choice=Choice.DETERMINISTIC
        )

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing is kept."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def greedy(**changes: object) -> SamplingParams:
    defaults = {"temperature": 0, "max_tokens": 32, "ignore_eos": True}
    return SamplingParams(**(defaults | changes))


def seeded(**changes: object) -> SamplingParams:
    return greedy(temperature=1.0, seed=6, **changes)


PARAMS = {
    "greedy": greedy(),
    "seeded": seeded(),
    "penalised": greedy(repetition_penalty=1.4, frequency_penalty=0.5),
    "seeded and shaped": seeded(presence_penalty=1.0, min_tokens=9, stop_token_ids=(3,), top_p=0.9),
    "unseeded": seeded(verification="walk"),
}
PROMPTS = [[1, 2], [5], [7, 7, 3], [6, 1, 2, 5, 4]]


def same(found: list[RequestOutput], expected: list[RequestOutput]) -> bool:
    return [o.token_ids for o in found] == [o.token_ids for o in expected]


def tabular_drafter(target: TabularModel, **options: bool) -> Branching:
    return Branching(lambda ids: target.log_probs[target.state_of(ids)], **options)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
@pytest.mark.parametrize("k", [2, 5, 7])
def test_trees_leave_the_text_as_it_is(params, k):
    target = tiny.tabular(0)
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    engine = tiny.engine_over(target, tabular_drafter(target), k=k)
    assert same(engine.generate(PROMPTS, params), plain)
    assert target.store.num_free == 4


def full_trees(output: RequestOutput) -> set[int]:
    """Tokens accepted in steps that drafted all seven nodes; near the end fewer are asked for."""
    steps = output.completions[0].acceptance.steps
    return {num_accepted for depth, num_accepted in steps if depth == 3}


def network_drafter(network: PreTrainedModel) -> Branching:
    return Branching(lambda ids: network(torch.tensor([ids])).logits[0, -1])


@pytest.mark.parametrize("params", [greedy(max_tokens=16), seeded(max_tokens=16)])
def test_branches_of_a_network_keep_their_own_keys_and_values(params):
    """Accepted nodes lie apart in the pass: keeping the wrong rows changes what follows."""
    network = tiny.network("qwen3")
    target = tiny.adapted(network)
    plain = tiny.engine_over(target).generate(tiny.PROMPTS, params)
    engine = tiny.engine_over(target, network_drafter(network), k=7)
    found = engine.generate(tiny.PROMPTS, params)
    assert same(found, plain)
    if params.greedy:
        assert all(full_trees(output) == {3} for output in found)


@pytest.mark.parametrize("params", [greedy(logprobs=2), seeded(logprobs=2)])
def test_logprobs_are_those_of_the_accepted_branch(params):
    target = tiny.tabular(0)
    (plain,) = tiny.engine_over(target).generate([[1, 2]], params)
    (found,) = tiny.engine_over(target, tabular_drafter(target), k=7).generate([[1, 2]], params)
    assert found.completions[0].logprobs == plain.completions[0].logprobs


class Coupled(Branching):
    """Says that its guesses share the target's noise, and brings a row per expanded parent."""

    def tree(self, ids: list[int], num_nodes: int) -> Proposal:
        drafted = super().tree(ids, num_nodes)
        rows = torch.full((len(set(drafted.tree.parents)), 8), 1 / 8)
        return replace(drafted, choice=Choice.COUPLED, draft_probs=rows)


def test_the_rows_of_a_coupled_tree_are_those_of_its_expanded_parents():
    """There are fewer of them than nodes: what a chain expects would be read past their end."""
    target = tiny.tabular(0)
    records: list[StepRecord] = []
    drafter = Coupled(lambda ids: target.log_probs[target.state_of(ids)])
    engine = tiny.engine_over(target, drafter, k=7)
    engine.observers[:] = [EmittedRecords(records.append)]
    found = engine.generate(PROMPTS, seeded())
    assert same(found, tiny.engine_over(target).generate(PROMPTS, seeded()))
    drafted = [record for record in records if record.num_drafted > 1]
    assert drafted
    assert all(0 < r.expected_accepted < r.num_accepted + r.depth_drafted for r in drafted)


@pytest.mark.parametrize("choice", Choice)
@pytest.mark.parametrize("verification", ["auto", "block"])
def test_a_proposal_of_nothing_is_plain_decoding_whatever_it_says_of_itself(choice, verification):
    class Idle(Branching):
        def tree(self, ids: list[int], num_nodes: int) -> Proposal:
            return replace(super().tree(ids, 0), choice=choice)

    target = tiny.tabular(0)
    params = seeded(verification=verification)
    engine = tiny.engine_over(target, Idle(lambda ids: target.log_probs[target.state_of(ids)]), k=3)
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    assert same(engine.generate(PROMPTS, params), plain)


def test_branches_accept_what_the_first_chain_cannot():
    target = tiny.tabular(0)
    tree = tiny.engine_over(target, tabular_drafter(target), k=7)
    chain = tiny.engine_over(target, tabular_drafter(target, first_chain_only=True), k=7)
    for output in tree.generate(PROMPTS, greedy(max_tokens=24)):
        assert full_trees(output) == {3}
        assert output.completions[0].sources.count(TokenSource.ACCEPTED) >= 15
    for output in chain.generate(PROMPTS, greedy(max_tokens=24)):
        assert output.completions[0].acceptance.num_accepted == 0


def test_sampled_text_accepts_more_from_the_tree_than_from_its_first_chain():
    target = tiny.tabular(0)
    tree: Drafter = tabular_drafter(target)
    chain: Drafter = tabular_drafter(target, first_chain_only=True)
    accepted = [
        sum(
            output.completions[0].acceptance.num_accepted
            for output in tiny.engine_over(target, drafter, k=7).generate(PROMPTS, seeded())
        )
        for drafter in (tree, chain)
    ]
    assert accepted[0] > 2 * accepted[1]
