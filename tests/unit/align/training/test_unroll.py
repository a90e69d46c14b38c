"""The unroll of an EAGLE-3 head is drafting, done for all rows of a text at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from forerun.align.methods.base import PassLoss, learned_passes
from forerun.align.methods.eagle3 import UnrolledEagle3, unroll
from forerun.align.objectives import OBJECTIVES
from forerun.align.samples import PackedBatch, Packing, Sample
from forerun.align.target import TargetHead
from forerun.align.teachers import StateRows
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head
from forerun.sampling.config import SamplingParams

VOCAB, DRAFT_VOCAB, WIDTH, LAYERS, PASSES = 30, 12, 16, 3, 4
SHAPE = Eagle3Config(
    target_hidden_size=WIDTH,
    target_vocab_size=VOCAB,
    feature_layers=(2, 3, 4),
    draft_vocab_size=DRAFT_VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=4,
)
FLAGS = [{}, {"norm_output": True}, {"norm_before_residual": True, "fc_norm": True}]
TARGET_IDS = torch.tensor(sorted([0, 1, 2, 3, 5, 8, 13, 17, 21, 22, 27, 29]))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def head_of(**flags: bool) -> Eagle3Head:
    head = Eagle3Head(replace(SHAPE, **flags), TARGET_IDS)
    source = generator(1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(0, 0.3, generator=source)
            if parameter.ndim == 1:
                parameter.add_(1)
    return head.double()


def texts() -> tuple[Packing, PackedBatch]:
    """Texts of several lengths, several in a row, one with two learned spans."""
    source = generator(2)
    found = []
    for index, (length, spans) in enumerate(
        [(9, ((4, 9),)), (12, ((3, 5), (8, 12))), (7, ((1, 7),)), (2, ((1, 2),)), (16, ((9, 16),))]
    ):
        ids = torch.empty(length).random_(0, VOCAB, generator=source).long().tolist()
        found.append(Sample(prompt_hash=f"{index:016x}", token_ids=tuple(ids), spans=spans))
    packing = Packing(found, window=16, seed=0)
    return packing, packing.batch(0, packing.rows_per_epoch)


def features_of(batch: PackedBatch) -> Tensor:
    shape = (*batch.ids.shape, LAYERS, WIDTH)
    return torch.empty(shape, dtype=torch.float64).normal_(generator=generator(3))


def embedding() -> Tensor:
    return torch.empty(VOCAB, WIDTH, dtype=torch.float64).normal_(generator=generator(4))


class Growing:
    """Attention of plain drafting: a row sees all keys so far and its own."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.keys.append(key)
        self.values.append(value)
        groups = len(query) // len(key)
        keys = torch.stack(self.keys).repeat_interleave(groups, 1)
        values = torch.stack(self.values).repeat_interleave(groups, 1)
        scores = torch.einsum("hd,nhd->hn", query, keys) * query.shape[-1] ** -0.5
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), values)


def drafted(head: Eagle3Head, ids: list[int], features: Tensor, last: int) -> list[Tensor]:
    """Draft row by row from row `last` of one text: the outputs of the passes it has tokens for."""
    table, attend, outputs = embedding(), Growing(), []
    output = torch.empty(0)
    for row in range(last + 1):
        state = head.fuse(features[row])
        output = head(table[ids[row + 1]], state, torch.tensor(row), attend)
    outputs.append(output)
    for number in range(1, PASSES):
        if last + number + 1 >= len(ids):
            break
        position = torch.tensor(last + number)
        token = table[ids[last + number + 1]]
        output = head(token, head.fed_back(output), position, attend)
        outputs.append(output)
    return outputs


def each_row(packing: Packing, batch: PackedBatch) -> list[tuple[int, int, int, int]]:
    """Row and place in the batch, sample and place in the sample, of all tokens."""
    found = []
    for row, place in (batch.samples >= 0).nonzero().tolist():
        sample = int(batch.samples[row, place])
        found.append((row, place, sample, int(batch.positions[row, place])))
    return found


def test_rows_learn_where_the_token_after_next_is_learned():
    packing, batch = texts()
    learning = learned_passes(batch, PASSES)
    for row, place, sample, position in each_row(packing, batch):
        spans = packing.samples[sample].spans
        for number in range(PASSES):
            predicted = position + number + 2
            expected = any(a <= predicted < b for a, b in spans)
            assert bool(learning[number, row, place]) == expected
    assert not learning[:, batch.samples < 0].any()


