"""What an engine tells its controller, and what it does with plans that go too far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.control.base import Controller, Decision, Plan, Tree
from forerun.control.goodput import GoodputController
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.config import SuffixConfig
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.loading import default_controller
from forerun.engine.observing import EmittedRecords
from forerun.engine.step import StepClock
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Choice, Proposal
from forerun.theory.tree import TokenTree

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


class PlansTrees(Controller):
    """Plans a tree for every request."""

    def __init__(self, shape: Tree) -> None:
        self.plan = Plan(method="draft_model", shape=shape)

    def decide(self, states, capacity):
        return Decision([self.plan] * len(states))

    def observe(self, records):
        pass


class Bushy(Drafter):
    """Proposes a tree of the largest shape that its plan allows, and keeps the plans."""

    method = "draft_model"
    required_features: tuple[int, ...] = ()

    def __init__(self, excess: int = 0) -> None:
        self.excess = excess
        self.plans: list[Plan] = []

    def propose(self, requests, plans):
        self.plans += plans
        return [self.tree(plan.shape) for plan in plans]

    def tree(self, shape: Tree) -> Proposal:
        parents: list[int] = []
        for level in range(shape.depth + self.excess):
            parents += [-1 if level == 0 else (level - 1) * shape.width] * shape.width
        parents = parents[: shape.num_nodes]
        tokens = torch.arange(len(parents)) % 8
        return Proposal(tokens=tokens, tree=TokenTree(tuple(parents)), choice=Choice.DETERMINISTIC)

    def observe(self, outcomes):
        pass

    def forget(self, request_id):
        pass


@pytest.mark.parametrize(
    "shape", [Tree(num_nodes=6, depth=3, width=2), Tree(num_nodes=90, depth=90, width=1)]
)
def test_a_plan_for_a_tree_is_cut_to_the_room_there_is(target, shape):
    expected = tiny.engine_over(target).generate([[1, 2], [3]], PARAMS)
    drafter = Bushy()
    engine = tiny.engine_over(target, drafter, k=6, controller=PlansTrees(shape))
    found = engine.generate([[1, 2], [3]], PARAMS)
    assert [o.token_ids for o in found] == [o.token_ids for o in expected]
    assert all(o.completions[0].acceptance.num_drafted for o in found)
    for plan in drafter.plans:
        assert plan.shape.num_nodes <= EngineConfig().max_tree_nodes
        assert plan.shape.depth <= 7


def test_a_tree_deeper_than_planned_is_not_verified(target, caplog):
    engine = tiny.engine_over(
        target, Bushy(excess=1), k=6, controller=PlansTrees(Tree(num_nodes=6, depth=2, width=2))
    )
    (output,) = engine.generate([[1, 2]], PARAMS)
    assert output.completions[0].acceptance.num_drafted == 0
    assert "a tree of depth 3 and width 2, but the plan allows depth 2" in caplog.text


class Listening(Controller):
    """Notes what it is told; plans more than there is room for."""

    def __init__(self) -> None:
        self.states = []
        self.records = []

    def decide(self, states, capacity):
        self.states += states
        return Decision([Plan.chain("draft_model", 50)] * len(states))

    def observe(self, records):
        self.records += records


@pytest.fixture
def listening(target, draft):
    controller = Listening()
    engine = tiny.engine_over(
        tiny.tabular(0, vocab_size=300, order=1),
        tiny.drafting(tiny.tabular(0, vocab_size=300, order=1)),
        controller=controller,
    )
    return engine, controller


def test_requests_are_described(listening):
    engine, controller = listening
    terms = RequestTerms(tags=("code", "de"))
    engine.generate([[1, 2]], replace(PARAMS, temperature=0.7, seed=1), terms)
    first = controller.states[0]
    assert first.tags == ("code", "de")
    assert first.temperature == 0.7
    lengths = [state.num_committed for state in controller.states]
    assert lengths == sorted(lengths)


def test_requests_without_tags_have_none(listening):
    engine, controller = listening
    engine.generate([[1, 2]], PARAMS)
    first = controller.states[0]
    assert first.tags == ()


class Resting(Listening):
    """Plans nothing for some steps, of which it needs the first alone."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.rests = []

    def decide(self, states, capacity):
        self.states += states
        return Decision([Plan()] * len(states), self.num_steps, is_observed=False)

    def skip(self, num_steps, seconds):
        self.rests.append((num_steps, seconds))


@pytest.mark.parametrize(("num_rest", "num_asked"), [(-2, 12), (0, 12), (1, 12), (4, 3), (100, 1)])
def test_a_controller_that_rests_is_neither_asked_nor_told(target, num_rest, num_asked):
    controller = Resting(num_rest)
    engine = tiny.engine_over(target, Bushy(), controller=controller)
    records = []
    engine.observers.append(EmittedRecords(records.append))
    engine.generate([[1, 2]], replace(PARAMS, max_tokens=13))
    assert len(controller.states) == num_asked
    assert len(controller.records) == num_asked + 1  # and the step that ended the prompt
    assert len(records) == 13
    # A rest is reported before the next decision, with the seconds of its steps.
    assert [count for count, _ in controller.rests] == [3, 3] * (num_rest == 4)
    of_three = pytest.approx(3 * sum(StepClock.durations(None)))
    assert all(seconds == of_three for _, seconds in controller.rests)


