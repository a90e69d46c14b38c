"""The module that ships with a checkpoint drafts what its formula computes, and changes no text."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests import tiny
from tests.mtp_folders import DEEP, FAMILIES, MIMO, Reference
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from forerun import Engine
from forerun.control.base import Tree
from forerun.drafters.base import Drafter
from forerun.drafters.mtp import load_mtp
from forerun.engine.auto_drafts import auto_drafts
from forerun.engine.config import RequestTerms
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.models.load import load_model
from forerun.models.mtp_layout import _find_first
from forerun.sampling.config import Choice, SamplingParams
from forerun.testing.conformance import check_drafter

pytestmark = pytest.mark.usefixtures("unchecked")

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
FREE = replace(GREEDY, temperature=0.8)
SHARED = [5, 9, 2, 7, 11, 4] * 3
PROMPTS = [[*SHARED, 1, 2], [3, 1, 4], [*SHARED, 8], [6]]


class Watching(Drafter):
    """Compares every proposal with the formula."""

    def __init__(self, drafter, reference):
        self.drafter, self.reference = drafter, reference
        self.method, self.max_width = drafter.method, drafter.max_width
        self.required_features = drafter.required_features
        self.num_checked = self.num_branching = 0
        self.largest_error = 0.0

    def propose(self, requests, plans):
        proposals = self.drafter.propose(requests, plans)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal is not None:
                self.check(request, proposal)
        return proposals

    def check(self, request, proposal):
        tokens = proposal.tokens.tolist()
        self.num_branching += not proposal.tree.is_chain
        for node, token in enumerate(tokens):
            before = [tokens[above] for above in proposal.tree.path(node)[:-1]]
            probs = self.reference.probs(list(request.ids), before)
            self.num_checked += 1
            if proposal.draft_probs is not None and proposal.tree.is_chain:
                expected = probs.pow(1 / request.params.temperature)
                error = (proposal.draft_probs[node] - expected / expected.sum()).abs().max()
                self.largest_error = max(self.largest_error, float(error))
            elif proposal.choice is Choice.DETERMINISTIC:
                siblings = proposal.tree.children(proposal.tree.parents[node])
                assert probs[token] >= probs.topk(len(siblings)).values[-1] - 1e-5

    def observe(self, outcomes):
        self.drafter.observe(outcomes)

    def forget(self, request_id):
        self.drafter.forget(request_id)


FEWER = ("Qwen3Next", "Qwen3_5Moe")  # each part of them occurs in another family


@pytest.fixture(
    scope="module",
    params=[pytest.param(f, marks=pytest.mark.full) if f in FEWER else f for f in FAMILIES],
)
def reference(request):
    return Reference(request.param)


@pytest.fixture(scope="module")
def folder(reference, tmp_path_factory):
    return reference.save(tmp_path_factory.mktemp(reference.family))


@pytest.fixture(scope="module")
def target(folder):
    return loaded(folder)


def loaded(folder: Path, **settings):
    return load_model(folder, dtype="float32", max_batch=4, runner="eager", **settings)


def tokens_of(outputs):
    return [output.token_ids for output in outputs]


@pytest.mark.covering
@pytest.mark.parametrize("params", [GREEDY, SEEDED, FREE], ids=["greedy", "seeded", "free"])
def test_chains_are_those_of_the_formula(reference, folder, target, params):
    watching = Watching(load_mtp(str(folder), target), reference)
    outputs = tiny.engine_over(target, watching, k=3, prefill_chunk=16).generate(PROMPTS, params)
    assert watching.num_checked > 20
    assert watching.largest_error <= 1e-4
    assert (watching.largest_error > 0) == (params is not GREEDY)
    assert watching.drafter.model.store.num_free == 4
    if params is not FREE:
        assert tokens_of(outputs) == tokens_of(tiny.engine_over(target).generate(PROMPTS, params))


@pytest.mark.covering
@pytest.mark.parametrize("params", [GREEDY, SEEDED, FREE], ids=["greedy", "seeded", "free"])
def test_trees_leave_the_text_alone(reference, folder, target, params):
    watching = Watching(load_mtp(str(folder), target), reference)
    tree = Tree(num_nodes=6, depth=3, width=3)
    outputs = tiny.engine_over(target, watching, k=6, tree=tree).generate(PROMPTS, params)
    assert watching.num_branching > 5
    if params is not FREE:
        assert tokens_of(outputs) == tokens_of(tiny.engine_over(target).generate(PROMPTS, params))


@pytest.mark.covering
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_preempted_requests_and_known_prefixes(reference, folder, target, params):
    plain = tokens_of(tiny.engine_over(target).generate(PROMPTS, params))
    drafter = load_mtp(str(folder), target)
    engine = tiny.engine_over(target, drafter, k=3, prefill_chunk=16, max_batch=2)
    ids = [engine.add_request(p, params, terms=RequestTerms(priority=5)) for p in PROMPTS[:2]]
    for _ in range(3):
        engine.step()
    ids += [engine.add_request(p, params, terms=RequestTerms(priority=0)) for p in PROMPTS[2:]]
    while engine.has_unfinished:
        engine.step()
    outputs = [engine.take_output(request_id) for request_id in ids]
    assert tokens_of(outputs) == plain
    assert any(output.completions[0].num_preemptions for output in outputs)
    longer = [[*PROMPTS[0], *plain[0], 5, 6, 7]]
    (second,) = engine.generate(longer, params)
    assert second.completions[0].num_cached_tokens >= len(PROMPTS[0])
    assert tokens_of([second]) == tokens_of(tiny.engine_over(target).generate(longer, params))
    assert target.store.num_free == drafter.model.store.num_free == 4


@pytest.mark.parametrize("family", ["Glm4Moe", "DeepseekV3"])
def test_the_first_token_is_that_of_transformers(family):
    """transformers has modules of the families whose configuration counts them."""
    reference = Reference(family)
    network = reference.network
    module = MtpModel(network, 1)
    names = ("enorm", "hnorm", "eh_proj", "post_norm", "mtp_block")
    for name, ours in zip(names, reference.modules, strict=True):
        getattr(module.layers[0], name).load_state_dict(ours.state_dict())
    ids = PROMPTS[0]
    hidden = network.model(torch.tensor([ids[:-1]])).last_hidden_state
    cache = MtpCache(config=network.config.get_mtp_config())
    positions = torch.arange(1, len(ids))[None]
    with torch.inference_mode():
        _, logits, _ = module.eval()(torch.tensor([ids[1:]]), hidden, None, positions, cache)
    expected = logits[0, 0].softmax(-1)
    torch.testing.assert_close(reference.probs(ids, []), expected, atol=1e-5, rtol=1e-4)


def test_the_native_runner_scores_what_the_module_drafts(tmp_path):
    reference = Reference("Qwen2")
    folder = reference.save(tmp_path)
    target = load_model(folder, dtype="float32", max_batch=4, runner="native")
    watching = Watching(load_mtp(str(folder), target), reference)
    outputs = tiny.engine_over(target, watching, k=3).generate(PROMPTS, SEEDED)
    assert tokens_of(outputs) == tokens_of(tiny.engine_over(target).generate(PROMPTS, SEEDED))
    assert watching.num_checked > 20
    assert watching.largest_error <= 1e-4


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3_5"])
def test_it_conforms(family, tmp_path):
    folder = Reference(family).save(tmp_path)
    target = loaded(folder)
    check_drafter(
        lambda: load_mtp(str(folder), target), target, tiny.tokenizer(), max_tokens=8, num_sampled=4
    )


def test_an_engine_finds_the_module_by_itself(tmp_path):
    folder = Reference("Qwen3_5").save(tmp_path)
    assert auto_drafts(str(folder)) == (f"mtp:{folder}", "suffix")
    plain = Engine.load(folder, dtype="float32").generate(["def f("], GREEDY)
    for draft in ("mtp", "auto"):
        engine = Engine.load(folder, draft=draft, dtype="float32", num_speculative_tokens=2)
        assert tokens_of(engine.generate(["def f("], GREEDY)) == tokens_of(plain)
        assert "mtp" in engine.drafter.method


def write_count(folder: Path, count: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_nextn_predict_layers": count}))


def test_of_several_modules_the_first_is_used(tmp_path, caplog):
    reference = Reference("Qwen2")
    later = {n.replace(MIMO, "model.mtp_layers.1"): -t for n, t in reference.tensors().items()}
    folder = reference.save(tmp_path, later)
    write_count(folder, 2)
    target = loaded(folder)
    with caplog.at_level(logging.WARNING, logger="forerun.loading"):
        watching = Watching(load_mtp(str(folder), target), reference)
    assert "brings 2 MTP modules: the first one drafts" in caplog.text
    tiny.engine_over(target, watching, k=3).generate(PROMPTS, SEEDED)
    assert 0 < watching.largest_error <= 1e-4


DAMAGE = {
    "a tensor is missing": ({f"{MIMO}.input_proj.weight": None}, "lacks 1 tensors, the first proj"),
    "a shape": (
        {f"{MIMO}.mlp.up_proj.weight": torch.zeros(3, 32)},
        r"up_proj.weight in .* has the shape \(3, 32\); it must have",
    ),
    "one too many": ({f"{MIMO}.mlp.gate.weight": torch.zeros(3)}, "holds, beside the"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_modules_are_refused(tmp_path, damage):
    changed, message = DAMAGE[damage]
    folder = Reference("Qwen2").save(tmp_path, changed)
    with pytest.raises(InvalidModel, match=message):
        load_mtp(str(folder), loaded(folder))


def test_experts_that_are_missing_are_refused(tmp_path):
    gone = {f"{DEEP}.mlp.experts.1.up_proj.weight": None}
    folder = Reference("Glm4Moe").save(tmp_path, gone)
    with pytest.raises(InvalidModel, match=r"experts.up_proj are not numbered from 0"):
        load_mtp(str(folder), loaded(folder))


def test_files_without_a_module_are_refused(tmp_path):
    reference = Reference("Qwen2")
    folder = reference.save(tmp_path, dict.fromkeys(reference.tensors()))
    target = loaded(folder)
    with pytest.raises(
        InvalidModel, match=r"brings no multi-token-prediction .* module: it has no"
    ):
        load_mtp(str(folder), target)
    write_count(folder, 1)
    with pytest.raises(InvalidModel, match=r"module, although its config\.json announces 1"):
        load_mtp(str(folder), target)
    with pytest.raises(InvalidModel, match="give the target by its folder"):
        load_mtp("", target)


def test_a_configuration_that_denies_the_module_is_refused(tmp_path):
    folder = Reference("Qwen2").save(tmp_path)
    write_count(folder, 0)
    with pytest.raises(InvalidModel, match=r"config\.json says that there are 0"):
        load_mtp(str(folder), loaded(folder))


def test_a_module_of_another_target_is_refused(tmp_path):
    folder = Reference("Qwen2").save(tmp_path)
    target = tiny.adapted(tiny.network("qwen2", hidden_size=48))
    with pytest.raises(IncompatibleDraft, match="has the width 32, this target has 48"):
        load_mtp(str(folder), target)


def test_layers_that_the_configuration_lacks_are_still_refused(tmp_path):
    """Only a layer with a projection of its own is a module."""
    layer = {n: t for n, t in Reference("Glm4Moe").tensors().items() if ".eh_proj" not in n}
    folder = Reference("Qwen2").save(tmp_path, layer)
    with pytest.raises(InvalidModel, match=r"unexpected, the first model\.layers\.4"):
        loaded(folder)


@pytest.mark.parametrize("pattern", ["model.mtp_layers.{}.x", "model.mtp.layers.{}.x"])
def test_names_with_numbers_of_thousands_of_digits_are_no_modules(pattern):
    assert (
        _find_first((pattern.format("9" * 5000), f"model.layers.{'9' * 5000}.enorm.weight"), 1)
        is None
    )
