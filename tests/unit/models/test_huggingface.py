"""What adapting a transformers model changes; what it computes is checked by the contract."""

from __future__ import annotations

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from forerun.errors import InvalidModel, NotEnoughMemory
from forerun.models.context import Context, pack
from forerun.models.huggingface import adapt
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


def test_unsupported_models_are_refused():
    config = GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=10, n_positions=8)
    with pytest.raises(InvalidModel, match="GPT2LMHeadModel is not supported"):
        adapt(GPT2LMHeadModel(config), num_slots=1, max_context=8)


def test_nothing_is_left_to_train_or_to_drop_out():
    model = adapt(network().train(), num_slots=1, max_context=8)
    assert not model.decoder.training
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())


def test_head_sees_only_wanted_rows():
    model = adapt(network(), num_slots=1, max_context=64)
    sizes = []
    model.head.register_forward_hook(lambda _, inputs, __: sizes.append(len(inputs[0])))
    context = Context(model.store, list(range(40)))
    for wanted in ([39], []):
        model.forward(pack([context.span(40)], torch.arange(40), wanted, model.device))
    assert sizes == [1]


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
