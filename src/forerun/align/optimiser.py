"""The optimisers of a draft: AdamW, and Muon for the inner matrices of a head."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import AdamW

BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01
"""Of matrices."""
MOMENTUM = 0.95
MUON_RATE = 5.0
"""Learning rate of matrices under Muon, over that of the parameters under AdamW. At 1 a head for a
135M target learned more slowly than under AdamW alone; see benchmarks/align/real-model.md."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic iteration that brings all singular values near 1 (Jordan et al., Muon, 2024)."""
NUM_ITERATIONS = 5


class MuonAdamW(AdamW):
    """AdamW, except for groups with `muon` set, whose momentum is orthogonalised before a step.

    Their learning rate is `MUON_RATE` times that of the group, and the root mean square of an
    update 0.2 times that, as AdamW's is of its rate (Liu et al., arXiv 2502.16982, section 2.2).
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # it takes no closure
        """Update all parameters that have a gradient."""
        groups = self.param_groups
        for group in groups:
            if group["muon"]:
                for matrix in group["params"]:
                    if matrix.grad is not None:
                        self._step_matrix(matrix, matrix.grad, MUON_RATE * group["lr"])
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrix(self, matrix: Tensor, gradient: Tensor, learning_rate: float) -> None:
        state = self.state[matrix]
        if not state:
            state["step"] = torch.zeros(())  # which AdamW expects of every parameter it restores
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        momentum.lerp_(gradient, 1 - MOMENTUM)
        direction = gradient.lerp(momentum, MOMENTUM)  # Nesterov's
        update = shard_like(orthogonalise(gather_shards(direction)), matrix)
        matrix.mul_(1 - learning_rate * WEIGHT_DECAY)
        matrix.add_(update, alpha=-0.2 * max(matrix.shape) ** 0.5 * learning_rate)


def gather_shards(tensor: Tensor) -> Tensor:
    """Return a tensor with its shards gathered; all processes must call it for the same tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Move a tensor to a parameter's device and shard it like the parameter."""
    tensor = tensor.to(like.device)
    if isinstance(like, DTensor):
        # Every process has the whole tensor, so none has to send it.
        return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
    return tensor


def orthogonalise(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Return a matrix with the same singular vectors, whose singular values are all near 1."""
    a, b, c = COEFFICIENTS
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix
    result: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(NUM_ITERATIONS):
        gram = result @ result.mT
        result = torch.addmm(result, torch.addmm(gram, gram, gram, beta=b, alpha=c), result, beta=a)
    return result.mT if matrix.shape[0] > matrix.shape[1] else result


def make_optimiser(
    module: nn.Module, learning_rate: float, muon: Iterable[nn.Parameter] = ()
) -> MuonAdamW:
    """Build the optimiser; matrices have weight decay, norms and biases do not."""
    inner = {id(parameter) for parameter in muon}
    trained = [p for p in module.parameters() if p.requires_grad]
    outer = [p for p in trained if id(p) not in inner]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if id(p) in inner], "muon": True},
        {"params": [p for p in outer if p.ndim > 1], "muon": False, "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in outer if p.ndim <= 1], "muon": False, "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return MuonAdamW(filled, lr=learning_rate, betas=BETAS, fused=True)
