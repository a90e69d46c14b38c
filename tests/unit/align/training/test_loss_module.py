"""One forward pass for draft and loss: the mean of what the model itself says, packed or not."""

from __future__ import annotations

import pytest
import torch
from tests import tiny, training
from torch import Tensor

from forerun.align.methods.draft_model import DraftLoss
from forerun.align.objectives import OBJECTIVES
from forerun.align.samples import PackedBatch

TRAINED = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "gpt-neox", "olmo2", "phi3"]


def by_hand(module: DraftLoss, name: str) -> tuple[Tensor, Tensor]:
    """Sums of loss and alpha, sample by sample, from the logits the model gives itself."""
    teacher = training.TableTeacher()
    loss, alpha = torch.zeros(()), torch.zeros(())
    for sample in training.samples(12):
        ids = torch.tensor(sample.token_ids)
        log_draft = module.model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        for start, end in sample.spans:
            for place in range(start - 1, end - 1):
                target = teacher.table[ids[place]]
                rows = {"ce": -log_draft[place, ids[place + 1]]}
                rows["fkl"] = (target * (target.log() - log_draft[place])).sum()
                loss = loss + rows[name]
                alpha = alpha + torch.minimum(target, log_draft[place].exp()).sum()
    return loss, alpha


def batch() -> PackedBatch:
    packing = training.packing(12)
    return packing.batch(0, packing.rows_per_epoch)


@pytest.mark.parametrize("family", TRAINED)
def test_packed_rows_say_what_the_model_says(family: str) -> None:
    model = tiny.network(family, seed=2, scale=0.2).requires_grad_(True)
    module = DraftLoss(model, OBJECTIVES["fkl"], 1.0)
    rows = batch()
    loss, alpha = module(rows, training.TableTeacher().rows(rows))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    expected, expected_alpha = by_hand(module, "fkl")
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert float(alpha) == pytest.approx(expected_alpha.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            scale = float(parameter.grad.abs().max())
            torch.testing.assert_close(
                gradients[name], parameter.grad, rtol=1e-3, atol=1e-4 * scale + 1e-6, msg=name
            )


def test_a_head_tied_to_the_embedding_gets_both_gradients() -> None:
    model = tiny.network(seed=2, scale=0.2).requires_grad_(True)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    assert model.lm_head.weight is model.model.embed_tokens.weight
    module = DraftLoss(model, OBJECTIVES["ce"], 1.0)
    loss, alpha = module(batch(), None)
    loss.backward()
    found = model.lm_head.weight.grad.clone()
    model.zero_grad()
    by_hand(module, "ce")[0].backward()
    torch.testing.assert_close(found, model.lm_head.weight.grad, rtol=1e-3, atol=1e-3)
    assert float(alpha) == 0
