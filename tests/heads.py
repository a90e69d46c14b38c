"""Tiny EAGLE-3 heads and DFlash networks for tests, and slow drafting with them, without caches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from forerun.drafters.dflash.network import DFlashConfig, DFlashNetwork
from forerun.drafters.eagle3.drafter import Eagle3Drafter
from forerun.drafters.eagle3.head import Eagle3Config, Eagle3Head
from forerun.drafters.eagle3.load import model_of
from forerun.drafters.heads import over_target_vocabulary, rotate
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


def dflash_network(
    target: LanguageModel, *, seed: int = 0, scale: float = 0.3, **changes: Any
) -> DFlashNetwork:
    """A random network over every third token of the target, or over all with its matrix."""
    all_tokens = not changes.get("own_output", True)
    fields = {
        "target_hidden_size": target.hidden_size,
        "target_vocab_size": target.vocab_size,
        "feature_layers": LAYERS,
        "draft_vocab_size": target.vocab_size // (1 if all_tokens else 3),
        "hidden_size": target.hidden_size,
        "intermediate_size": 48,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "num_layers": 2,
        "max_positions": target.max_context,
        "block_size": 5,
        "mask_token_id": 7,
        "windows": (None, None),
        "causal": (False, False),
    }
    config = DFlashConfig(**{**fields, **changes})
    generator = torch.Generator().manual_seed(seed)
    target_ids = torch.randperm(target.vocab_size, generator=generator)[: config.draft_vocab_size]
    network = DFlashNetwork(config, target_ids.sort().values)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=scale, generator=generator)
    return network.eval().requires_grad_(False)


@torch.inference_mode()
def slow_block(
    network: DFlashNetwork, target: LanguageModel, ids: list[int], features: Tensor
) -> Tensor:
    """Logits over the target's tokens of a block after a text, with masks spelled out.

    Args:
        network: the network.
        target: its target.
        ids: committed tokens, of which the last is the anchor.
        features: of all rows but the anchor's, in the network's order.
    """
    config, start = network.config, len(ids) - 1
    embed = network.embed_tokens or target.embed
    tokens = torch.tensor([ids[-1], *[config.mask_token_id] * config.max_tokens])
    rows = embed(tokens).to(network.fc.weight.dtype)
    fused = network.hidden_norm(network.fc(features.flatten(1)))
    places = torch.arange(start + config.block_size)
    cos, sin = network.rotations(places, rows.dtype)
    for index, layer in enumerate(network.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(rows)
        queries = attention.q_norm(attention.q_proj(normed).view(len(rows), -1, config.head_dim))
        together = torch.cat([fused, normed])
        keys = attention.k_norm(attention.k_proj(together).view(len(places), -1, config.head_dim))
        values = attention.v_proj(together).view(len(places), -1, config.head_dim)
        queries, keys = rotate(queries, cos[start:], sin[start:]), rotate(keys, cos, sin)
        mask = torch.ones(len(rows), len(places), dtype=torch.bool)
        for row in range(len(rows)):
            for place in places.tolist():
                window = config.windows[index]
                if place < start and window is not None:
                    mask[row, place] = start - place < window
                if place >= start and config.causal[index]:
                    mask[row, place] = place - start <= row
        spread = [part.repeat_interleave(2, 1).transpose(0, 1) for part in (keys, values)]
        scores = queries.transpose(0, 1) @ spread[0].transpose(1, 2) * config.head_dim**-0.5
        attended = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ spread[1]
        rows = rows + attention.o_proj(attended.transpose(0, 1).flatten(1))
        rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
    states = network.norm(rows[1:])
    if network.lm_head is None:
        return target.head(states)
    return over_target_vocabulary(network.lm_head(states), network.target_ids, target.vocab_size)