@pytest.mark.parametrize("flags", FLAGS)
def test_unroll_equals_drafting_row_by_row(flags):
    packing, batch = texts()
    head, features, table = head_of(**flags), features_of(batch), embedding()
    learning = learned_passes(batch, PASSES)
    outputs = unroll(head, lambda tokens: table[tokens], batch, features, learning)
    compared = 0
    for number, output in enumerate(outputs):
        places = learning[number].nonzero().tolist()
        assert len(places) == len(output)
        for (row, place), found in zip(places, output, strict=True):
            sample, position = int(batch.samples[row, place]), int(batch.positions[row, place])
            start = place - position
            ids = list(packing.samples[sample].token_ids)
            own = features[row, start : start + len(ids)]
            expected = drafted(head, ids, own, position)[number]
            torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-8)
            compared += 1
    assert compared > 40


def rows_of(batch: PackedBatch) -> StateRows:
    """Features, and a random state per learned place under a random output layer."""
    source, features = generator(5), features_of(batch)
    return StateRows(
        hidden=torch.empty(int(batch.predicts.sum()), WIDTH).normal_(generator=source),
        head=TargetHead(weight=torch.empty(VOCAB, WIDTH).normal_(0, 0.5, generator=source)),
        sampling=SamplingParams(temperature=1.0),
        states=torch.cat([features, features[:, :, :1]], dim=2),
    )


def slow_loss(
    head: Eagle3Head, row_loss: Callable[[Tensor, Tensor], Tensor], decay: float
) -> float:
    """The loss by drafting from every row: weights fall by `decay` from pass to pass."""
    packing, batch = texts()
    rows = rows_of(batch)
    teacher = rows.head.logits(rows.hidden).softmax(-1)
    ranks = {place: n for n, place in enumerate(map(tuple, batch.predicts.nonzero().tolist()))}
    weights = torch.tensor([decay**number for number in range(PASSES)])
    weights = weights / weights.sum()
    total = torch.zeros((), dtype=torch.float64)
    for row, place, sample, position in each_row(packing, batch):
        ids = list(packing.samples[sample].token_ids)
        if position + 2 > len(ids) - 1:
            continue
        start = place - position
        outputs = drafted(head, ids, rows.features[row, start : start + len(ids)], position)
        for number, output in enumerate(outputs):
            rank = ranks.get((row, place + number + 1))
            if position + number + 2 < len(ids) and rank is not None:
                probs = teacher[rank][TARGET_IDS].double()
                total = total + weights[number] * row_loss(head.logits(output), probs)
    return float(total.detach())


def forward_kl(logits: Tensor, probs: Tensor) -> Tensor:
    return (probs * (probs.log() - logits.log_softmax(-1))).sum()


@pytest.mark.parametrize("decay", [0.8, 1.0])
def test_loss_is_the_weighted_sum_over_passes(decay):
    _, batch = texts()
    head = head_of()
    objective = OBJECTIVES["fkl"]
    model = UnrolledEagle3(head, embedding())
    model.embedding = model.embedding.double()
    module = PassLoss(model, objective, temperature=1.0, num_passes=PASSES, decay=decay)
    loss, alpha = module(batch, rows_of(batch))
    assert float(loss.detach()) == pytest.approx(slow_loss(head, forward_kl, decay), rel=1e-5)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in head.parameters())

    def overlap(logits: Tensor, probs: Tensor) -> Tensor:
        return torch.minimum(logits.softmax(-1), probs).sum()

    assert float(alpha) == pytest.approx(slow_loss(head, overlap, 1.0), rel=1e-5)


def test_a_later_row_changes_nothing():
    """Attention of every pass is causal: a changed last token only reaches rows that embed it."""
    _, batch = texts()
    head, features, table = head_of(), features_of(batch), embedding()
    learning = torch.ones_like(learned_passes(batch, PASSES))
    ids = batch.ids.clone()
    ids[0, -1] = (ids[0, -1] + 1) % VOCAB
    before = unroll(head, lambda tokens: table[tokens], batch, features, learning)
    after = unroll(head, lambda tokens: table[tokens], replace(batch, ids=ids), features, learning)
    width = batch.ids.shape[1]
    for number in range(PASSES):
        same = (before[number] == after[number]).all(-1).view(-1, width)
        assert same[0, : width - number - 2].all()
        assert not same[0, width - number - 2]
