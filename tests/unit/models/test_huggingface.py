"""What adapting a transformers model changes; what it computes is checked by the contract."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from forerun.errors import InvalidModel, InvalidRequest, NotEnoughMemory
from forerun.models.base import Context, pack
from forerun.models.checkpoint import ModelFiles
from forerun.models.huggingface import adapt, read_weights
from forerun.theory.tree import TokenTree


def network() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def gpt2(num_positions: int) -> GPT2LMHeadModel:
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 10, "n_positions": num_positions}
    config = GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, initializer_range=0.3)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config).eval()


def test_unsupported_models_are_refused():
    config = BloomConfig(hidden_size=8, n_layer=1, n_head=2, vocab_size=10)
    with pytest.raises(InvalidModel, match="BloomForCausalLM is not supported"):
        adapt(BloomForCausalLM(config), num_slots=1, max_context=8)


def test_a_table_of_positions_bounds_the_context():
    with pytest.raises(InvalidRequest, match="max_context is 9; GPT2LMHeadModel has 8 positions"):
        adapt(gpt2(num_positions=8), num_slots=1, max_context=9)


def test_rows_staged_past_a_table_of_positions_disturb_nothing():
    """A tree near the end of the context has nodes that could never be committed."""
    network = gpt2(num_positions=8)
    model = adapt(copy.deepcopy(network), num_slots=1, max_context=8)
    context = Context(model.store, list(range(7)))
    tokens = torch.tensor([*range(7), 7, 8, 9])
    batch = pack([context.span(7, TokenTree((-1, 0, -1)))], tokens, [6, 7, 9], model.device)
    logits = model.forward(batch).logits
    for row, last in enumerate([[], [7], [9]]):
        expected = network(torch.tensor([[*range(7), *last]])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


def test_nothing_is_dropped_out_and_parameters_may_still_be_trained():
    model = adapt(network().train().requires_grad_(True), num_slots=1, max_context=8)
    assert not any(module.training for module in model.network.modules())
    assert all(parameter.requires_grad for parameter in model.network.parameters())


def test_head_sees_only_wanted_rows():
    model = adapt(network(), num_slots=1, max_context=64)
    sizes = []
    head = model.network.get_output_embeddings()
    head.register_forward_hook(lambda _, inputs, __: sizes.append(inputs[0].shape[:-1].numel()))
    context = Context(model.store, list(range(40)))
    for wanted in ([39], []):
        model.forward(pack([context.span(40)], torch.arange(40), wanted, model.device))
    assert sizes == [1, 0]


def test_sequence_longer_than_its_slot_is_refused():
    model = adapt(network(), num_slots=1, max_context=8, max_staged_rows=2)
    context = Context(model.store, list(range(11)))
    with pytest.raises(NotEnoughMemory, match="would hold 11 rows; there is room for 8 tokens"):
        model.forward(pack([context.span(11)], torch.arange(11), [], model.device))


def test_bf16_is_close_to_fp32():
    logits = []
    for each in (network(), network().bfloat16()):
        model = adapt(each, num_slots=1, max_context=64)
        context = Context(model.store, [1, 2, 3])
        batch = pack(
            [context.span(3, TokenTree((-1, -1, 0)))], torch.arange(1, 7), range(6), model.device
        )
        logits.append(model.forward(batch).logits)
    exact, rounded = logits
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).abs().max() < 0.05 * exact.abs().max()


def test_a_configuration_of_more_than_is_stored_takes_no_memory(tmp_path, monkeypatch):
    network().save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings["intermediate_size"] *= 1000
    (tmp_path / "config.json").write_text(json.dumps(settings))
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", None)
    with pytest.raises(InvalidModel, match=r"describes \d+ parameters, and \d+ are stored"):
        read_weights(ModelFiles.open(tmp_path), torch.float32)
