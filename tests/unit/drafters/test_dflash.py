"""The DFlash drafter proposes what a block without caches says, and leaves the text as it is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import heads, natives, tiny

from forerun.control.base import Tree
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.dflash.drafter import DFlashDrafter, TorchBlocks
from forerun.drafters.dflash.load import load_dflash, read_dflash, write_dflash
from forerun.drafters.dflash.native import NativeBlocks
from forerun.drafters.dflash.network import DFlashNetwork
from forerun.drafters.registry import find_checkpoint
from forerun.errors import ForerunError, IncompatibleDraft, InvalidModel
from forerun.models.base import Context, pack
from forerun.sampling.config import SamplingParams
from forerun.testing.conformance import check_drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=7)
WALKED = replace(SEEDED, verification="walk")
SHARED = [5, 9, 2, 7, 11, 4] * 3
PROMPTS = [[*SHARED, 1, 2], [3, 1, 4], [*SHARED, 8], [6]]
SLIDING = {"windows": (None, 4), "causal": (False, True)}
CAUSAL = {"causal": (True, True), "feature_layers": (4, 0, 2)}
LINEAR = {"rope": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}
FORMS = [
    {},
    LINEAR,
    SLIDING,
    CAUSAL,
    {"own_output": False, "qk_norm": False},
    {"own_embedding": True},
]


@pytest.fixture(scope="module")
def base():
    return tiny.network(num_layers=4)


@pytest.fixture
def target(base):
    return tiny.adapted(base)


def features_of(target, ids, layers):
    """Features of all tokens, by a pass of their own, in the order of `layers`."""
    context = Context(target.store, ids)
    batch = pack([context.span(len(ids))], ids, [], target.device)
    features = target.forward(replace(batch, feature_layers=layers)).features
    context.close()
    return features


class Watched(Drafter):
    """Compares every proposal with a block that is computed with nothing kept."""

    def __init__(self, drafter, other):
        self.drafter, self.other, self.num_checked = drafter, other, 0
        self.whole = None
        self.method, self.max_width = drafter.method, drafter.max_width
        self.required_features = drafter.required_features

    def propose(self, requests, plans):
        proposals = self.drafter.propose(requests, plans)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal is None:
                continue
            network = self.whole or self.drafter.blocks.network
            layers = network.config.feature_layers
            features = features_of(self.other, list(request.ids[:-1]), layers)
            logits = heads.slow_block(network, self.other, list(request.ids), features)
            tree, tokens = proposal.tree, proposal.tokens.tolist()
            self.num_checked += len(tokens)
            if (rows := proposal.draft_probs) is not None:
                probs = logits[: len(tokens)].softmax(-1)
                torch.testing.assert_close(rows, probs, atol=1e-5, rtol=0)
                assert rows[range(len(tokens)), tokens].min() > 0
                continue
            chain = logits.argmax(-1).tolist()[: max(tree.depths) + 1]
            for node in (-1, *range(len(tokens))):
                children = [tokens[child] for child in tree.children(node)]
                if children:
                    row = logits[0 if node < 0 else tree.depths[node]]
                    least = row.topk(len(children)).values[-1]
                    assert row[children].min() >= least - 1e-4
            assert tokens[: len(chain)] == chain
        return proposals

    def observe(self, outcomes):
        self.drafter.observe(outcomes)

    def forget(self, request_id):
        self.drafter.forget(request_id)


@pytest.mark.parametrize("shape", [4, Tree(num_nodes=7, depth=4, width=3)], ids=["chain", "tree"])
@pytest.mark.parametrize("changes", FORMS)
def test_proposals_equal_blocks_without_caches(base, target, changes, shape):
    drafter = DFlashDrafter(heads.dflash_network(target, **changes), target)
    watched = Watched(drafter, tiny.adapted(base))
    for params in (GREEDY, SEEDED, WALKED):
        plain = tiny.engine_over(target).generate(PROMPTS, params)
        engine = tiny.engine_over(
            target,
            watched,
            k=7,
            controller=FixedController(shape, "dflash"),
            prefill_chunk=16,
            max_context=40,
            max_kv_tokens=80,
        )
        for _ in range(2):  # the second time most rows are found in the cache
            found = engine.generate(PROMPTS, params)
            assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert watched.num_checked > 60
    assert not drafter.blocks._rows


@pytest.mark.parametrize("changes", FORMS)
def test_the_kernels_of_the_target_compute_it(base, tmp_path, changes):
    target = natives.native_model(base)
    write_dflash(heads.dflash_network(target, **changes), tmp_path, target="t")
    drafter = Watched(load_dflash(tmp_path, target), tiny.adapted(base))
    assert isinstance(drafter.drafter.blocks, NativeBlocks)
    drafter.whole = read_dflash(tmp_path)
    for params in (GREEDY, SEEDED):
        plain = tiny.engine_over(target).generate(PROMPTS, params)
        found = tiny.engine_over(target, drafter, k=4).generate(PROMPTS, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert not drafter.drafter.blocks._slots


ONE_LAYER = {"block_size": 12, "num_layers": 1, "windows": (None,), "causal": (False,)}
MASKS = [
    {"windows": windows, "causal": causal}
    for windows in [(None, None), (None, 4), (1, 300)]
    for causal in [(False, False), (True, True), (False, True)]
]


@pytest.mark.parametrize("changes", [*FORMS, *MASKS, ONE_LAYER])
def test_kernels_and_torch_compute_the_same_logits(base, changes):
    target = natives.native_model(base, max_context=512)
    network = heads.dflash_network(target, scale=0.2, **changes)
    runners = [TorchBlocks(network, target), NativeBlocks(network, target)]
    runners[1].store.data.fill_(float("nan"))  # what was not written is not read
    generator = torch.Generator().manual_seed(1)

    def noise(*shape):
        return torch.empty(shape).normal_(generator=generator)

    appended = [{"a": 300, "b": 1}, {"c": 19, "a": 5}, {"a": 1, "b": 17, "c": 1}, {"b": 2}]
    for number, sizes in enumerate(appended):
        features = {
            name: noise(size, len(network.config.feature_layers), target.hidden_size)
            for name, size in sizes.items()
        }
        embedded = noise(len(sizes), network.config.block_size, network.config.hidden_size)
        found = []
        for runner in runners:
            for name in sizes:
                if runner.count_rows(name) is None or (number, name) == (2, "c"):
                    runner.begin(name)
            runner.append(features)
            found.append(runner.predict([*sizes], embedded, 3))
        assert runners[0].count_rows("a") == runners[1].count_rows("a")
        torch.testing.assert_close(*found, atol=1e-4, rtol=0)


def bytes_read(blocks):
    weights = blocks.weights
    return weights.kernels.library.forerun_decoder_bytes_read(weights.handle, 2)


def test_networks_stored_in_8_bits_stay_so(base, tmp_path):
    target = natives.native_model(base)
    network = heads.dflash_network(target, scale=0.1)
    found = []
    for form in ("speculators", "int8"):
        write_dflash(network, tmp_path / form, target="t", form=form)
        blocks = load_dflash(tmp_path / form, target).blocks
        blocks.begin("a")
        generator = torch.Generator().manual_seed(0)
        blocks.append({"a": torch.empty(9, 3, 32).normal_(generator=generator)})
        embedded = torch.empty(1, 5, 32).normal_(generator=generator)
        found.append((blocks.predict(["a"], embedded, 4), bytes_read(blocks)))
    (whole, num_bytes), (rounded, num_bytes_of_8) = found
    assert num_bytes_of_8 < 0.6 * num_bytes
    assert 0 < (whole - rounded).abs().max() < 0.05 * whole.abs().max()


def test_it_conforms(target):
    network = heads.dflash_network(target)
    check_drafter(lambda: DFlashDrafter(network, target), target, tiny.tokenizer(), max_tokens=8)


@pytest.mark.parametrize("form", ["speculators", "int8"])
@pytest.mark.parametrize("changes", FORMS)
def test_a_written_folder_is_recognised_and_read(tmp_path, target, changes, form):
    network = heads.dflash_network(target, **changes)
    write_dflash(network, tmp_path, target="t", form=form)
    found = read_dflash(tmp_path)
    assert found.config == network.config
    for name, value in network.state_dict().items():
        atol = 0.02 if form == "int8" and value.ndim == 2 else 0
        torch.testing.assert_close(found.state_dict()[name], value, atol=atol, rtol=0)
    load = find_checkpoint(json.loads((tmp_path / "config.json").read_text()))
    assert load is load_dflash
    drafter = load(tmp_path, target)
    assert (drafter.method, drafter.max_k) == ("dflash", 4)


def test_the_form_of_its_authors_is_read(tmp_path, target):
    """Layers are named by their outputs there, and there is no output matrix."""
    network = heads.dflash_network(target, own_output=False)
    write_dflash(network, tmp_path, target="t")
    path = tmp_path / "config.json"
    settings = json.loads(path.read_text())
    layers = [layer - 1 for layer in network.config.feature_layers]
    own = {"mask_token_id": network.config.mask_token_id, "target_layer_ids": layers}
    kept = {"block_size": 5, "architectures": ["DFlashDraftModel"], "dflash_config": own}
    path.write_text(json.dumps(settings["transformer_layer_config"] | kept))
    assert read_dflash(tmp_path).config == network.config


def without(name):
    return lambda settings, _: settings.pop(name)


def setting(**changes):
    return lambda settings, _: settings.update(changes)


@pytest.mark.parametrize(
    "masks",
    [
        {"windows": (4, 8), "causal": (True, True)},
        {"windows": (4, 4), "causal": (False, True)},
        {"windows": (None, None), "causal": (True, False)},
    ],
)
def test_masks_that_its_file_cannot_state_are_not_written(target, tmp_path, masks):
    network = heads.dflash_network(target, **masks)
    with pytest.raises(InvalidModel, match="one sliding_window and one is_causal for all layers"):
        write_dflash(network, tmp_path, target="t")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without("mask_token_id"), "mask_token_id=None; it must be the token"),
        (setting(mask_token_id=300), "mask_token_id is 300, but .* 0 to 299"),
        (setting(mask_token_id=True), "mask_token_id=True"),
        (without("block_size"), "block_size"),
        (setting(block_size=1), "block_size is 1; a block has 2 to 256 rows"),
        (setting(block_size=1 << 31), "block_size is 2147483648; a block has 2 to 256 rows"),
        (without("aux_hidden_state_layer_ids"), "aux_hidden_state_layer_ids=None; it must list"),
        (setting(aux_hidden_state_layer_ids=[]), "aux_hidden_state_layer_ids"),
        (setting(sample_from_anchor=True), "sample_from_anchor=True is not supported"),
        (setting(projector_type="domino"), "projector_type='domino' is not supported"),
        (setting(is_causal=3), "is_causal=3; it must be true or false"),
        (lambda _, t: t.pop("lm_head.weight"), "drafts 100 of 300 tokens, but has no output"),
        (lambda _, t: t.pop("fc.weight"), "fc.weight"),
        (lambda _, t: t.pop("layers.1.self_attn.k_norm.weight"), "layers.1.self_attn.k_norm"),
        (lambda _, t: t.update(more=torch.ones(2)), "more"),
        (lambda _, t: t["d2t"].add_(1000), "outside the target's 300 tokens"),
    ],
)
def test_damaged_files_are_refused(tmp_path, target, damage, message):
    write_dflash(heads.dflash_network(target), tmp_path, target="t")
    settings_path, path = tmp_path / "config.json", tmp_path / "model.safetensors"
    settings, tensors = json.loads(settings_path.read_text()), load_file(path)
    damage(settings, tensors)
    settings_path.write_text(json.dumps(settings))
    save_file(tensors, path)
    with pytest.raises(InvalidModel, match=message):
        read_dflash(tmp_path)


def test_a_network_for_another_target_is_refused(tmp_path, target):
    write_dflash(heads.dflash_network(target, feature_layers=(1, 5)), tmp_path, target="t")
    with pytest.raises(IncompatibleDraft, match=r"reads layer 5 of its target.* has 4 layers"):
        load_dflash(tmp_path, target)
    other = tiny.adapted(tiny.network(hidden_size=48, num_layers=4))
    with pytest.raises(IncompatibleDraft, match="hidden size 32, this target has 48"):
        load_dflash(tmp_path, other)


def test_more_tokens_than_the_block_has_are_refused(target):
    drafter = DFlashDrafter(heads.dflash_network(target), target)
    with pytest.raises(ForerunError, match=r"is 5, but this dflash draft .* at most 4 .*DRAFT@4"):
        tiny.engine_over(target, drafter, k=5)


def test_requests_without_features_are_decoded_plainly(target, caplog):
    drafter = DFlashDrafter(heads.dflash_network(target), target)
    observe = drafter.observe
    drafter.observe = lambda outcomes: observe([replace(o, features=None) for o in outcomes])
    found = tiny.engine_over(target, drafter, k=4).generate(PROMPTS, GREEDY)
    plain = tiny.engine_over(target).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert len([message for message in caplog.messages if "no features" in message]) == 1
    assert isinstance(drafter.blocks.network, DFlashNetwork)
