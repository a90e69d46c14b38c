"""Widen a trained Llama-shaped model to twice its width without changing its output.

The wide model carries two copies of every hidden value. A weight that reads a pair of copies is
split between them, plus noise of opposite signs that cancels while the copies are equal: training
can tell the copies apart from the first step, and the loss starts where the narrow model's ended.

Source: Samragh et al. 2024 (2409.12903), HyperCloning with cancelling noise.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

NOISE_SHARE = 0.5  # standard deviation of the cancelling noise, in those of the halved weight


def widen(narrow: LlamaForCausalLM, wide: LlamaForCausalLM, seed: int) -> None:
    """Overwrite the weights of `wide`, whose every width is twice that of `narrow`.

    Raises:
        ValueError: a weight of `wide` has a shape that is not twice that of `narrow`.
    """
    generator = torch.Generator().manual_seed(seed)
    targets = dict(wide.named_parameters())
    with torch.no_grad():
        for name, weight in narrow.named_parameters():
            grown = widened(name, weight.float(), generator)
            if targets[name].shape != grown.shape:
                raise ValueError(
                    f"{name}: {tuple(targets[name].shape)} is not twice {tuple(weight.shape)}"
                )
            targets[name].copy_(grown)


def widened(name: str, weight: Tensor, generator: torch.Generator) -> Tensor:
    """One weight of the wide model: norms and embeddings are copied, matrices split and copied."""
    if name == "model.norm.weight":
        return weight.repeat(2) / 2  # the tied head reads both copies, so the norm halves them
    if weight.ndim == 1:
        return weight.repeat(2)
    if "embed_tokens" in name:
        return weight.repeat(1, 2)
    half = weight.repeat(2, 1) / 2
    noise = torch.empty_like(half).normal_(generator=generator) * half.std() * NOISE_SHARE
    return torch.cat([half + noise, half - noise], dim=1)
