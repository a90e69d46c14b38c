"""AdamW and its learning rate: a function of settings and step, so there is no schedule to save."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW, Optimizer

from forerun.align.config import TrainingConfig

__all__ = ["learning_rate_at", "make_optimiser", "set_learning_rate"]

FINAL_SHARE = 0.1
"""What is left of the peak at the end."""
BETAS = (0.9, 0.95)


def make_optimiser(module: nn.Module, config: TrainingConfig) -> AdamW:
    """AdamW over what is trained; matrices decay, norms and biases do not."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return AdamW(filled, lr=config.learning_rate, betas=BETAS, fused=True)


def learning_rate_at(step: int, config: TrainingConfig) -> float:
    """Learning rate of a step counted from 0: up in a line, then down half a cosine to a tenth."""
    warmup_steps = math.ceil(config.warmup_share * config.num_steps)
    if step < warmup_steps:
        return config.learning_rate * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, config.num_steps - 1 - warmup_steps)
    left = (1 + math.cos(math.pi * min(1.0, done))) / 2
    return config.learning_rate * (FINAL_SHARE + (1 - FINAL_SHARE) * left)


def set_learning_rate(optimiser: Optimizer, learning_rate: float) -> None:
    """The same rate for all groups."""
    for group in optimiser.param_groups:
        group["lr"] = learning_rate
