"""Stop rules in every path that drafts: the chain without a rule, ended by a distribution before a
draw."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.natives import native_model
from tests.tabular import TabularModel

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.models.base import WrappedModel
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.proposal import Choice, Proposal, TokenSource, Verdict
from forerun.theory.stop_rule import StopRule

pytestmark = pytest.mark.usefixtures("unchecked")

K = 6
KINDS = {
    "greedy": (SamplingParams(temperature=0), False),
    "sampled": (SamplingParams(temperature=1.2), False),
    "coupled": (SamplingParams(temperature=1.2), True),
    "penalised": (SamplingParams(repetition_penalty=1.3), False),
}
MEASURES = ("entropy", "top_probability")


def asked(name: str, ids: list[int], vocab_size: int, request_id: str = "r") -> DraftRequest:
    params, coupled = KINDS[name]
    history = History.of(params, ids, vocab_size=vocab_size) if params.needs_history else None
    return DraftRequest(
        request_id=request_id,
        ids=list(ids),
        num_prompt=len(ids),
        params=params,
        noise_key=1234,
        history=history,
        coupled=coupled,
    )


def plan(rule: StopRule | None, k: int = K) -> Plan:
    return Plan.chain("draft_model", k, stop=rule)


def drafted(drafter: DraftModel, request: DraftRequest, rule: StopRule | None) -> Proposal:
    (proposal,) = drafter.propose([request], [plan(rule)])
    assert proposal is not None
    return proposal


def measured(measure: str, probs: torch.Tensor) -> float:
    if measure == "entropy":
        return float(torch.special.entr(probs).sum())
    return float(probs.max())


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", ["greedy", "sampled", "coupled"])
@settings(max_examples=30)
@given(share=st.floats(0.0, 1.0), start=st.integers(0, 7))
def test_a_chain_ends_before_the_first_node_its_rule_leaves_out(name, measure, share, start):
    model = tiny.tabular(3)
    threshold = share * (2.0 if measure == "entropy" else 1.0)
    rule = StopRule(measure=measure, threshold=threshold)
    whole = drafted(DraftModel(model, 8), asked(name, [start, 2], 8), None)
    ended = drafted(DraftModel(tiny.tabular(3), 8), asked(name, [start, 2], 8), rule)

    temperature = 1.2 if name != "greedy" else 1.0
    values = []
    for node in range(K):
        logits = model.probs([start, 2, *whole.tokens[:node].tolist()]).log()
        values.append(measured(measure, (logits / temperature).softmax(-1)))
    length = next((n for n in range(1, K) if rule.stops(values[n])), K)

    assert ended.tokens.tolist() == whole.tokens[:length].tolist()
    assert ended.stop_reason == ("stop_rule" if length < K else "budget")
    assert ended.stop_values == pytest.approx(values[:length], abs=1e-5)
    if ended.draft_probs is not None:
        assert torch.equal(ended.draft_probs, whole.draft_probs[:length])


def test_without_a_rule_nothing_is_measured():
    proposal = drafted(DraftModel(tiny.tabular(3), 8), asked("sampled", [1, 2], 8), None)
    assert proposal.stop_values is None


def test_the_first_node_is_always_drafted():
    never = StopRule(measure="top_probability", threshold=1.0)
    proposal = drafted(DraftModel(tiny.tabular(3), 8), asked("sampled", [1, 2], 8), never)
    assert proposal.num_drafted == 1


@pytest.fixture(scope="module")
def network():
    return tiny.network()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=20)
@given(share=st.floats(0.0, 1.0), ids=st.lists(st.integers(1, 299), min_size=1, max_size=20))
def test_kernels_stop_where_torch_does(network, name, measure, share, ids):
    rule = StopRule(measure=measure, threshold=share * (5.0 if measure == "entropy" else 1.0))
    model = native_model(network)
    request = asked(name, ids, tiny.VOCAB_SIZE)
    fused = drafted(tiny.drafting(model), request, rule)
    levels = drafted(tiny.drafting(WrappedModel(native_model(network))), request, rule)
    near = [abs(v - rule.threshold) < 1e-4 for v in levels.stop_values + fused.stop_values]
    if any(near):
        return
    assert fused.tokens.tolist() == levels.tokens.tolist()
    assert fused.stop_values == pytest.approx(levels.stop_values, abs=1e-4)
    assert fused.stop_reason == levels.stop_reason
    assert fused.choice is levels.choice


@pytest.mark.parametrize(
    "names",
    [("greedy", "sampled"), ("greedy", "coupled"), ("sampled", "coupled"), tuple(KINDS)],
    ids="-".join,
)
def test_who_shares_a_call_drafts_as_alone(network, names):
    """Kinds, budgets and rules of all sorts; some mixtures fit one call of the kernels."""
    requests = [
        asked(name, [11 * index + 3, 5, index + 2], tiny.VOCAB_SIZE, f"{name}-{index}")
        for index, name in enumerate(names * 2)
    ]
    rules = (None, StopRule(measure="entropy", threshold=2.5))
    plans = [plan(rules[index // 2 % 2], 1 + (5 * index) % K) for index in range(len(requests))]
    together = tiny.drafting(native_model(network, num_slots=8)).propose(requests, plans)
    for request, its_plan, found in zip(requests, plans, together, strict=True):
        (alone,) = tiny.drafting(native_model(network)).propose([request], [its_plan])
        assert found is not None
        assert alone is not None
        assert found.tokens.tolist() == alone.tokens.tolist()
        # Mixtures that fit no call of the kernels are measured by torch: another order of summing.
        assert (found.stop_values is None) == (alone.stop_values is None)
        assert (found.stop_values or ()) == pytest.approx(alone.stop_values or (), rel=1e-6)
        assert found.choice is alone.choice
        if found.choice is Choice.SAMPLED:
            assert found.draft_probs is not None
            assert alone.draft_probs is not None
            assert torch.equal(found.draft_probs, alone.draft_probs)


def told(drafter: DraftModel, request: DraftRequest, tokens: list[int]) -> None:
    """Accept all of a draft and one token more."""
    request.ids.extend([*tokens, 5])
    verdict = Verdict(
        path=tuple(range(len(tokens))),
        tokens=(*tokens, 5),
        sources=(*(TokenSource.ACCEPTED,) * len(tokens), TokenSource.BONUS),
        expected_accepted=0.0,
    )
    drafter.observe([tiny.outcome(request, verdict)])


@pytest.mark.parametrize("wrap", [WrappedModel, lambda model: model], ids=["levels", "fused"])
@pytest.mark.parametrize("name", ["greedy", "sampled", "coupled"])
def test_what_a_rule_cut_off_leaves_no_trace(network, name, wrap):
    """Two requests, one rule: both go on as if they were alone and fresh."""
    drafter = tiny.drafting(wrap(native_model(network)))
    requests = [asked(name, [7, 8, 9], 300, "a"), asked(name, [20, 30], 300, "b")]
    values = drafted(drafter, requests[0], StopRule(measure="entropy", threshold=1e9)).stop_values
    drafter.forget("a")
    middle = sorted(values[1:])[len(values) // 2 - 1]
    rule = StopRule(measure="entropy", threshold=middle - 1e-3)
    lengths = set()
    for _ in range(4):
        first, second = drafter.propose(requests, [plan(rule), plan(None, 4)])
        for request, proposal, its_plan in zip(
            requests, (first, second), (plan(rule), plan(None, 4)), strict=True
        ):
            fresh = tiny.drafting(wrap(native_model(network)))
            (alone,) = fresh.propose([replace(request, ids=list(request.ids))], [its_plan])
            assert proposal.tokens.tolist() == alone.tokens.tolist()
        assert second.num_drafted == 4
        lengths.add(first.num_drafted)
        told(drafter, requests[0], first.tokens.tolist())
        told(drafter, requests[1], second.tokens[:2].tolist())
    assert min(lengths) < K


def test_a_rule_reads_the_distribution_that_is_drawn_from():
    """With top_k=1 the distribution is certain, whatever the logits were."""
    request = replace(asked("sampled", [1, 2], 8), params=SamplingParams(top_k=1))
    rule = StopRule(measure="entropy", threshold=0.0)
    proposal = drafted(DraftModel(tiny.tabular(3), 8), request, rule)
    assert proposal.num_drafted == K
    assert proposal.choice is Choice.SAMPLED
    assert proposal.stop_values == (0.0,) * K


def failing_after(model: TabularModel, tokens: tuple[int, int]) -> TabularModel:
    """The model without a distribution behind these two tokens."""
    probs = model.log_probs.clone()
    probs[model.state_of(tokens)] = torch.nan
    return TabularModel(log_probs=probs, order=model.order, store=model.store)


@pytest.mark.parametrize("name", ["greedy", "sampled", "coupled", "penalised"])
def test_drafting_ends_where_nothing_can_be_measured(name):
    """A value that is no number would be learnt from, and written to traces."""
    rule = StopRule(measure="entropy", threshold=1e9)
    whole = drafted(DraftModel(tiny.tabular(3), 8), asked(name, [1, 2], 8), rule)
    seen = [1, 2, *whole.tokens.tolist()]
    pairs = [*pairwise(seen)][:K]  # before every node
    node = pairs.index(pairs[2])
    assert node > 0
    sick = failing_after(tiny.tabular(3), pairs[node])
    ended = drafted(DraftModel(sick, 8), asked(name, [1, 2], 8), rule)
    assert ended.tokens.tolist() == whole.tokens[:node].tolist()
    assert ended.stop_values == whole.stop_values[:node]
    assert ended.stop_reason == "invalid_probs"


def test_a_draft_without_a_first_distribution_has_measured_nothing():
    sick = failing_after(tiny.tabular(3), (1, 2))
    rule = StopRule(measure="top_probability", threshold=0.5)
    proposal = drafted(DraftModel(sick, 8), asked("greedy", [1, 2], 8), rule)
    assert proposal.num_drafted == 1
    assert proposal.stop_values == ()
