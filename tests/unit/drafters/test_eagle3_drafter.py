"""The EAGLE-3 drafter proposes what a slow loop computes, and leaves the text as it is."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from tests import heads, natives, tiny

from forerun.control.base import Tree
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter, StepOutcome
from forerun.drafters.eagle3.drafter import NativeEagle3Model
from forerun.drafters.eagle3.load import load_eagle3, write_eagle3_head
from forerun.errors import IncompatibleDraft
from forerun.models.base import Context, pack
from forerun.sampling.config import Choice, SamplingParams
from forerun.testing.conformance import check_drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
FREE = replace(GREEDY, temperature=0.8)
SHARED = [5, 9, 2, 7, 11, 4] * 3
PROMPTS = [[*SHARED, 1, 2], [3, 1, 4], [*SHARED, 8], [6]]


@pytest.fixture(scope="module")
def network():
    return tiny.network(num_layers=4)


@pytest.fixture
def target(network):
    return tiny.adapted(network)


def features_of(target, ids, layers):
    """Features of all tokens, by a pass of their own."""
    context = Context(target.store, ids)
    batch = pack([context.span(len(ids))], ids, [], target.device)
    features = target.forward(replace(batch, feature_layers=layers)).features
    context.close()
    return features


class Watching(Drafter):
    """Compares every proposal of an EAGLE-3 drafter with the slow loop."""

    def __init__(self, drafter, head, target, other):
        self.drafter, self.head, self.target, self.other = drafter, head, target, other
        self.method = drafter.method
        self.required_features = drafter.required_features
        self.max_width = drafter.max_width
        self.num_checked = 0
        self.num_branching = 0
        self.checks_params = True

    def propose(self, requests, plans):
        proposals = self.drafter.propose(requests, plans)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal is not None and self.checks_params:
                self.check(request, proposal)
            elif proposal is not None:
                self.num_checked += proposal.num_drafted
        return proposals

    def check(self, request, proposal):
        ids = list(request.ids)
        features = features_of(self.other, ids[:-1], self.head.config.feature_layers)
        tokens = proposal.tokens.tolist()
        self.num_branching += not proposal.tree.is_chain
        for node, token in enumerate(tokens):
            before = [tokens[above] for above in proposal.tree.path(node)[:-1]]
            probs = heads.slow_probs(self.head, self.other, ids, before, features)
            if proposal.choice is Choice.DETERMINISTIC and not proposal.tree.is_chain:
                siblings = proposal.tree.children(proposal.tree.parents[node])
                assert probs[token] >= probs.topk(len(siblings)).values[-1] - 1e-6
            elif proposal.choice is Choice.DETERMINISTIC:
                assert probs[token] >= probs.max() - 1e-6
            elif proposal.draft_probs is not None and proposal.tree.is_chain:
                expected = probs.pow(1 / request.params.temperature)
                expected /= expected.sum()
                torch.testing.assert_close(
                    proposal.draft_probs[node], expected, atol=2e-5, rtol=1e-3
                )
            self.num_checked += 1

    def observe(self, outcomes):
        self.drafter.observe(outcomes)

    def forget(self, request_id):
        self.drafter.forget(request_id)


FLAGS = [
    {},
    {"norm_before_residual": True, "norm_output": True},
    {"fc_norm": True, "norm_output": True},
    {"norm_before_fc": True, "feature_layers": (4, 0, 2)},
    {"own_embedding": True, "hidden_size": 48, "draft_vocab_size": tiny.VOCAB_SIZE},
]


@pytest.mark.parametrize(
    ("changes", "params"), [*zip(FLAGS, [GREEDY, SEEDED, FREE, GREEDY, FREE], strict=True)]
)
def test_proposals_equal_a_slow_loop(network, target, changes, params):
    head = heads.eagle3_head(target, **changes)
    drafter = heads.eagle3_drafter(target, head)
    watching = Watching(drafter, head, target, tiny.adapted(network))
    outputs = tiny.engine_over(target, watching, k=3, prefill_chunk=16).generate(PROMPTS, params)
    assert watching.num_checked > 20
    assert drafter.model.store.num_free == 4
    if params is not FREE:
        plain = tiny.engine_over(target).generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_rows_that_a_draft_has_read_are_not_read_again(target):
    """What is left to read after a step are the rows that this step committed."""
    drafter = heads.eagle3_drafter(target, heads.eagle3_head(target))
    observe, num_after_drafts = drafter.observe, 0

    def observed(outcomes):
        nonlocal num_after_drafts
        observe(outcomes)
        for outcome in outcomes:
            if outcome.proposal is not None:
                num_after_drafts += 1
                left = drafter._sequences[outcome.request_id].num_features
                assert left == len(outcome.features)

    drafter.observe = observed
    tiny.engine_over(target, drafter, k=3).generate(PROMPTS, GREEDY)
    assert num_after_drafts > 8


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize(
    "limits", [{}, {"max_context": 34, "max_kv_tokens": 60}], ids=["roomy", "preempted"]
)
def test_text_is_that_of_plain_decoding(network, target, params, limits):
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    head = heads.eagle3_head(target)
    drafter = heads.eagle3_drafter(target, head)
    watching = Watching(drafter, head, target, tiny.adapted(network))
    engine = tiny.engine_over(target, watching, k=3, prefill_chunk=16, **limits)
    for _ in range(2):  # the second time most rows are found in the cache
        outputs = engine.generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    cached = [completion.num_cached_tokens for o in outputs for completion in o.completions]
    assert max(cached) >= 16, "no prefix was found in the cache"
    if limits:
        assert any(c.num_preemptions for o in outputs for c in o.completions)
    assert watching.num_checked > 20


@pytest.mark.parametrize("params", [GREEDY, SEEDED, FREE], ids=["greedy", "seeded", "free"])
@pytest.mark.parametrize("is_native", [False, True], ids=["torch", "native"])
def test_trees(network, target, params, is_native):
    target = natives.native_model(network) if is_native else target
    head = heads.eagle3_head(target, norm_output=True)
    drafter = heads.eagle3_drafter(target, head)
    watching = Watching(drafter, head, target, tiny.adapted(network))
    shape = FixedController(Tree(num_nodes=6, depth=3, width=3), "eagle3")
    engine = tiny.engine_over(target, watching, k=6, controller=shape)
    outputs = engine.generate(PROMPTS, params)
    assert watching.num_checked > 40
    assert watching.num_branching > 5
    if params is not FREE:
        plain = tiny.engine_over(target).generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_long_prompts_are_read_in_chunks(monkeypatch, target):
    monkeypatch.setattr("forerun.drafters.eagle3.drafter.PREFILL_CHUNK", 8)
    head = heads.eagle3_head(target)
    drafter = heads.eagle3_drafter(target, head)
    plain = tiny.engine_over(target).generate(PROMPTS, GREEDY)
    watching = Watching(drafter, head, target, target)
    watching.other = tiny.adapted(tiny.network(num_layers=4))
    outputs = tiny.engine_over(target, watching, k=3, prefill_chunk=16).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_it_conforms(target):
    head = heads.eagle3_head(target)
    check_drafter(
        lambda: heads.eagle3_drafter(target, head),
        target,
        tiny.tokenizer(),
        max_tokens=8,
        num_sampled=4,
    )


def test_requests_without_features_are_decoded_plainly(target, caplog):
    class Losing(Watching):
        def observe(self, outcomes: list[StepOutcome]):
            self.drafter.observe([replace(outcome, features=None) for outcome in outcomes])

    drafter = heads.eagle3_drafter(target, heads.eagle3_head(target))
    losing = Losing(drafter, None, target, None)
    with caplog.at_level(logging.WARNING, logger="forerun.drafting"):
        outputs = tiny.engine_over(target, losing, k=3).generate(PROMPTS, GREEDY)
    plain = tiny.engine_over(target).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]
    assert [r.message for r in caplog.records if "gave no features" in r.message] == caplog.messages
    assert len(caplog.messages) == 1


def test_a_request_that_lacked_features_once_decodes_plainly_to_its_end(target, caplog):
    class LosingOnce(Watching):
        num_observed = num_plain = 0

        def observe(self, outcomes: list[StepOutcome]):
            self.num_observed += 1
            if self.num_observed == 3:
                outcomes = [replace(outcome, features=None) for outcome in outcomes]
            self.drafter.observe(outcomes)

        def propose(self, requests, plans):
            proposals = self.drafter.propose(requests, plans)
            self.num_plain += proposals == [None]
            return proposals

    drafter = heads.eagle3_drafter(target, heads.eagle3_head(target))
    losing = LosingOnce(drafter, None, target, None)
    with caplog.at_level(logging.WARNING, logger="forerun.drafting"):
        (output,) = tiny.engine_over(target, losing, k=3).generate(PROMPTS[:1], GREEDY)
    (plain,) = tiny.engine_over(target).generate(PROMPTS[:1], GREEDY)
    assert output.token_ids == plain.token_ids
    assert losing.num_plain == losing.num_observed - 3 > 2
    assert len(caplog.messages) == 1


def test_a_saved_head_is_loaded(tmp_path, target):
    head = heads.eagle3_head(target)
    write_eagle3_head(head, tmp_path, target="t")
    drafter = load_eagle3(tmp_path, target)
    assert drafter.required_features == (1, 2, 4)
    plain = tiny.engine_over(target).generate(PROMPTS, GREEDY)
    outputs = tiny.engine_over(target, drafter).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 48}, "hidden size 32, this target has 48"),
        ({"vocab_size": 310}, "vocabulary 300, this target has 310"),
        ({"num_layers": 3}, "reads layer 4 of its target, this target has 3 layers"),
    ],
)
def test_a_head_for_another_target_is_refused(tmp_path, target, changes, message):
    write_eagle3_head(heads.eagle3_head(target), tmp_path, target="t")
    other = tiny.adapted(tiny.network(**{"num_layers": 4, **changes}))
    with pytest.raises(IncompatibleDraft, match=message):
        load_eagle3(tmp_path, other)


NATIVE_FLAGS = [
    {},
    {"norm_before_residual": True, "norm_output": True, "draft_vocab_size": tiny.VOCAB_SIZE},
    {"fc_norm": True, "intermediate_size": 40},
]


@pytest.mark.parametrize("family", ["gemma3", "granite", "olmo2", "qwen3-moe"])
def test_kernels_propose_behind_targets_of_other_families(family):
    """Whose embeddings are scaled, and whose final norms and logits differ from Llama's."""
    network = tiny.network(family)
    target = natives.native_model(network)
    head = heads.eagle3_head(target, feature_layers=(0, 1, 2))
    drafter = heads.eagle3_drafter(target, head)
    assert isinstance(drafter.model, NativeEagle3Model)
    watching = Watching(drafter, head, target, tiny.adapted(network))
    outputs = tiny.engine_over(target, watching, k=3).generate(PROMPTS, SEEDED)
    assert watching.num_checked > 20
    plain = tiny.engine_over(target).generate(PROMPTS, SEEDED)
    assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize("changes", NATIVE_FLAGS)
