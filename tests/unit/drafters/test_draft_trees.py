"""Trees of a draft model: exact in every mix of shapes, and drafted with one pass per level."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.control.base import Capacity, Chain, Controller, Decision, Plan, RequestState, Tree
from forerun.drafters.draft_model import SelfDraft
from forerun.engine.observing import ObservedStep
from forerun.models.base import ModelOutput, RowBatch
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.record import StepRecord

pytestmark = pytest.mark.usefixtures("unchecked")

SHAPES = (
    Tree(num_nodes=7, depth=3, width=2),
    Chain(num_tokens=4),
    Tree(num_nodes=3, depth=1, width=3),
    Tree(num_nodes=9, depth=5, width=4),
    Chain(num_tokens=0),
    Tree(num_nodes=5, depth=5, width=1),
)
PROMPTS = [[1, 2], [5], [7, 7, 3], [6, 1, 2, 5, 4]]
WALKED = {
    "greedy": SamplingParams(temperature=0, max_tokens=32, ignore_eos=True),
    "seeded": SamplingParams(seed=6, max_tokens=32, ignore_eos=True),
    "penalised": SamplingParams(
        temperature=0, repetition_penalty=1.4, frequency_penalty=0.5, max_tokens=32
    ),
    "seeded and shaped": SamplingParams(
        seed=6, presence_penalty=1.0, min_tokens=9, stop_token_ids=(3,), top_p=0.9, max_tokens=32
    ),
    "walk": SamplingParams(seed=3, verification="walk", max_tokens=32, ignore_eos=True),
}
DRAWN = {
    "auto": SamplingParams(max_tokens=32, ignore_eos=True),
    "traversal": SamplingParams(verification="traversal", max_tokens=32, ignore_eos=True),
    "shaped": SamplingParams(
        temperature=0.7, top_k=2, presence_penalty=0.5, max_tokens=32, ignore_eos=True
    ),
}


class Shapes(Controller):
    """Plans the given shapes in turn, another one for every request and step."""

    def __init__(self, *shapes: Chain | Tree) -> None:
        self.shapes = shapes
        self.num_calls = 0

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        self.num_calls += 1
        shapes = [
            self.shapes[(self.num_calls + place) % len(self.shapes)] for place in range(len(states))
        ]
        return Decision(
            [
                Plan(method="draft_model", shape=shape) if shape.num_nodes else Plan()
                for shape in shapes
            ]
        )

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Nothing is learnt."""


class Proposals:
    """Collects what was verified and the rules it was verified by."""

    is_required = True
    wants_logits = False

    def __init__(self) -> None:
        self.found: list[Proposal] = []
        self.rules: set[str] = set()
        self.accepted: list[int] = []

    def observe(self, step: ObservedStep) -> None:
        for entry in step.emitting:
            if entry.proposal is not None:
                self.found.append(entry.proposal)
                self.rules.add(entry.rule)
                self.accepted.append(entry.verdict.num_accepted)


def run(target, drafter, params, *shapes, prompts=PROMPTS, k=9):
    """Return the texts under plans of these shapes, and the proposals."""
    engine = tiny.engine_over(target, drafter, k=k, controller=Shapes(*shapes))
    seen = Proposals()
    engine.observers.append(seen)
    texts = [output.token_ids for output in engine.generate(prompts, params)]
    return texts, seen


def plain(target, params, prompts=PROMPTS):
    return [o.token_ids for o in tiny.engine_over(target).generate(prompts, params)]


@pytest.mark.parametrize("params", WALKED.values(), ids=WALKED)
@pytest.mark.parametrize("shapes", [SHAPES, SHAPES[:1], SHAPES[2:3]])
def test_trees_and_mixed_batches_leave_the_text_as_it_is(params, shapes):
    target = tiny.tabular(0)
    draft = tiny.cousin(target, 3)
    expected = plain(target, params)
    texts, seen = run(target, tiny.drafting(draft, 8), params, *shapes)
    assert texts == expected
    assert any(not proposal.tree.is_chain for proposal in seen.found)
    assert seen.rules <= {"greedy", "walk"}
    assert draft.store.num_free == target.store.num_free == 4


@pytest.mark.parametrize("params", DRAWN.values(), ids=DRAWN)
def test_drawn_trees_are_verified_by_their_own_rule(params):
    target = tiny.tabular(0)
    draft = tiny.cousin(target, 3)
    texts, seen = run(target, tiny.drafting(draft, 8), params, *SHAPES)
    assert all(len(text) == 32 for text in texts)
    assert "traversal" in seen.rules
    assert sum(seen.accepted) > len(seen.accepted) // 2
    assert draft.store.num_free == target.store.num_free == 4


