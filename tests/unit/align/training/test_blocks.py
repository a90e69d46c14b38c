"""All blocks of a window, learned in one pass, are the blocks that are drafted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests import heads, tiny
from tests.unit.drafters.test_dflash import CAUSAL, SLIDING, features_of

from forerun.align.methods.base import learned_passes
from forerun.align.methods.dflash import choose_mask, compute_blocks
from forerun.align.samples import Packing, Sample
from forerun.drafters.base import DraftRequest, StepOutcome
from forerun.drafters.dflash.drafter import DFlashDrafter
from forerun.sampling.config import SamplingParams


def packing() -> Packing:
    """Texts of several lengths, several in a row, one with two learned spans."""
    source = torch.Generator().manual_seed(2)
    found = []
    for index, (length, spans) in enumerate(
        [(9, ((4, 9),)), (12, ((3, 5), (8, 12))), (7, ((1, 7),)), (2, ((1, 2),)), (16, ((9, 16),))]
    ):
        ids = torch.empty(length).random_(0, tiny.VOCAB_SIZE, generator=source).long().tolist()
        found.append(Sample(prompt_hash=f"{index:016x}", token_ids=tuple(ids), spans=spans))
    return Packing(found, window=16, seed=0)


def drafted(drafter: DFlashDrafter, ids: list[int], features: torch.Tensor) -> torch.Tensor:
    """The logits of a block after a text, whose rows arrive in two steps."""
    request = DraftRequest(
        request_id="one",
        ids=ids,
        num_prompt=1,
        params=SamplingParams(),
        noise_key=1,
        history=None,
        coupled=False,
    )
    half = len(features) // 2
    for first, end in ((0, half), (half, len(features))):
        rows = features[first:end]
        drafter.observe(
            [StepOutcome(request=request, first_row=first, num_rows=len(rows), features=rows)]
        )
    assert drafter.is_ready(request)
    with torch.inference_mode():
        logits = drafter.predict([request], drafter.num_positions)[:, 0]
    drafter.forget("one")
    return logits


@pytest.mark.parametrize("changes", [{}, SLIDING, CAUSAL, {"own_output": False}])
def test_training_equals_drafting(changes):
    target = tiny.adapted(tiny.network(num_layers=4))
    network = heads.dflash_network(target, **changes)
    drafter = DFlashDrafter(network, target)
    data = packing()
    batch = data.batch(0, data.rows_per_epoch)
    learning = learned_passes(batch, drafter.num_positions)
    active = learning.any(0)
    layers = network.config.feature_layers
    features = torch.zeros(*batch.ids.shape, len(layers), target.hidden_size)
    for row, place in (batch.positions == 0).nonzero().tolist():
        if (sample := int(batch.samples[row, place])) >= 0:
            ids = list(data.samples[sample].token_ids)
            features[row, place : place + len(ids)] = features_of(target, ids, layers)
    order = [layers.index(layer) for layer in drafter.required_features]
    table = target.embed(torch.arange(tiny.VOCAB_SIZE))
    states = compute_blocks(network, table, batch, features, active)
    output = target.head if network.lm_head is None else network.lm_head
    compared = 0
    for (row, place), state in zip(active.nonzero().tolist(), states, strict=True):
        sample, position = int(batch.samples[row, place]), int(batch.positions[row, place])
        ids = list(data.samples[sample].token_ids[: position + 2])
        own = features[row, place - position : place + 1][:, order]
        torch.testing.assert_close(output(state), drafted(drafter, ids, own), atol=1e-4, rtol=1e-4)
        compared += 1
    assert compared > 12


def test_a_block_sees_no_other_and_nothing_after_its_anchor():
    """A changed token reaches the blocks that it is the anchor of; changed features later ones."""
    target = tiny.adapted(tiny.network(num_layers=4))
    network = heads.dflash_network(target)
    data = packing()
    batch = data.batch(0, data.rows_per_epoch)
    active = learned_passes(batch, network.config.max_tokens).any(0)
    shape = (*batch.ids.shape, len(network.config.feature_layers), target.hidden_size)
    features = torch.empty(shape).normal_(generator=torch.Generator().manual_seed(1))
    table = target.embed(torch.arange(tiny.VOCAB_SIZE))
    before = compute_blocks(network, table, batch, features, active)
    row, place = active.nonzero()[3].tolist()
    ids = batch.ids.clone()
    ids[row, place + 1] = (ids[row, place + 1] + 1) % tiny.VOCAB_SIZE
    after = compute_blocks(network, table, replace(batch, ids=ids), features, active)
    assert (before != after).flatten(1).any(1).tolist() == [n == 3 for n in range(len(before))]
    features[row, place] += 1
    changed = (before != compute_blocks(network, table, batch, features, active)).flatten(1).any(1)
    alike = batch.samples[active.nonzero().T.unbind()] == batch.samples[row, place]
    later = active.nonzero()[:, 1] >= place
    assert changed.tolist() == (alike & later & (active.nonzero()[:, 0] == row)).tolist()


def test_the_mask_token_is_no_padding():
    table = torch.ones(10, 4)
    table[8:] = 1e-3
    assert choose_mask(table) == 7
