"""Plans with the shape of a tree: refusals by name, records of the accepted path, the tree view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from tests import tiny
from tests.tabular import TabularModel

from forerun.cli.generate import TreeView
from forerun.control.base import Capacity, Chain, Controller, Decision, Plan, RequestState, Tree
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter, DraftRequest, StepOutcome
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.loading import default_controller
from forerun.engine.observing import EmittedRecords
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree

pytestmark = pytest.mark.usefixtures("unchecked")

SHAPE = Tree(num_nodes=4, depth=2, width=3)
STATE = RequestState(request_id="r", num_committed=9, max_new=50, temperature=0.0)
GREEDY = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)


class SecondBest(Drafter):
    """Proposes the three best tokens after the text, the best one last, and one node below it."""

    method = "second_best"
    required_features: tuple[int, ...] = ()
    max_width = 3

    def __init__(self, target: TabularModel) -> None:
        self.target = target

    def propose(self, requests: Sequence[DraftRequest], plans: Sequence[Plan]) -> list[Proposal]:
        return [
            self.tree(list(request.ids), plan)
            for request, plan in zip(requests, plans, strict=True)
        ]

    def tree(self, ids: list[int], plan: Plan) -> Proposal:
        first = self.best(ids, 3)
        tokens, parents = [first[1], first[2], first[0]], [-1, -1, -1]
        if plan.num_speculative_tokens > 3 and plan.shape.depth > 1:
            tokens += self.best([*ids, first[0]], 1)
            parents.append(2)
        num = plan.num_speculative_tokens
        return Proposal(
            tokens=torch.tensor(tokens[:num]),
            tree=TokenTree(tuple(parents[:num])),
            choice=Choice.DETERMINISTIC,
        )

    def best(self, ids: list[int], num: int) -> list[int]:
        return self.target.log_probs[self.target.state_of(ids)].topk(num).indices.tolist()

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing is kept."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


def engine_with_tree(target: TabularModel) -> Engine:
    plain = tiny.engine_over(target, k=SHAPE.num_nodes)
    drafter = SecondBest(target)
    assert drafter.max_width > 1
    config = replace(plain.config, tree=SHAPE, controller="auto")
    controller = default_controller(config, drafter, {})
    return plain.with_draft(drafter, controller=controller)


def test_a_tree_in_the_settings_is_the_shape_of_every_draft(target):
    engine = engine_with_tree(target)
    assert isinstance(engine.controller, FixedController)
    records: list[StepRecord] = []
    view = TreeView(engine.tokenizer)
    engine.observers[:] = [EmittedRecords(records.append), view]
    (plain,) = tiny.engine_over(target).generate([[1, 2]], GREEDY)
    (found,) = engine.generate([[1, 2]], GREEDY)
    assert found.token_ids == plain.token_ids
    full = [record for record in records if record.num_drafted == 4]
    assert {record.path_ranks for record in full} == {(3, 1)}
    assert {record.path_children for record in full} == {(3, 1, 0)}
    assert {(record.depth_drafted, record.num_accepted) for record in full} == {(2, 2)}
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view.kept)
    shown = capture.get()
    assert shown.count("accepted") == 2 + 1  # two nodes and the title
    assert "4 nodes, depth 2, 2 accepted" in shown
    assert "bonus" in shown


def test_steps_without_a_tree_have_no_path(target):
    records: list[StepRecord] = []
    engine = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5), 8))
    engine.observers[:] = [EmittedRecords(records.append)]
    engine.generate([[1, 2]], GREEDY)
    assert {(record.path_ranks, record.path_children) for record in records} == {(None, None)}


def test_without_a_draft_the_view_has_nothing_to_show(target):
    engine = tiny.engine_over(target)
    view = TreeView(engine.tokenizer)
    engine.observers[:] = [view]
    engine.generate([[1, 2]], GREEDY)
    assert "no step drafted" in str(view.kept)


def test_a_tree_is_refused_for_a_drafter_of_chains(target):
    config = EngineConfig(tree=SHAPE)
    drafter = SecondBest(target)
    drafter.max_width = 1
    with pytest.raises(InvalidRequest, match="second_best proposes chains only"):
        default_controller(config, drafter, {})


@pytest.mark.parametrize("verification", ["block", "token"])
def test_a_verifier_of_chains_is_refused_where_every_draft_is_a_tree(target, verification):
    config = EngineConfig(tree=SHAPE, max_context=64)
    engine = Engine(
        target=target,
        tokenizer=tiny.tokenizer(),
        drafter=SecondBest(target),
        config=config,
        eos_token_ids=frozenset(),
    )
    with pytest.raises(InvalidRequest, match=f'"{verification}", which takes chains only'):
        engine.add_request([1, 2], SamplingParams(verification=verification))


def test_a_fixed_tree_counts_its_nodes():
    assert EngineConfig(tree=SHAPE, num_speculative_tokens=1).max_nodes == 4


def test_trees_of_a_controller_have_more_nodes_than_a_chain_as_far_as_passes_have_room():
    assert EngineConfig(num_speculative_tokens=4).max_nodes == 16
    assert EngineConfig(num_speculative_tokens=4, max_tree_nodes=7).max_nodes == 7
    assert EngineConfig(num_speculative_tokens=4, max_tree_nodes=0).max_nodes == 4
    assert EngineConfig(num_speculative_tokens=20).max_nodes == 20
    assert EngineConfig(num_speculative_tokens=0).max_nodes == 0
    assert EngineConfig(max_batch=8, max_step_rows=80).max_nodes == 9
    assert EngineConfig(max_context=64, max_kv_tokens=72).max_nodes == 8
    with pytest.raises(InvalidRequest, match="max_tree_nodes"):
        EngineConfig(max_tree_nodes=-1)


def test_chains_are_cut_to_k_and_trees_to_the_most_nodes(target):
    class Alternating(Controller):
        """Plans more than there may be, chains and trees in turns."""

        num_decisions = 0

        def decide(self, states, capacity):
            self.num_decisions += 1
            shape = Chain(num_tokens=9)
            if self.num_decisions % 2:
                shape = Tree(num_nodes=9, depth=2, width=4)
            return Decision([Plan(method="draft_model", shape=shape)] * len(states))

        def observe(self, records):
            pass

    records: list[StepRecord] = []
    config = EngineConfig(num_speculative_tokens=2, max_tree_nodes=6, max_context=64, max_batch=2)
    engine = Engine(
        target=target,
        tokenizer=tiny.tokenizer(),
        drafter=tiny.drafting(tiny.cousin(target, 5), 8),
        controller=Alternating(),
        config=config,
        eos_token_ids=frozenset(),
    )
    engine.observers[:] = [EmittedRecords(records.append)]
    engine.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=24, ignore_eos=True))
    chains = {record.num_drafted for record in records if record.path_children is None}
    trees = {record.num_drafted for record in records if record.path_children is not None}
    assert max(chains) == 2
    assert max(trees) == 6


def test_the_first_of_several_drafters_drafts_the_tree(target):
    config = EngineConfig(tree=SHAPE)
    drafters = {"draft_model": tiny.drafting(tiny.cousin(target, 5), 8), "suffix": SuffixDrafter()}
    controller = default_controller(config, SeveralDrafters(drafters), {})
    (plan,) = controller.decide([STATE], Capacity(max_rows=64)).plans
    assert plan == Plan(method="draft_model", shape=SHAPE)
    reverse = dict(reversed(drafters.items()))
    with pytest.raises(InvalidRequest, match="the drafter suffix proposes chains only"):
        default_controller(config, SeveralDrafters(reverse), {})


@pytest.mark.parametrize(
    ("text", "shape"),
    [("7", (7, 3, 4)), ("1", (1, 1, 4)), ("4", (4, 3, 4)), ("15,3,2", (15, 3, 2))],
)
def test_a_tree_is_written_as_nodes_depth_and_width(text, shape):
    tree = Tree.parse(text)
    assert (tree.num_nodes, tree.depth, tree.width) == shape
    assert Tree.parse(str(tree)) == tree


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("7,3", "NODES,DEPTH,WIDTH"),
        ("x", "NODES,DEPTH,WIDTH"),
        ("", "NODES,DEPTH,WIDTH"),
        ("0", "num_nodes 0"),
        ("7,0,2", "depth 0"),
        ("7,2,-1", "width -1"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused_by_name(text, problem):
    with pytest.raises(InvalidRequest, match=problem):
        Tree.parse(text)
