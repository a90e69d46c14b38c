"""What the library computes, at its simplest: plain decoding, and the worth of a static tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.noise import position_key, request_key
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.walk import race
from forerun.theory.tree import TokenTree


def naive_tokens(
    model: TabularModel, prompt: Sequence[int], params: SamplingParams, index: int
) -> tuple[int, ...]:
    """What sample `index` of a greedy or seeded request says, from the written-down law."""
    history = History.of(params, prompt, vocab_size=model.vocab_size, eos_token_ids={tiny.EOS})
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else (tiny.EOS,))}
    key = request_key(params.seed or 0, index)
    ids = list(prompt)
    while len(ids) < len(prompt) + (params.max_tokens or 0):
        logits = model.log_probs[model.state_of(ids)][None].float()
        probs = target_probs(logits, pack_params([params]), [history.at()])
        keys = torch.tensor([position_key(key, len(ids))])
        token = int(probs.argmax() if params.greedy else race(probs, keys))
        ids.append(token)
        history.append(token)
        if token in ends and len(ids) - len(prompt) > params.min_tokens:
            break
    return tuple(ids[len(prompt) :])


def expected_static(tree: TokenTree, acceptance_by_rank: Sequence[float]) -> float:
    """Return the expected number of accepted nodes of a tree; missing ranks have probability 0."""
    reached: list[float] = []
    for node, parent in enumerate(tree.parents):
        rank = tree.children(parent).index(node)
        chance = acceptance_by_rank[rank] if rank < len(acceptance_by_rank) else 0.0
        reached.append(chance * (reached[parent] if parent >= 0 else 1.0))
    return sum(reached)
