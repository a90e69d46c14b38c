from __future__ import annotations

import pytest
import torch
from tests.unit.align.objectives.distributions import (
    GivenRows,
    argmax_distribution,
    dense_distribution,
    normal,
)
from torch import Tensor

from forerun.align.config import ObjectiveName
from forerun.align.objectives import (
    CHUNK_ROWS,
    OBJECTIVES,
    DraftHead,
    LearnedRows,
    TargetDistribution,
    chunked_loss,
    dense_probs,
)

ROWS, WIDTH, VOCAB = 2 * CHUNK_ROWS + 3, 6, 29
NAMES: tuple[ObjectiveName, ...] = ("ce", "fkl", "nla")


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((ROWS, WIDTH), (VOCAB, WIDTH), (VOCAB,))
    made = [normal(*shape, seed=seed).to(dtype) for seed, shape in enumerate(shapes)]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2].requires_grad_()


def rows_of(
    hidden: Tensor, distribution: TargetDistribution, weights: Tensor | None = None
) -> LearnedRows:
    labels = torch.arange(ROWS) * 5 % VOCAB
    return LearnedRows(
        hidden=hidden, labels=labels, teacher=GivenRows(distribution), weights=weights
    )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_loss_of_all_logits_at_once(name: ObjectiveName, temperature: float) -> None:
    hidden, weight, bias = tensors()
    distribution = (
        dense_distribution(ROWS, VOCAB) if temperature else argmax_distribution(ROWS, VOCAB)
    )
    weights = normal(ROWS, seed=9).abs()
    rows, head = rows_of(hidden, distribution, weights), DraftHead(weight=weight, bias=bias)
    objective = OBJECTIVES[name]
    found, _ = chunked_loss(rows, head, objective, temperature=temperature)
    logits = (hidden @ weight.T + bias) / (temperature or 1)
    expected = objective.losses(logits, distribution, rows.labels) @ weights
    torch.testing.assert_close(found, expected)
    leaves = (hidden, weight, bias)
    # Scaled from above, as dividing by the rows of all processes does.
    torch.testing.assert_close(
        torch.autograd.grad(found / 7, leaves), torch.autograd.grad(expected / 7, leaves)
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_comes_with_it(temperature: float) -> None:
    hidden, weight, _ = tensors()
    distribution = dense_distribution(ROWS, VOCAB)
    rows, head = rows_of(hidden, distribution), DraftHead(weight=weight)
    objective = OBJECTIVES["ce"]
    _, found = chunked_loss(rows, head, objective, temperature=temperature)
    logits = (hidden @ weight.T).detach()
    probs = dense_probs(distribution, VOCAB).double()
    if temperature == 0:
        expected = probs[torch.arange(ROWS), logits.argmax(-1)]
    else:
        expected = torch.minimum(logits.softmax(-1), probs).sum(-1)
    torch.testing.assert_close(found, expected.sum(), rtol=1e-5, atol=1e-6)


def test_what_is_frozen_gets_no_gradient() -> None:
    hidden, weight, _ = tensors()
    rows, objective = (
        rows_of(hidden, dense_distribution(ROWS, VOCAB)),
        OBJECTIVES["nla"],
    )
    found, _ = chunked_loss(rows, DraftHead(weight=weight.detach()), objective, temperature=1.0)
    found.backward()
    assert hidden.grad is not None
    with torch.no_grad():
        unasked, _ = chunked_loss(rows, DraftHead(weight=weight), objective, temperature=1.0)
    assert not unasked.requires_grad
    torch.testing.assert_close(unasked, found.detach())


def test_a_tied_head_gets_both_gradients() -> None:
    _, weight, _ = tensors()
    ids = torch.arange(ROWS) % VOCAB
    distribution = dense_distribution(ROWS, VOCAB)
    objective = OBJECTIVES["fkl"]
    rows = rows_of(weight[ids], distribution)
    found, _ = chunked_loss(rows, DraftHead(weight=weight), objective, temperature=1.0)
    expected = objective.losses(weight[ids] @ weight.T, distribution, rows.labels).sum()
    torch.testing.assert_close(
        torch.autograd.grad(found, weight), torch.autograd.grad(expected, weight)
    )


def test_under_autocast_products_are_bf16_and_gradients_keep_their_dtype() -> None:
    hidden, weight, _ = tensors(torch.float32)
    distribution = dense_distribution(ROWS, VOCAB)
    objective = OBJECTIVES["fkl"]
    rows, head = rows_of(hidden, distribution), DraftHead(weight=weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = chunked_loss(rows, head, objective, temperature=1.0)
    assert found.dtype == torch.float32
    found.backward()
    exact, _ = chunked_loss(rows, head, objective, temperature=1.0)
    expected = torch.autograd.grad(exact, (hidden, weight))
    assert 0 < float((found / exact - 1).detach().abs()) < 1e-2
    for leaf, gradient in zip((hidden, weight), expected, strict=True):
        assert leaf.grad is not None and leaf.grad.dtype == torch.float32
        assert float((leaf.grad - gradient).norm() / gradient.norm()) < 2e-2


def test_no_rows_are_no_loss() -> None:
    hidden, weight, _ = tensors()
    empty = LearnedRows(
        hidden=hidden[:0], labels=torch.arange(0), teacher=GivenRows(dense_distribution(0, VOCAB))
    )
    objective = OBJECTIVES["nla"]
    found, _ = chunked_loss(empty, DraftHead(weight=weight), objective, temperature=1.0)
    found.backward()
    assert float(found.detach()) == 0
    assert weight.grad is not None and not weight.grad.any()


def test_a_missing_teacher_is_named() -> None:
    hidden, weight, _ = tensors()
    rows = LearnedRows(hidden=hidden, labels=torch.zeros(ROWS, dtype=torch.int64))
    head, text_alone = (
        DraftHead(weight=weight),
        OBJECTIVES["ce"],
    )
    chunked_loss(rows, head, text_alone, temperature=1.0)
    with pytest.raises(ValueError, match="nla needs a teacher"):
        chunked_loss(rows, head, OBJECTIVES["nla"], temperature=1.0)
