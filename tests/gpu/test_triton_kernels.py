"""Triton's kernels do what their torch counterparts do, at every shape a pass may have."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tests.recorders import Again, torch_model
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from forerun.models.base import Span, pack
from forerun.models.runner.graphs.layers import Elementwise as TorchElementwise
from forerun.models.runner.graphs.model import TorchModel
from forerun.models.runner.graphs.programs import Programs, RectanglePass
from forerun.theory.tree import NO_TREE, TokenTree

# Ulps of a result near 1: how far two right answers may lie apart.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)
WIDE = TokenTree((-1, -1, 0, 0, 1, 3, 5, 4))
SIZES = {
    "vocab_size": 50,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 1200,
}


def noise(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(*shape).normal_(generator=generator).to(device, dtype)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 48), (5, 64), (3, 2100)], ids=str)
def test_elementwise(triton_device, dtype, shape):
    from forerun.models.runner.graphs.triton_rows import TritonElementwise

    residual, update = (noise(shape, dtype, triton_device, seed) for seed in (0, 1))
    weight = noise(shape[1:], dtype, triton_device, 2)
    ours, torchs = TritonElementwise(), TorchElementwise()
    for actual, expected in zip(
        ours.add_norm(residual, update, weight, 1e-5),
        torchs.add_norm(residual, update, weight, 1e-5),
        strict=True,
    ):
        assert_close(actual, expected)
    assert_close(ours.norm(residual, weight, 1e-5), torchs.norm(residual, weight, 1e-5))
    assert_close(ours.gate(residual), torchs.gate(residual))


def network(name: str) -> PreTrainedModel:
    """Head sizes and groups that are no powers of two, too; norms of heads in qwen3."""
    if name == "qwen3":
        config = Qwen3Config(**SIZES, num_attention_heads=2, num_key_value_heads=2, head_dim=16)
        model = Qwen3ForCausalLM(config)
    else:
        heads = {"grouped": (4, 2, 12), "odd": (6, 2, 20)}[name]
        names = ("num_attention_heads", "num_key_value_heads", "head_dim")
        model = LlamaForCausalLM(LlamaConfig(**SIZES, **dict(zip(names, heads, strict=True))))
    generator = torch.Generator().manual_seed(0)
    for parameter in model.eval().requires_grad_(False).parameters():
        parameter.normal_(0, 0.2, generator=generator)
    return model


def with_triton(model: TorchModel) -> TorchModel:
    from forerun.models.runner.graphs.triton_rows import TritonElementwise, triton_attention

    assert model.programs is not None
    passes = RectanglePass(
        weights=model.weights,
        store=model.store,
        attend_rows=triton_attention,
        elementwise=TritonElementwise(),
    )
    model.programs = Programs(
        passes=passes,
        recorder=Again(),
        limits=model.programs.limits,
        unrecorded=model.programs.unrecorded,
    )
    return model


def fed(model: TorchModel, lengths: Sequence[int]) -> list[int]:
    """A slot for each of the lengths, with so many committed tokens."""
    slots = []
    for length in lengths:
        slot = model.store.reserve()
        if length:
            tokens = torch.arange(length) % 50
            spans = [Span(slot=slot, start=0, num_chain=length)]
            model.forward(pack(spans, tokens, [], model.device))
            model.store.commit(slot, range(length))
        slots.append(slot)
    return slots


@pytest.mark.parametrize("name", ["grouped", "odd", "qwen3"])
@pytest.mark.parametrize(
    ("lengths", "num_chain", "tree"),
    [
        ((5,), 1, NO_TREE),
        ((0, 300, 17), 1, WIDE),
        ((255, 256, 3), 4, NO_TREE),
        ((1100,), 2, TokenTree((-1, -1))),
        ((40,), 1, TokenTree((-1,) * 63)),
    ],
    ids=str,
)
def test_passes_equal_those_of_torch(triton_device, name, lengths, num_chain, tree):
    results = []
    for wrap in (lambda model: model, with_triton):
        model = wrap(torch_model(network(name), Again(), device=str(triton_device)))
        slots = fed(model, lengths)
        spans = [
            Span(slot=slot, start=length, num_chain=num_chain, tree=tree)
            for slot, length in zip(slots, lengths, strict=True)
        ]
        tokens = torch.arange(sum(span.num_rows for span in spans)) % 50
        scores = model.forward(pack(spans, tokens, range(len(tokens)), model.device))
        stored = [
            model.store.layer(layer)[half][slot, :, : span.start + span.num_rows]
            for layer in range(2)
            for half in range(2)
            for slot, span in zip(slots, spans, strict=True)
        ]
        results.append((scores.logits, torch.cat([part.flatten() for part in stored])))
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_what_a_slot_held_before_cannot_spread(triton_device):
    model = with_triton(torch_model(network("grouped"), Again(), device=str(triton_device)))
    (slot,) = fed(model, [0])
    for half in model.store.layer(0):
        half.fill_(float("nan"))
    spans = [Span(slot=slot, start=0, num_chain=2, tree=TokenTree((-1, -1)))]
    batch = pack(spans, torch.tensor([1, 2, 3, 4]), range(4), model.device)
    assert model.forward(batch).logits.isfinite().all()
