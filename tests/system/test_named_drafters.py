"""Suffix drafter and self-draft in the engine: no text changes, whatever they propose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests import natives, tiny

from forerun.control.base import Plan, Tree
from forerun.control.named import FixedController
from forerun.drafters.base import DraftRequest, Pause
from forerun.drafters.config import NamedDrafter, SuffixConfig
from forerun.drafters.registry import build_drafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.errors import InvalidRequest
from forerun.models.decoder import read_decoder
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.acceptance import AcceptanceCounts

pytestmark = pytest.mark.usefixtures("unchecked")

NUM_LAYERS = 3
PARAMS = (
    {"temperature": 0},
    {},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 0, "allowed_token_ids": (5, 9, 12)},
    {"temperature": 0.3, "presence_penalty": 0.4, "verification": "walk"},
)
REQUESTS = [
    (
        tiny.PROMPTS[index % len(tiny.PROMPTS)] * (1 + index % 2),
        SamplingParams(**{"seed": 7, "max_tokens": 14 + 5 * index, "ignore_eos": True} | changes),
    )
    for index, changes in enumerate(PARAMS)
]
CHEAP = SuffixConfig(step_cost=0, row_cost=0.01)
"""Drafts wherever anything can be copied."""

Texts = list[tuple[int, ...]]


def answers(engine: Engine, requests: Sequence[tuple[str, SamplingParams]] = REQUESTS) -> Texts:
    return answers_and_counts(engine, requests)[0]


def answers_and_counts(
    engine: Engine, requests: Sequence[tuple[str, SamplingParams]] = REQUESTS
) -> tuple[Texts, AcceptanceCounts]:
    outputs = engine.generate([text for text, _ in requests], [params for _, params in requests])
    counts = sum((o.completions[0].acceptance for o in outputs), AcceptanceCounts())
    return [output.token_ids for output in outputs], counts


@pytest.fixture(scope="module")
def network() -> Any:
    return tiny.network(num_layers=NUM_LAYERS)


@pytest.fixture(scope="module", params=["eager", "native", "graphs"])
def target(request: pytest.FixtureRequest, network: Any) -> Any:
    if request.param == "eager":
        return tiny.adapted(network)
    if request.param == "native":
        return natives.native_model(network)
    settings = network.config.to_dict()
    decoder = read_decoder(tiny.adapted(network).architecture, settings)
    return natives.run_by_torch(decoder, network.state_dict(), torch.float32)


@pytest.fixture(scope="module")
def expected(target: Any) -> Texts:
    return answers(tiny.engine_over(target))


@pytest.mark.covering
@pytest.mark.parametrize("k", [1, 8])
def test_copying_changes_no_text(target, expected, k):
    drafter = SuffixDrafter(CHEAP)
    engine = tiny.engine_over(target, drafter, k=k)
    found, counts = answers_and_counts(engine)
    assert found == expected
    assert [answers(engine, [request])[0] for request in REQUESTS] == expected
    assert counts.num_accepted > 0
    assert drafter._readers == {}
    assert target.store.num_free == 4


@pytest.mark.one_in(3)
@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["self", "recycling"])
@pytest.mark.parametrize(
    "shape", [Tree(num_nodes=7, depth=3, width=3), Tree(num_nodes=4, depth=1, width=4)], ids=str
)
def test_trees_change_no_text_on_any_runner(target, expected, name, shape):
    argument = "2" if name == "self" else ""
    drafter = build_drafter(NamedDrafter(name=name, argument=argument), target)
    engine = tiny.engine_over(
        target, drafter, k=7, controller=FixedController(shape, drafter.method)
    )
    shapes = Trees()
    engine.observers.append(shapes)
    assert answers(engine) == expected
    assert shapes.num_branching > 0
    assert target.store.num_free == 4


class Trees:
    """Counts proposals that branch."""

    is_required = True
    wants_logits = False

    def __init__(self) -> None:
        self.num_branching = 0

    def observe(self, step) -> None:
        self.num_branching += sum(not entry.tree.is_chain for entry in step.emitting)


@pytest.mark.covering
@pytest.mark.parametrize(("num_layers", "k"), [(1, 8), (2, 1), (2, 3)])
def test_the_first_layers_change_no_text(target, expected, num_layers, k):
    drafter = build_drafter(NamedDrafter(name="self", argument=str(num_layers)), target)
    engine = tiny.engine_over(target, drafter, k=k)
    found, counts = answers_and_counts(engine)
    assert found == expected
    assert [answers(engine, [request])[0] for request in REQUESTS] == expected
    assert counts.num_drafted > 0
    assert target.store.num_free == 4


@pytest.mark.covering
@pytest.mark.parametrize(
    "changes", [{"max_batch": 2, "prefill_chunk": 3}, {"max_step_rows": 16}, {"max_context": 64}]
)
def test_no_batch_changes_a_text(target, changes):
    plain = answers(tiny.engine_over(target, **changes))
    for drafter in (
        SuffixDrafter(CHEAP),
        build_drafter(NamedDrafter(name="self", argument="2"), target),
    ):
        assert answers(tiny.engine_over(target, drafter, **changes)) == plain


def test_all_but_the_last_layer_that_does_nothing_are_the_target(network):
    """Then every draft is accepted, so the rows it reads and writes are the right ones."""
    idle = tiny.network(num_layers=NUM_LAYERS)
    idle.load_state_dict(network.state_dict())
    last = idle.model.layers[-1]
    last.self_attn.o_proj.weight.zero_()
    last.mlp.down_proj.weight.zero_()
    target = natives.native_model(idle)
    drafter = build_drafter(NamedDrafter(name="self", argument="2"), target)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    outputs = tiny.engine_over(target, drafter, k=4).generate(list(tiny.PROMPTS), params)
    for output in outputs:
        acceptance = output.completions[0].acceptance
        assert acceptance.num_accepted == acceptance.num_drafted > 20


class Mistaken(SuffixDrafter):
    """Proposes other tokens than it found: possible ones, or `outside` the vocabulary."""

    def __init__(self, shift: int) -> None:
        super().__init__(CHEAP)
        self.shift = shift

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | Pause]:
        return [
            proposal
            if isinstance(proposal, Pause)
            else Proposal(
                tokens=proposal.tokens + self.shift, tree=proposal.tree, choice=proposal.choice
            )
            for proposal in super().propose(requests, plans)
        ]


@pytest.mark.covering
@pytest.mark.parametrize("shift", [1, 3, tiny.VOCAB_SIZE])
def test_wrong_copies_are_harmless(target, expected, shift):
    assert answers(tiny.engine_over(target, Mistaken(shift))) == expected


def test_who_had_to_give_way_drafts_on_in_its_new_place(target, caplog):
    changes = {"max_context": 64, "max_kv_tokens": 64 + 3}
    expected = answers(tiny.engine_over(target, **changes))
    drafter = build_drafter(NamedDrafter(name="self", argument="2"), target)
    engine = tiny.engine_over(target, drafter, **changes)
    outputs = engine.generate([text for text, _ in REQUESTS], [params for _, params in REQUESTS])
    assert [output.token_ids for output in outputs] == expected
    moved = [o.completions[0] for o in outputs if o.completions[0].num_preemptions]
    assert sum(completion.acceptance.num_drafted for completion in moved) > 0
    assert not caplog.records, "nobody was left to decode plainly"


@pytest.mark.covering
@pytest.mark.parametrize("name", ["suffix", "self:1"])
def test_an_aborted_request_leaves_nothing_and_can_start_again(target, expected, name):
    head, _, argument = name.partition(":")
    drafter = build_drafter(NamedDrafter(name=head, argument=argument), target)
    engine = tiny.engine_over(target, drafter)
    for num_steps in (1, 3, 6):
        for index, (text, params) in enumerate(REQUESTS):
            engine.add_request(text, params, request_id=f"r{index}")
        for _ in range(num_steps):
            engine.step()
        for index in range(len(REQUESTS)):
            engine.abort(f"r{index}")
        assert not engine.has_unfinished
        assert target.store.num_free == 4
    assert answers(engine) == expected


def test_plans_and_traces_say_who_drafted(target):
    for name in ("suffix", "self:1", "recycling"):
        head, _, argument = name.partition(":")
        drafter = build_drafter(NamedDrafter(name=head, argument=argument), target)
        engine = tiny.engine_over(target, drafter)
        records = []
        engine.observers[:] = [EmittedRecords(records.append)]
        engine.generate([tiny.PROMPTS[0]], SamplingParams(temperature=0, max_tokens=9))
        assert {r.method for r in records if r.k_budget} == {name}


@pytest.mark.parametrize("argument", ["", "0", "3", "-1", "x", "1.5"])
def test_impossible_layers_are_refused(target, argument):
    with pytest.raises(InvalidRequest, match=f"self:{argument}"):
        build_drafter(NamedDrafter(name="self", argument=argument), target)


def test_models_without_layers_have_no_self_draft():
    with pytest.raises(InvalidRequest, match="TabularModel"):
        build_drafter(NamedDrafter(name="self", argument="1"), tiny.tabular())


@pytest.mark.parametrize("name", ["suffix", "recycling"])
def test_a_drafter_without_argument_refuses_one(target, name):
    with pytest.raises(InvalidRequest, match=f"{name}:9: this drafter takes no argument"):
        build_drafter(NamedDrafter(name=name, argument="9"), target)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_every_family_drafts_with_its_first_layers(family):
    target = tiny.adapted(tiny.network(family, num_layers=2))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain = tiny.engine_over(target).generate(list(tiny.PROMPTS), params)
    drafter = build_drafter(NamedDrafter(name="self", argument="1"), target)
    drafted = tiny.engine_over(target, drafter).generate(list(tiny.PROMPTS), params)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]
    assert sum(o.completions[0].acceptance.num_drafted for o in drafted) > 0
    assert target.num_parameters > drafter.model.num_parameters