def test_a_draft_that_is_the_target_has_every_drawn_chain_accepted():
    """The first of siblings is then always accepted, and so are all nodes of the first path."""
    target = tiny.tabular(0)
    twin = TabularModel(
        log_probs=target.log_probs, order=2, store=type(target.store)(4, tiny.MAX_CONTEXT, 64)
    )
    params = replace(DRAWN["auto"], max_tokens=60)
    shape = Tree(num_nodes=6, depth=3, width=2)
    _, seen = run(target, tiny.drafting(twin, 8), params, shape, prompts=PROMPTS[:1])
    full = [
        accepted
        for proposal, accepted in zip(seen.found, seen.accepted, strict=True)
        if max(proposal.tree.depths) == 3  # less near the end of the text
    ]
    assert set(full) == {3}
    assert len(full) > 5


class Counting:
    """A model that counts its passes and their rows."""

    def __init__(self, model: TabularModel) -> None:
        self.model = model
        self.num_rows: list[int] = []

    def __getattr__(self, name: str):
        return getattr(self.model, name)

    def forward(self, batch: RowBatch) -> ModelOutput:
        self.num_rows.append(len(batch.tokens))
        return self.model.forward(batch)


@pytest.mark.parametrize("params", [WALKED["greedy"], DRAWN["auto"]])
def test_a_batch_takes_one_pass_per_level(params):
    target = tiny.tabular(0)
    draft = Counting(tiny.cousin(target, 3))
    shapes = (Tree(num_nodes=7, depth=3, width=3), Chain(num_tokens=3))
    params = replace(params, max_tokens=9)
    _, seen = run(target, tiny.drafting(draft, 8), params, *shapes)
    num_steps = -(-len(seen.found) // len(PROMPTS))
    assert len(draft.num_rows) <= 3 * (num_steps + 2)  # sequences need not end in the same step
    # No pass reads more than the prompts, or than a row and the inner nodes of every tree.
    assert max(draft.num_rows[1:]) <= 4 * (1 + 7)


def accepted_rows(store):
    """Wrap the commit of a store; returns the rows of every commit."""
    found: list[list[int]] = []
    commit = store.commit

    def noted(slot, rows):
        found.append(list(rows))
        commit(slot, rows)

    store.commit = noted
    return found


def test_the_greedy_path_costs_no_gather_in_either_model():
    """With a draft that is the target the greedy path is accepted: its rows come first."""
    target = tiny.tabular(0)
    twin = TabularModel(
        log_probs=target.log_probs, order=2, store=type(target.store)(4, tiny.MAX_CONTEXT, 64)
    )
    in_target, in_draft = accepted_rows(target.store), accepted_rows(twin.store)
    shape = Tree(num_nodes=7, depth=3, width=2)
    run(target, tiny.drafting(twin, 8), WALKED["greedy"], shape)
    assert all(rows == list(range(len(rows))) for rows in in_target + in_draft)
    assert max(map(len, in_draft[4:])) > 1


@pytest.mark.covering
@pytest.mark.parametrize("family", tiny.FAMILIES)
@pytest.mark.parametrize("params", [WALKED["greedy"], WALKED["seeded"]])
def test_branches_of_networks_keep_their_own_keys_and_values(family, params):
    network = tiny.network(family)
    target, draft = tiny.adapted(network), tiny.adapted(tiny.network(family, seed=1))
    params = replace(params, max_tokens=20)
    expected = plain(target, params, prompts=tiny.PROMPTS)
    texts, _ = run(target, tiny.drafting(draft), params, *SHAPES, prompts=tiny.PROMPTS)
    assert texts == expected
    if family == "llama":  # a draft that is the target: accepted paths are long
        twin = tiny.drafting(tiny.adapted(network))
        texts, seen = run(target, twin, params, SHAPES[0], prompts=tiny.PROMPTS)
        assert texts == expected
        assert not params.greedy or 3 in seen.accepted


def test_self_drafts_propose_trees_in_the_targets_own_slot():
    target = tiny.adapted(tiny.network("llama"))
    params = replace(WALKED["greedy"], max_tokens=20)
    expected = plain(target, params, prompts=tiny.PROMPTS)
    drafter = SelfDraft(target.first_layers(1), target.vocab_size)
    texts, seen = run(target, drafter, params, *SHAPES, prompts=tiny.PROMPTS)
    assert texts == expected
    assert any(not proposal.tree.is_chain for proposal in seen.found)


def test_a_tree_near_the_end_of_the_drafts_context_is_cut_to_its_depth():
    target = tiny.tabular(0)
    short = TabularModel.from_seed(3, vocab_size=8, num_slots=4, max_context=12)
    params = replace(WALKED["greedy"], max_tokens=30)
    texts, seen = run(target, tiny.drafting(short, 8), params, Tree(num_nodes=9, depth=5, width=2))
    assert texts == plain(target, params)
    assert any(proposal.stop_reason == "context" for proposal in seen.found)
    assert max(max(p.tree.depths) for p in seen.found if p.stop_reason == "context") < 5


class InvalidBehind(TabularModel):
    """A draft whose distribution is NaN behind one token."""

    bad = 5

    def forward(self, batch: RowBatch) -> ModelOutput:
        logits = super().forward(batch).logits
        logits[batch.tokens[batch.logit_rows] == self.bad] = torch.nan
        return ModelOutput(logits=logits)


@pytest.mark.parametrize("params", [WALKED["greedy"], WALKED["walk"], DRAWN["auto"]])
def test_nothing_is_drafted_behind_invalid_probabilities(params, caplog):
    target = tiny.tabular(0)
    draft = tiny.cousin(target, 3)
    broken = InvalidBehind(log_probs=draft.log_probs, order=2, store=draft.store)
    _, seen = run(target, tiny.drafting(broken, 8), params, SHAPES[3], prompts=[[1, 2], [5]])
    for proposal in seen.found:
        for node, parent in enumerate(proposal.tree.parents):
            assert parent < 0 or proposal.tokens[parent] != InvalidBehind.bad, node
    assert "decodes plainly" in caplog.text  # a prompt that ends in the token


def test_where_one_token_is_possible_only_one_child_is_drawn():
    target = tiny.tabular(0)
    params = replace(DRAWN["auto"], top_k=1)
    texts, seen = run(target, tiny.drafting(tiny.cousin(target, 3), 8), params, SHAPES[0])
    assert texts == plain(target, params)
    assert all(proposal.tree.is_chain for proposal in seen.found)


def test_trees_of_drawn_tokens_have_the_rows_they_were_drawn_from():
    target = tiny.tabular(0)
    _, seen = run(target, tiny.drafting(tiny.cousin(target, 3), 8), DRAWN["auto"], SHAPES[3])
    for proposal in seen.found:
        assert proposal.choice is Choice.WITHOUT_REPLACEMENT
        assert torch.allclose(proposal.draft_probs.sum(-1), torch.ones(()))


def test_a_tree_under_a_verifier_for_chains_is_refused_by_name(caplog):
    target = tiny.tabular(0)
    params = replace(DRAWN["auto"], verification="block")
    run(target, tiny.drafting(tiny.cousin(target, 3), 8), params, SHAPES[0])
    assert 'verification is "block", which is not exact for a tree' in caplog.text


def test_trees_of_drawn_tokens_get_deeper_where_first_siblings_are_accepted():
    target = tiny.tabular(0)
    twin = TabularModel(
        log_probs=target.log_probs, order=2, store=type(target.store)(4, tiny.MAX_CONTEXT, 64)
    )
    stranger = tiny.tabular(9, scale=4.0)
    shape = Tree(num_nodes=9, depth=7, width=4)
    depths = {}
    for name, model in (("twin", twin), ("stranger", stranger)):
        params = replace(DRAWN["auto"], max_tokens=60)
        _, seen = run(target, tiny.drafting(model, 8), params, shape, prompts=PROMPTS[:1])
        full = [p for p in seen.found if p.num_drafted == 9]
        depths[name] = [max(proposal.tree.depths) for proposal in full]
    assert depths["twin"][0] == depths["stranger"][0]
    assert max(depths["twin"]) > depths["twin"][0]
    assert sum(depths["stranger"]) < len(depths["stranger"]) * depths["stranger"][0]


def test_trees_that_share_the_targets_noise_are_raced_and_accepted_more_often():
    """The first sibling is the token of a coupled chain; the text is that of the seed alone."""
    target = tiny.tabular(0)
    draft = tiny.cousin(target, 3)
    seeded = WALKED["seeded"]
    shape = Tree(num_nodes=7, depth=3, width=3)
    found = {}
    for name, params in (("raced", seeded), ("ranked", replace(seeded, verification="walk"))):
        params = replace(params, max_tokens=80)
        texts, seen = run(target, tiny.drafting(draft, 8), params, shape)
        assert texts == plain(target, params)
        found[name] = sum(seen.accepted) / len(seen.accepted)
        choices = {proposal.choice for proposal in seen.found}
        assert choices == {Choice.COUPLED if name == "raced" else Choice.DETERMINISTIC}
    assert found["raced"] > found["ranked"]
    _, chains = run(target, tiny.drafting(draft, 8), seeded, Chain(num_tokens=3), prompts=[[1, 2]])
    _, trees = run(target, tiny.drafting(draft, 8), seeded, shape, prompts=[[1, 2]])
    assert trees.found[0].tokens[0] == chains.found[0].tokens[0]
