"""Coupled decoding with the engine's noise, compared with plain decoding for every draft."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from forerun.sampling.noise import position_key, request_key
from forerun.sampling.walk import target_keys, target_tokens, walk
from forerun.testing.exact.chains import NUM_PROMPT
from forerun.testing.exact.pairs import ModelPairs
from forerun.testing.exact.walks import spell
from forerun.theory.tree import TokenTree

__all__ = ["compare_with_plain"]


def compare_with_plain(pairs: ModelPairs, tree: TokenTree, seeds: range) -> tuple[int, int]:
    """Walk every possible draft from every committed length, on the noise of plain decoding.

    If each step, started from what plain decoding has committed, emits what plain decoding emits
    next, then by induction so does any number of steps, with any drafter, shared noise or not.

    Args:
        pairs: target distribution given every prefix; the draft's is not needed, for all drafts
            are tried.
        tree: topology of the proposals.
        seeds: request seeds to try.

    Returns:
        Number of steps compared, and how many of them differed.
    """
    num_compared = num_different = 0
    for seed in seeds:
        draws = Draws(pairs, request_key(seed, 0))
        for pair in range(pairs.num_pairs):
            plain = draws.plain_text(pair)
            for emitted, expected in draws.steps(pair, plain, tree):
                num_compared += 1
                num_different += emitted != expected
    return num_compared, num_different


class Draws:
    """Target draws of one request by the engine's functions, cached by key and prefix."""

    def __init__(self, pairs: ModelPairs, key: int) -> None:
        self.pairs = pairs
        self.key = key
        self._tokens: dict[tuple[int, int], list[list[int]]] = {}

    def token(self, pair: int, key: int, prefix: tuple[int, ...]) -> int:
        """Return the token that the target draws after `prefix` with the noise of `key`."""
        level = len(prefix)
        if (key, level) not in self._tokens:
            probs = self.pairs.target[level].float()
            rows = probs.flatten(0, 1)
            drawn: Tensor = target_tokens(rows, torch.full((len(rows),), key))
            self._tokens[key, level] = drawn.reshape(probs.shape[:2]).tolist()
        return self._tokens[key, level][pair][spell(prefix, self.pairs.vocab_size)]

    def plain_text(self, pair: int) -> tuple[int, ...]:
        """Return the text of plain decoding to the horizon."""
        text: tuple[int, ...] = ()
        for position in range(self.pairs.horizon):
            key = position_key(self.key, NUM_PROMPT + position)
            text = (*text, self.token(pair, key, text))
        return text

    def steps(
        self, pair: int, plain: tuple[int, ...], tree: TokenTree
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield what each possible step emits and what plain decoding emits there."""
        nodes = range(len(tree.parents))
        paths = [tree.path(node) for node in nodes]
        for start in range(self.pairs.horizon - max(tree.depths)):
            keys = target_keys(self.key, NUM_PROMPT + start, tree)
            for drafts in product(range(self.pairs.vocab_size), repeat=len(nodes)):
                prefixes = [plain[:start]]
                prefixes += [(*plain[:start], *(drafts[n] for n in path)) for path in paths]
                draws = [self.token(pair, k, p) for k, p in zip(keys, prefixes, strict=True)]
                path, final = walk(tree, drafts, draws)
                emitted = (*(drafts[node] for node in path), final)
                yield emitted, plain[start : start + len(emitted)]