@pytest.mark.parametrize(
    "params",
    [GREEDY, SEEDED, FREE, replace(SEEDED, top_p=0.9), replace(GREEDY, repetition_penalty=1.3)],
    ids=["greedy", "seeded", "free", "top_p", "penalty"],
)
def test_kernels_propose_what_a_slow_loop_computes(network, changes, params):
    target = natives.native_model(network)
    head = heads.eagle3_head(target, **changes)
    drafter = heads.eagle3_drafter(target, head)
    assert isinstance(drafter.model, NativeEagle3Model)
    watching = Watching(drafter, head, target, tiny.adapted(network))
    watching.checks_params = params.top_p == 1 and params.repetition_penalty == 1
    outputs = tiny.engine_over(target, watching, k=3).generate(PROMPTS, params)
    assert watching.num_checked > 20
    if params is not FREE:
        plain = tiny.engine_over(target).generate(PROMPTS, params)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


@pytest.mark.parametrize("target_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_kernels_pack_a_head_of_another_dtype_as_their_own(network, head_dtype, target_dtype):
    target = natives.native_model(network, dtype=target_dtype)
    head = heads.eagle3_head(target).to(head_dtype)
    model = NativeEagle3Model(head, target)
    features = torch.randn(3, len(heads.LAYERS), target.hidden_size, dtype=torch.float32)
    packed = head.fc.weight.to(target_dtype).float()
    expected = features.to(target_dtype).float().flatten(1) @ packed.T
    torch.testing.assert_close(
        model.fuse(features.to(target_dtype)), expected, atol=1e-4, rtol=1e-4
    )
