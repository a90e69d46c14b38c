"""Tiny EAGLE-3 heads for tests, and their drafting by a slow loop without a cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head
from forerun.drafters.eagle3.load import model_of
from forerun.models.base import LanguageModel

LAYERS = (1, 2, 4)


def eagle3_head(
    target: LanguageModel,
    *,
    seed: int = 0,
    draft_vocab_size: int | None = None,
    scale: float = 0.3,
    **changes: Any,
) -> Eagle3Head:
    """A random head over every third token of the target, unless a size is given."""
    fields = {
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "feature_layers": LAYERS,
        "draft_vocab_size": draft_vocab_size or target.vocab_size // 3,
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "max_positions": target.max_context,
    }
    config = Eagle3Config(**{**fields, **changes})
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.randperm(target.vocab_size, generator=generator)[: config.draft_vocab_size]
    head = Eagle3Head(config, target_ids.sort().values)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=scale, generator=generator)
    return head.eval().requires_grad_(False)


def eagle3_drafter(target: LanguageModel, head: Eagle3Head) -> Eagle3Drafter:
    return Eagle3Drafter(model_of(head, target), head.config.feature_layers, target.vocab_size)


def causal(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of rows [rows, heads, dim] over themselves and those before."""
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        is_causal=True,
        enable_gqa=True,
    )
    return attended[0].transpose(0, 1)


@torch.inference_mode()
def slow_probs(
    head: Eagle3Head, target: LanguageModel, ids: list[int], drafted: list[int], features: Tensor
) -> Tensor:
    """Distribution at temperature 1 behind committed and drafted tokens, over the target's ids.

    Every row is computed again, in order, for every row fed.

    Args:
        head: the head.
        target: its target.
        ids: committed tokens.
        drafted: draft tokens behind them.
        features: of all rows but the last token's, in the head's order.
    """
    states = [*head.fuse(features)]
    tokens = torch.tensor([*ids[1:], *drafted])
    embedding = head.embed_tokens or target.embed
    for _ in range(len(drafted) + 1):
        num_rows = len(states)
        embedded = embedding(tokens[:num_rows]).to(states[0].dtype)
        output = head(embedded, torch.stack(states), torch.arange(num_rows), causal)
        states.append(head.fed_back(output[-1]))
    probs = torch.zeros(target.vocab_size)
    probs[head.target_ids] = head.logits(output[-1]).float().softmax(-1)
    return probs
