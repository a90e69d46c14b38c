"""Requests that come, go and are called off at random, against each of them recomputed alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests import tiny
from tests.naive import naive_tokens
from tests.tabular import TabularModel

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState, Tree
from forerun.drafters.config import SuffixConfig
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.recycling import RecyclingDrafter
from forerun.drafters.registry import SeveralDrafters
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord
from forerun.theory.splitmix import finalise

VOCAB_SIZE = 6
NUM_SLOTS = 3
MAX_NEW = 14

pytestmark = pytest.mark.usefixtures("unchecked")

prompts = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=9).map(tuple)
sampling = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    seed=st.integers(0, 5),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, MAX_NEW),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (4,)]),
    top_k=st.sampled_from([0, 3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    verification=st.sampled_from(["auto", "walk", "block", "token", "traversal"]),
)


def laws() -> tuple[TabularModel, TabularModel]:
    target = tiny.tabular(0, vocab_size=VOCAB_SIZE, num_slots=NUM_SLOTS)
    return target, tiny.cousin(target, 5)


class Traffic(RuleBasedStateMachine):
    """Requests in an engine with three places, prompts fed three tokens at a time."""

    def __init__(self, *, with_draft: bool) -> None:
        super().__init__()
        self.target, self.draft = laws()
        self.engine = self.new_engine(with_draft)
        self.live: dict[str, tuple[tuple[int, ...], SamplingParams]] = {}
        self.streamed: dict[tuple[str, int], tuple[int, ...]] = {}

    def new_engine(self, with_draft: bool) -> Engine:
        drafter = DraftModel(self.draft, VOCAB_SIZE) if with_draft else None
        sizes = {"k": 4, "max_batch": NUM_SLOTS, "prefill_chunk": 3, "max_step_rows": 15}
        return tiny.engine_over(self.target, drafter, **sizes)

    @rule(prompt=prompts, params=sampling)
    def add(self, prompt: tuple[int, ...], params: SamplingParams) -> None:
        self.live[self.engine.add_request(list(prompt), params)] = (prompt, params)

    @rule(num_steps=st.integers(1, 4))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step_once()

    def step_once(self) -> None:
        for chunk in self.engine.step():
            assert chunk.request_id in self.live
            sample = (chunk.request_id, chunk.index)
            self.streamed[sample] = self.streamed.get(sample, ()) + chunk.token_ids

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.live)))
        self.engine.abort(request_id)
        del self.live[request_id]

    @invariant()
    def slots_held_are_those_of_running_sequences(self) -> None:
        num_running = len(self.engine.scheduler.running)
        assert self.target.store.num_free == NUM_SLOTS - num_running
        assert self.draft.store.num_free >= NUM_SLOTS - num_running

    def teardown(self) -> None:
        """Let everything finish, and compare."""
        while self.engine.has_unfinished:
            self.step_once()
        for request_id, (prompt, params) in self.live.items():
            self.check(request_id, prompt, params)
        assert self.target.store.num_free == NUM_SLOTS
        assert self.draft.store.num_free == NUM_SLOTS

    def check(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        output = self.engine.take_output(request_id)
        assert output.prompt_token_ids == prompt
        assert [completion.index for completion in output.completions] == list(range(params.n))
        for completion in output.completions:
            assert completion.token_ids == self.streamed[request_id, completion.index]
            assert completion.acceptance.num_steps <= len(completion.token_ids)
        found = [completion.token_ids for completion in output.completions]
        if params.greedy or params.verification in ("auto", "walk"):
            assert found == [
                naive_tokens(laws()[0], prompt, params, index) for index in range(params.n)
            ]
        else:
            # The block and token rules reproduce a text for the same draft and K.
            (alone,) = self.engine.generate([list(prompt)], params)
            assert found == [completion.token_ids for completion in alone.completions]


@pytest.mark.parametrize("with_draft", [True, False], ids=["drafted", "plain"])
def test_traffic_changes_no_text_and_leaks_no_slot(with_draft):
    run_state_machine_as_test(
        partial(Traffic, with_draft=with_draft),
        settings=settings(max_examples=25 if with_draft else 8, stateful_step_count=14),
    )


METHODS = ("draft_model", "recycling", "suffix")


class RandomShapes(Controller):
    """Plans chains, trees and drafters by the number of tokens that requests have."""

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> Decision:
        return Decision(
            [self.plan(finalise(state.num_committed + 97 * len(states))) for state in states]
        )

    def plan(self, bits: int) -> Plan:
        num_nodes, depth, width = 1 + bits % 7, 1 + (bits >> 8) % 5, 1 + (bits >> 16) % 4
        if (bits >> 24) % 4 == 0:
            return Plan.chain("draft_model", num_nodes)
        shape = Tree(num_nodes=num_nodes, depth=depth, width=width)
        return Plan(method=METHODS[(bits >> 32) % len(METHODS)], shape=shape)

    def observe(self, records: Sequence[StepRecord]) -> None:
        """Nothing is learnt."""


class TreeTraffic(Traffic):
    """The same with trees of several drafters, and room for about one sequence and a half."""

    def new_engine(self, with_draft: bool) -> Engine:
        drafters = {
            "draft_model": DraftModel(self.draft, VOCAB_SIZE),
            "recycling": RecyclingDrafter(),
            "suffix": SuffixDrafter(SuffixConfig(step_cost=0, row_cost=0)),
        }
        sizes = {"k": 7, "max_batch": NUM_SLOTS, "prefill_chunk": 3, "max_step_rows": 24}
        memory = {"max_context": 24, "max_kv_tokens": 31}
        return tiny.engine_over(
            self.target,
            SeveralDrafters(drafters),
            controller=RandomShapes(),
            **sizes,
            **memory,
        )

    def check(self, request_id: str, prompt: tuple[int, ...], params: SamplingParams) -> None:
        if params.greedy or params.verification in ("auto", "walk"):
            super().check(request_id, prompt, params)
            return
        # Drawn trees follow the distribution; their text depends on the shapes of the steps.
        output = self.engine.take_output(request_id)
        for completion in output.completions:
            assert completion.token_ids == self.streamed[request_id, completion.index]
            assert 0 < len(completion.token_ids) <= params.max_tokens


def test_traffic_of_trees_changes_no_text_and_leaks_no_slot():
    run_state_machine_as_test(
        partial(TreeTraffic, with_draft=True),
        settings=settings(max_examples=25, stateful_step_count=14),
    )
