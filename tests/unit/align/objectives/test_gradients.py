"""Every objective against its gradient in closed form, in fp64.

p is the target's distribution, q the draft's, z its logits. Derived by hand from the definitions:
for a loss L(q) with g_i = dL/dq_i, the softmax gives dL/dz_i = q_i (g_i - sum_j q_j g_j).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.align.objectives.distributions import (
    argmax_distribution,
    dense_distribution,
    normal,
    truncated_distribution,
)
from torch import Tensor

from forerun.align.config import ObjectiveName
from forerun.align.objectives import (
    OBJECTIVES,
    SparseDistribution,
    TargetDistribution,
    dense_probs,
)

ROWS, VOCAB = 7, 23
NAMES: tuple[ObjectiveName, ...] = ("ce", "fkl", "nla")
DISTRIBUTIONS = {
    "dense": dense_distribution,
    "truncated": truncated_distribution,
    "argmax": argmax_distribution,
}

Closed = Callable[[Tensor, Tensor, Tensor], Tensor]


def of_ce(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return q - torch.nn.functional.one_hot(labels, VOCAB)


def of_fkl(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return p.sum(-1, keepdim=True) * q - p


def of_tv(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    below = (q < p).double()
    return -q * (below - (below * q).sum(-1, keepdim=True))


def alpha(q: Tensor, p: Tensor) -> Tensor:
    return torch.where(q < p, q, p).sum(-1, keepdim=True)


def of_nla(q: Tensor, p: Tensor, labels: Tensor) -> Tensor:
    return of_tv(q, p, labels) / alpha(q, p)


CLOSED: dict[str, Closed] = {
    "ce": of_ce,
    "fkl": of_fkl,
    "nla": of_nla,
}


def losses_of(
    name: ObjectiveName, logits: Tensor, distribution: TargetDistribution | None
) -> Tensor:
    objective = OBJECTIVES[name]
    return objective.losses(logits, distribution, torch.arange(ROWS) * 3 % VOCAB)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_gradient_is_the_closed_form(name: ObjectiveName, distribution: str) -> None:
    target = DISTRIBUTIONS[distribution](ROWS, VOCAB)
    logits = normal(ROWS, VOCAB, seed=0, scale=2).requires_grad_()
    (found,) = torch.autograd.grad(losses_of(name, logits, target).sum(), logits)
    draft, probs = logits.detach().softmax(-1), dense_probs(target, VOCAB).double()
    expected = CLOSED[name](draft, probs, torch.arange(ROWS) * 3 % VOCAB)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_perfect_draft_has_nothing_to_learn_on_average(name: ObjectiveName) -> None:
    """Of CE over labels drawn from the target, which is its expectation over p."""
    logits = normal(ROWS, VOCAB, seed=0).requires_grad_()
    distribution = dense_distribution(ROWS, VOCAB)
    target = type(distribution)(target_probs=logits.detach().softmax(-1).float())
    if name == "ce":
        everything = torch.stack(
            [
                OBJECTIVES["ce"].losses(logits, None, torch.full((ROWS,), token))
                for token in range(VOCAB)
            ],
            1,
        )
        losses = (everything * target.target_probs).sum(1)
    else:
        losses = losses_of(name, logits, target)
        assert losses.abs().max() < 1e-6
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    # Rounding p to fp32 decides where q < p holds, which moves its subgradient within [-q, q].
    if name != "nla":
        assert gradient.abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_at_temperature_0_the_argmax_alone_is_the_whole_distribution(name: ObjectiveName) -> None:
    sparse = argmax_distribution(ROWS, VOCAB)
    dense = type(dense_distribution(1, 1))(target_probs=dense_probs(sparse, VOCAB))
    logits = normal(ROWS, VOCAB, seed=0)
    torch.testing.assert_close(losses_of(name, logits, sparse), losses_of(name, logits, dense))


def test_at_temperature_0_fkl_and_log_acceptance_are_ce_on_the_argmax() -> None:
    distribution = argmax_distribution(ROWS, VOCAB)
    logits = normal(ROWS, VOCAB, seed=0, scale=4)
    surprise = -logits.log_softmax(-1).gather(1, distribution.ids)[:, 0]
    for name in ("fkl", "nla"):
        torch.testing.assert_close(losses_of(name, logits, distribution), surprise)


@pytest.mark.parametrize("name", NAMES)
def test_distributions_without_anything_in_common_leave_gradients_finite(
    name: ObjectiveName,
) -> None:
    logits = torch.full((1, VOCAB), -300.0, dtype=torch.float32)
    logits[0, 0] = 300.0
    logits.requires_grad_()
    distribution = SparseDistribution(ids=torch.tensor([[5]]), shares=torch.ones(1, 1))
    objective = OBJECTIVES[name]
    loss = objective.losses(logits, distribution, torch.tensor([5]))
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    assert bool(loss.isfinite().all()) and bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", [name for name in NAMES if name != "ce"])
def test_a_teacher_is_needed(name: ObjectiveName) -> None:
    with pytest.raises(ValueError, match="needs a teacher"):
        losses_of(name, normal(ROWS, VOCAB, seed=0), None)
