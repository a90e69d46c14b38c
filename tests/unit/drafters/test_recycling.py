"""Token recycling: what the table holds, whose it is, and that its trees change no text."""

from __future__ import annotations

import pytest
from tests import tiny
from tests.unit.drafters.test_draft_trees import PROMPTS, SHAPES, WALKED, Proposals, Shapes, plain
from tests.unit.drafters.test_suffix import asked

from forerun.control.base import Chain, Plan, Tree
from forerun.drafters.base import Drafter, StepOutcome
from forerun.drafters.config import NamedDrafter
from forerun.drafters.recycling import MAX_SCOPES, RecyclingDrafter
from forerun.drafters.registry import SeveralDrafters, build_drafter
from forerun.errors import InvalidRequest
from forerun.sampling.proposal import TokenSource, Verdict
from forerun.testing.conformance import check_drafter

pytestmark = pytest.mark.usefixtures("unchecked")


def test_it_is_a_drafter_of_trees_that_reads_top_tokens():
    drafter = RecyclingDrafter()
    assert isinstance(drafter, Drafter)
    assert drafter.max_width > 1
    assert drafter.required_top_k


def step_of(request, *tokens: int, top_tokens: dict[int, list[int]]) -> StepOutcome:
    sources = (TokenSource.RECOVERED,) * len(tokens)
    verdict = Verdict(path=(), tokens=tokens, sources=sources, expected_accepted=0.0)
    return StepOutcome(
        request=request, first_row=0, num_rows=1, verdict=verdict, top_tokens=top_tokens
    )


def test_trees_are_paths_through_the_table():
    drafter, request = RecyclingDrafter(), asked([4, 1])
    drafter.observe([step_of(request, 1, top_tokens={1: [2, 3], 2: [5, 6], 3: [7]})])
    shape = Tree(num_nodes=4, depth=2, width=2)
    (proposal,) = drafter.propose([request], [Plan(method="recycling", shape=shape)])
    assert proposal.tokens.tolist() == [2, 5, 6, 3] or proposal.tokens.tolist() == [2, 5, 3, 7]
    (chain,) = drafter.propose([request], [Plan(method="recycling", shape=Chain(num_tokens=5))])
    assert chain.tokens.tolist() == [2, 5]
    assert chain.tree.is_chain


def test_tokens_of_the_prompt_begin_with_their_latest_successors():
    drafter, request = RecyclingDrafter(), asked([1, 2, 1, 3, 1])
    drafter.observe([StepOutcome(request=request, first_row=0, num_rows=4)])
    shape = Tree(num_nodes=2, depth=1, width=2)
    (proposal,) = drafter.propose([request], [Plan(method="recycling", shape=shape)])
    assert proposal.tokens.tolist() == [3, 2]


def test_a_token_that_was_never_seen_is_decoded_plainly():
    plan = Plan(method="recycling", shape=Tree(num_nodes=2, depth=1, width=2))
    assert RecyclingDrafter().propose([asked([1])], [plan]) == [None]


def test_ranks_that_are_hit_count_for_more():
    drafter, request = RecyclingDrafter(), asked([1])
    shape = Tree(num_nodes=2, depth=2, width=2)
    table = {1: [2, 3], 2: [4], 3: [5]}
    drafter.observe([step_of(request, top_tokens=table)])
    plan = Plan(method="recycling", shape=shape)
    (before,) = drafter.propose([request], [plan])
    for _ in range(300):  # the second rank is right
        drafter.observe([step_of(asked([1, 3]), 3, top_tokens={})])
        drafter._own["r"] = dict(table)
        drafter.observe([step_of(asked([1, 3]), 3, top_tokens={})])
    (after,) = drafter.propose([request], [plan])
    assert before.tree.parents == (-1, 0)
    assert after.tree.parents == (-1, -1)


def test_tables_are_kept_by_scope_and_dropped_with_requests_that_have_none():
    drafter = RecyclingDrafter()
    plan = Plan(method="recycling", shape=Tree(num_nodes=1, depth=1, width=2))
    drafter.observe([step_of(asked([1], name="a"), top_tokens={1: [2]})])
    drafter.forget("a")
    assert drafter.propose([asked([1], name="a")], [plan]) == [None]
    drafter.observe([step_of(asked([1], name="a", scope="s"), top_tokens={1: [2]})])
    drafter.forget("a")
    (shared,) = drafter.propose([asked([1], name="b", scope="s")], [plan])
    assert shared.tokens.tolist() == [2]
    for index in range(MAX_SCOPES):
        drafter.propose([asked([1], name="c", scope=f"s{index}")], [plan])
    assert drafter.propose([asked([1], name="b", scope="s")], [plan]) == [None]


@pytest.mark.parametrize("params", WALKED.values(), ids=WALKED)
@pytest.mark.parametrize("with_suffix", [False, True])
def test_its_trees_change_no_text_and_are_accepted(params, with_suffix):
    target = tiny.tabular(0)
    expected = plain(target, params)
    drafter: Drafter = RecyclingDrafter()
    if with_suffix:
        drafter = SeveralDrafters({"draft_model": drafter})
    engine = tiny.engine_over(target, drafter, k=9, controller=Shapes(*SHAPES))
    seen = Proposals()
    engine.observers.append(seen)
    assert [output.token_ids for output in engine.generate(PROMPTS, params)] == expected
    assert any(not proposal.tree.is_chain for proposal in seen.found)
    assert sum(seen.accepted) > 0


def test_the_table_holds_what_the_target_finds_likely():
    target = tiny.tabular(0, order=1)
    drafter = RecyclingDrafter()
    engine = tiny.engine_over(
        target, drafter, k=9, controller=Shapes(Tree(num_nodes=9, depth=2, width=3))
    )
    engine.add_request([1, 2], WALKED["greedy"])
    for _ in range(12):
        engine.step()
    (table,) = [*drafter._own.values(), *drafter._shared.values()]
    known = {token: likely for token, likely in table.items() if len(likely) == 8}
    assert len(known) > 3
    for token, likely in known.items():
        assert likely == target.probs([token]).topk(8).indices.tolist()


def test_it_is_found_by_name_and_keeps_the_contract():
    target = tiny.adapted(tiny.network())
    built = build_drafter(NamedDrafter(name="recycling"), target)
    assert built.method == "recycling"
    with pytest.raises(InvalidRequest, match="recycling:3"):
        build_drafter(NamedDrafter(name="recycling", argument="3"), target)
    check_drafter(RecyclingDrafter, target, tiny.tokenizer(), max_tokens=12, num_sampled=2)
