"""Medusa heads: their files, their proposals, and the text they leave as it is."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests import natives, tiny

from forerun.control.base import Tree
from forerun.control.named import FixedController
from forerun.drafters.base import Drafter
from forerun.drafters.medusa import (
    MedusaConfig,
    MedusaDrafter,
    MedusaHeads,
    load_medusa,
    read_medusa,
    write_medusa,
    write_medusa_vllm,
)
from forerun.drafters.registry import find_checkpoint
from forerun.errors import IncompatibleDraft, InvalidModel
from forerun.sampling.config import SamplingParams
from forerun.testing.conformance import check_drafter

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, seed=3)
WALKED = replace(SEEDED, verification="walk")
PROMPTS = [[5, 9, 2, 7, 11, 4] * 3, [3, 1, 4], [5, 9, 2, 7, 11, 4] * 3 + [8], [6]]


def random_heads(width=32, **changes):
    fields = {"hidden_size": width, "vocab_size": tiny.VOCAB_SIZE, "num_heads": 3}
    torch.manual_seed(1)
    heads = MedusaHeads(MedusaConfig(**{**fields, **changes}))
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.eval().requires_grad_(False)


@pytest.fixture
def target():
    return tiny.adapted(tiny.network())


def test_new_heads_change_the_state_by_their_bias_alone():
    heads = MedusaHeads(MedusaConfig(hidden_size=8, vocab_size=11, num_heads=2))
    hidden = torch.randn(3, 8)
    for state, head in zip(heads.states(hidden), heads.heads, strict=True):
        bias = head[0].linear.bias
        torch.testing.assert_close(state, hidden + torch.nn.functional.silu(bias).expand(3, 8))


@pytest.mark.parametrize("own_heads", [False, True])
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_written_heads_are_read_again(tmp_path, own_heads, num_blocks):
    heads = random_heads(own_heads=own_heads, num_blocks=num_blocks)
    write_medusa(heads, tmp_path / "reference", target="t")
    output = None if own_heads else torch.randn(tiny.VOCAB_SIZE, 32)
    write_medusa_vllm(heads, tmp_path / "vllm", output=output, max_positions=64)
    for form in ("reference", "vllm"):
        found = read_medusa(tmp_path / form, vocab_size=tiny.VOCAB_SIZE)
        assert found.config == heads.config
        for name, tensor in heads.state_dict().items():
            assert torch.equal(found.state_dict()[name], tensor)


def test_vllm_form_keeps_biases(tmp_path):
    write_medusa_vllm(random_heads(own_heads=True), tmp_path, output=None, max_positions=64)
    assert json.loads((tmp_path / "config.json").read_text())["medusa_fc_bias"] is True
    assert "blocks.2.layers.0.bias" in load_file(tmp_path / "model.safetensors")


def dropped_bias(tensors):
    del tensors["1.0.linear.bias"]


def unknown(tensors):
    tensors["1.0.norm.weight"] = torch.zeros(32)


def misshapen(tensors):
    tensors["2.0.linear.weight"] = torch.zeros(32, 31)


def no_blocks(tensors):
    tensors.clear()
    tensors["x"] = torch.zeros(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (dropped_bias, "lacks 1 tensors, the first 1.0.linear.bias"),
        (unknown, "1 tensors, the first 1.0.norm.weight"),
        (misshapen, r"2.0.linear.weight .* \(32, 31\)"),
        (no_blocks, "no residual block"),
    ],
)
def test_damaged_heads_are_refused(tmp_path, damage, message):
    write_medusa(random_heads(), tmp_path, target="t")
    path = tmp_path / "medusa_lm_head.safetensors"
    tensors = load_file(path)
    damage(tensors)
    save_file(tensors, path)
    with pytest.raises(InvalidModel, match=message):
        read_medusa(tmp_path, vocab_size=tiny.VOCAB_SIZE)


def test_wrong_counts_and_missing_files_are_refused(tmp_path):
    write_medusa(random_heads(), tmp_path, target="t")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"medusa_num_heads": 5}))
    with pytest.raises(InvalidModel, match="declares 5 Medusa heads, the weights hold 3"):
        read_medusa(tmp_path, vocab_size=tiny.VOCAB_SIZE)
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    with pytest.raises(InvalidModel, match="pickled"):
        read_medusa(tmp_path, vocab_size=tiny.VOCAB_SIZE)


def test_heads_for_another_target_are_refused(tmp_path, target):
    write_medusa(random_heads(width=48), tmp_path, target="t")
    with pytest.raises(IncompatibleDraft, match="hidden size 48, this target has 32"):
        load_medusa(tmp_path, target)


def expected_logits(heads, network, ids):
    """Logits of all heads behind the last token, by transformers' own network."""
    hidden = network.model(torch.tensor([ids])).last_hidden_state[0, -1:]
    states = [hidden + torch.nn.functional.silu(head[0].linear(hidden)) for head in heads.heads]
    return torch.cat([network.lm_head(state) for state in states])