def test_a_rest_ends_where_other_requests_run(target):
    controller = Resting(100)
    engine = tiny.engine_over(target, Bushy(), controller=controller)
    engine.add_request([1, 2], replace(PARAMS, max_tokens=20))
    for _ in range(4):
        engine.step()
    assert len(controller.states) == 1
    engine.add_request([3], PARAMS)
    for _ in range(3):
        engine.step()
    assert len(controller.states) > 1


def test_a_rest_ends_where_one_request_takes_the_place_of_another(target):
    controller = Resting(100)
    engine = tiny.engine_over(target, Bushy(), controller=controller)
    first = engine.add_request([1, 2], replace(PARAMS, max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.abort(first)
    second = engine.add_request([3], PARAMS)
    for _ in range(3):
        engine.step()
    assert {state.request_id for state in controller.states} == {first, second}


def test_a_rest_that_ended_does_not_go_on_where_the_other_request_has_gone(target):
    controller = Resting(100)
    engine = tiny.engine_over(target, Bushy(), controller=controller)
    engine.add_request([1, 2], replace(PARAMS, max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.add_request([3, 4], replace(PARAMS, max_tokens=1))
    for _ in range(4):
        engine.step()
    # Once at the beginning, once beside the other request, and once without it.
    assert len(controller.states) == 3


class Reading(Bushy):
    """Keeps what it is told, and drafts when its controller says so."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int]] = []

    def observe(self, outcomes):
        self.rows += [(o.first_row, o.num_rows) for o in outcomes]


class EveryFifth(Listening):
    def decide(self, states, capacity):
        self.states += states
        tree = Plan(method="draft_model", shape=Tree(num_nodes=2, depth=2, width=1))
        return Decision([Plan() if len(self.states) % 5 else tree] * len(states))


def test_a_drafter_is_told_of_plain_steps_before_its_next_draft(target):
    drafter = Reading()
    engine = tiny.engine_over(target, drafter, controller=EveryFifth())
    engine.generate([[1, 2, 3]], replace(PARAMS, max_tokens=16))
    assert drafter.rows[0] == (0, 3)
    assert drafter.rows[1] == (3, 4)  # four plain steps in one
    ends = [first + num for first, num in drafter.rows]
    assert [first for first, _ in drafter.rows] == [0, *ends[:-1]]


class Learning(Reading):
    """Learns from the target's most likely tokens, which are not kept for later."""

    required_top_k = 2


def test_a_drafter_that_learns_from_top_tokens_is_told_of_every_plain_step(target):
    drafter = Learning()
    engine = tiny.engine_over(target, drafter, controller=EveryFifth())
    engine.generate([[1, 2, 3]], replace(PARAMS, max_tokens=16))
    assert drafter.rows[:5] == [(0, 3), (3, 1), (4, 1), (5, 1), (6, 1)]


def test_a_request_without_speculation_is_decoded_plainly_beside_others(target):
    drafter = Bushy()
    engine = tiny.engine_over(target, drafter, controller=PlansTrees(Tree.of_nodes(3)))
    names = [
        engine.add_request([1, 2], PARAMS, terms=RequestTerms(speculation=choice))
        for choice in ("off", "auto")
    ]
    while engine.has_unfinished:
        engine.step()
    off, on = map(engine.take_output, names)
    assert off.token_ids == on.token_ids
    assert off.completions[0].acceptance.num_drafted == 0 < on.completions[0].acceptance.num_drafted


@pytest.mark.parametrize(
    "wrong", [{"speculation": "no"}, {"speculation": "off", "plan": Plan.chain("d", 2)}]
)
def test_speculation_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(InvalidRequest, match="speculation is"):
        RequestTerms(**wrong)


def test_no_plan_goes_beyond_the_engines_k(listening):
    engine, controller = listening
    engine.generate([[1, 2]], PARAMS)
    assert max(record.k_budget for record in controller.records) == 3
    assert max(record.num_drafted for record in controller.records) == 3


def test_controllers_nobody_knows_are_refused():
    with pytest.raises(InvalidRequest, match="controller 'best' is unknown; use auto"):
        EngineConfig(controller="best")


def test_the_default_is_safe_without_costs(draft):
    ours = default_controller(EngineConfig(num_speculative_tokens=6), tiny.drafting(draft, 8), {})
    assert isinstance(ours, GoodputController)
    assert ours.max_k == 6


def test_the_controller_knows_which_drafters_read_the_prompt(draft):
    drafters = {
        "draft_model": tiny.drafting(draft, 8),
        "self": SelfDraft(draft, 8),
        "suffix": SuffixDrafter(SuffixConfig()),
    }
    ours = default_controller(EngineConfig(), SeveralDrafters(drafters), {})
    assert isinstance(ours, GoodputController)
    reading = [method for method, traits in ours.costs.traits.items() if traits.reads_text]
    assert reading == ["draft_model"]


def test_without_a_draft_there_is_nothing_to_control():
    ours = default_controller(EngineConfig(controller="auto"), None, {})
    assert isinstance(ours, FixedController)


def test_a_draft_without_a_law_teaches_nothing_and_costs_no_token(target):
    sound = tiny.cousin(target, 5)
    law = sound.log_probs.clone()
    law[::3] = torch.nan
    sick = TabularModel(log_probs=law, order=sound.order, store=sound.store)
    engine = tiny.engine_over(target, tiny.drafting(sick, 8), k=5, controller=FixedController(5))
    params = replace(PARAMS, max_tokens=40)
    plain = tiny.engine_over(target).generate([[1, 2], [3, 4]], params)
    outputs = engine.generate([[1, 2], [3, 4]], params)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