class Watched(Drafter):
    """Compares every proposal with what transformers' network gives."""

    def __init__(self, drafter, network):
        self.drafter, self.network, self.num_checked = drafter, network, 0
        self.method, self.max_width = drafter.method, drafter.max_width
        self.required_features = drafter.required_features

    def propose(self, requests, plans):
        proposals = self.drafter.propose(requests, plans)
        for request, proposal in zip(requests, proposals, strict=True):
            if proposal is None:
                continue
            with torch.no_grad():
                logits = expected_logits(self.drafter.heads, self.network, request.ids[:-1])
            ranked = logits.argsort(dim=-1, descending=True).tolist()
            tree, tokens = proposal.tree, proposal.tokens.tolist()
            self.num_checked += len(tokens)
            if (rows := proposal.draft_probs) is not None:
                probs = logits[: len(tokens)].float().softmax(-1)
                torch.testing.assert_close(rows, probs, atol=1e-5, rtol=0)
                continue
            for node in range(len(tokens)):
                children = [tokens[child] for child in tree.children(node)]
                if children:
                    assert children == ranked[tree.depths[node]][: len(children)]
            roots = [tokens[child] for child in tree.children(-1)]
            assert roots == ranked[0][: len(roots)]
        return proposals

    def observe(self, outcomes):
        self.drafter.observe(outcomes)

    def forget(self, request_id):
        self.drafter.forget(request_id)


@pytest.mark.parametrize("shape", [3, Tree(num_nodes=6, depth=3, width=3)], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED, WALKED], ids=["greedy", "seeded", "walked"])
@pytest.mark.parametrize("runner", ["eager", "native"])
def test_proposals_and_text(shape, params, runner):
    network = tiny.network()
    target = tiny.adapted(network) if runner == "eager" else natives.native_model(network)
    plain = tiny.engine_over(target).generate(PROMPTS, params)
    watched = Watched(MedusaDrafter(random_heads(), target), network)
    engine = tiny.engine_over(
        target,
        watched,
        k=6,
        controller=FixedController(shape, "medusa"),
        prefill_chunk=16,
        max_context=40,
        max_kv_tokens=80,
    )
    for _ in range(2):  # the second time most rows are found in the cache
        found = engine.generate(PROMPTS, params)
        assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert watched.num_checked > 60


def test_it_conforms(target):
    check_drafter(
        lambda: MedusaDrafter(random_heads(), target), target, tiny.tokenizer(), max_tokens=8
    )


def test_a_saved_folder_is_recognised_and_loaded(tmp_path, target):
    write_medusa(random_heads(own_heads=True), tmp_path, target="t")
    load = find_checkpoint(json.loads((tmp_path / "config.json").read_text()))
    assert load is not None
    drafter = load(tmp_path, target)
    assert drafter.method == "medusa"
    assert drafter.required_features == (2,)
    plain = tiny.engine_over(target).generate(PROMPTS[:2], GREEDY)
    found = tiny.engine_over(target, drafter).generate(PROMPTS[:2], GREEDY)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]


def test_requests_without_states_are_decoded_plainly(target, caplog):
    drafter = MedusaDrafter(random_heads(), target)
    observe = drafter.observe
    drafter.observe = lambda outcomes: observe([replace(o, features=None) for o in outcomes])
    with caplog.at_level(logging.WARNING, logger="forerun.drafting"):
        found = tiny.engine_over(target, drafter).generate(PROMPTS, GREEDY)
    plain = tiny.engine_over(target).generate(PROMPTS, GREEDY)
    assert [o.token_ids for o in found] == [o.token_ids for o in plain]
    assert len(caplog.messages) == 1
