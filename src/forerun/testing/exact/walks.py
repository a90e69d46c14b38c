"""Enumerates two steps of the target walk, and compares its text with plain decoding.

The engine's own `walk` is asked about every choice of draft and target tokens. What it emits must
be the target's draws at the rows it visited and depend on no other row; then a text has the
probability of these draws: the target's conditionals, provided that no position's noise is
consumed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from forerun.control.base import Capacity, RequestState
from forerun.control.goodput import GoodputController
from forerun.sampling.noise import position_key, request_key
from forerun.sampling.walk import target_keys, target_tokens, walk
from forerun.testing.exact.chains import NUM_PROMPT, REQUEST, ChainVerifier, Emitted, draft_chain
from forerun.testing.exact.pairs import Histories, Inexact, ModelPairs
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree

Walk = Callable[[TokenTree, tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], int]]
Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walker:
    """The target walk and the noise keys of its draws, by default the engine's.

    Attributes:
        keys: per row, from request key, committed tokens and tree.
        sampled: whether chains are drawn from the draft; otherwise trees hold its top tokens.
    """

    walk: Walk = walk
    keys: Callable[[int, int, TokenTree], list[int]] = target_keys
    sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkTable:
    """Texts that a walk over one tree topology emits, for every possible draft.

    Attributes:
        emits: by number of emitted tokens: whether, for draft tokens (as a base-vocab number), some
            target draws make the walk emit a text.
        visited: by number of emitted tokens: the sequences of rows whose draws it used.
    """

    emits: dict[int, Bool[Tensor, "drafts texts"]]
    visited: dict[int, set[Rows]]


def emit_walks(pairs: ModelPairs, walker: Walker, tree: TokenTree) -> Emitted:
    """Return the output distribution of two steps, completed by the target to the horizon."""
    mass: dict[int, Tensor] = {}
    num_histories = 0
    for first, used in step(pairs, walker, Histories.begin(pairs.num_pairs), frozenset(), tree):
        room = pairs.horizon - 1 - first.length
        fits = not walker.sampled and max(tree.depths) <= room
        next_tree = tree if fits else TokenTree.chain(min(first.length, room))
        for second, _ in step(pairs, walker, first, used, next_tree):
            found = second.mass(pairs.vocab_size**second.length)
            mass[second.length] = mass.get(second.length, 0.0) + found
            num_histories += int(second.weights.count_nonzero())
    return Emitted(joint=pairs.complete(mass), num_histories=num_histories)


def step(
    pairs: ModelPairs, walker: Walker, histories: Histories, used: frozenset[int], tree: TokenTree
) -> Iterator[tuple[Histories, frozenset[int]]]:
    keys = walker.keys(REQUEST, NUM_PROMPT + histories.length, tree)
    drafted, drafts = draft(pairs, walker, histories, tree)
    num_drafts = drafted.weights.shape[1] // histories.weights.shape[1]
    table = walk_table(walker.walk, tree, pairs.vocab_size)
    for num_emitted, emits in table.emits.items():
        spent = used
        for rows in table.visited[num_emitted]:
            spent |= _consume([keys[row] for row in rows], used | set(drafted.intervals))
        possible = emits[drafts]
        owners, texts = possible.any(0).nonzero(as_tuple=True)
        drawn = _target_texts(pairs, histories, num_emitted)[:, owners // num_drafts, texts]
        probs = drawn * possible[:, owners, texts]
        prefixes = drafted.prefixes[owners] * pairs.vocab_size**num_emitted + texts
        weights = drafted.weights[:, owners] * probs
        length = drafted.length + num_emitted
        yield replace(drafted, weights=weights, prefixes=prefixes, length=length), spent


def draft(
    pairs: ModelPairs, walker: Walker, histories: Histories, tree: TokenTree
) -> tuple[Histories, Int64[Tensor, "some drafts"]]:
    if not walker.sampled:
        return histories, top_tokens(pairs, histories, tree)
    drafted = draft_chain(pairs, ChainVerifier(rule="token"), histories, len(tree.parents))
    return drafted.histories, number(drafted.tokens, pairs.vocab_size)[None]


def _consume(keys: list[int], used: frozenset[int]) -> frozenset[int]:
    """Return the keys of one text as a set; raises if a key repeats or was used before."""
    fresh = frozenset(keys) - used
    if len(fresh) < len(keys):
        raise Inexact("a target draw uses noise that has decided something before")
    return fresh


@lru_cache(maxsize=64)
def walk_table(walk: Walk, tree: TokenTree, vocab_size: int) -> WalkTable:
    """Tabulate `walk` over all draft and target tokens, and check that only visited rows matter."""
    num_nodes = len(tree.parents)
    lengths = range(1, max(tree.depths, default=0) + 2)
    emits = {
        m: torch.zeros(vocab_size**num_nodes, vocab_size**m, dtype=torch.bool) for m in lengths
    }
    visited: dict[int, set[Rows]] = {m: set() for m in lengths}
    for index, drafts in enumerate(product(range(vocab_size), repeat=num_nodes)):
        for text, rows in _walk_outcomes(walk, tree, drafts, vocab_size).items():
            emits[len(text)][index, spell(text, vocab_size)] = True
            visited[len(text)].add(rows)
    return WalkTable(emits=emits, visited=visited)


def _walk_outcomes(
    walk: Walk, tree: TokenTree, drafts: tuple[int, ...], vocab_size: int
) -> dict[tuple[int, ...], Rows]:
    num_rows = len(drafts) + 1
    outcomes: dict[tuple[int, ...], Rows] = {}
    counts: dict[tuple[int, ...], int] = {}
    for draws in product(range(vocab_size), repeat=num_rows):
        path, final = walk(tree, drafts, draws)
        text = (*(drafts[node] for node in path), final)
        rows = (0, *(node + 1 for node in path))
        if text != tuple(draws[row] for row in rows) or outcomes.setdefault(text, rows) != rows:
            raise Inexact(f"the walk emits {text}, which is not what the target drew on its way")
        counts[text] = counts.get(text, 0) + 1
    for text, count in counts.items():
        if count != vocab_size ** (num_rows - len(text)):
            raise Inexact(f"whether the walk emits {text} depends on rows it did not visit")
    return outcomes


def top_tokens(
    pairs: ModelPairs, histories: Histories, tree: TokenTree
) -> Int64[Tensor, "pairs drafts"]:
    """Return one number per history, which encodes the greedy draft tokens of the whole tree."""
    pair_index = torch.arange(pairs.num_pairs)[:, None]
    root = histories.prefixes.expand_as(histories.weights)
    paths: list[Tensor] = []
    drafts = torch.zeros_like(root)
    for node, parent in enumerate(tree.parents):
        before = paths[parent] if parent >= 0 else root
        level = histories.length + tree.depths[node] - 1
        ranked = pairs.draft[level][pair_index, before].argsort(stable=True, descending=True)
        token = ranked[..., tree.children(parent).index(node)]
        paths.append(before * pairs.vocab_size + token)
        drafts = drafts * pairs.vocab_size + token
    return drafts


def _target_texts(
    pairs: ModelPairs, histories: Histories, num_tokens: int
) -> Float64[Tensor, "pairs histories texts"]:
    """Return the target's probability of every next `num_tokens` tokens after each history."""
    vocab = torch.arange(pairs.vocab_size)
    probs = torch.ones_like(histories.weights)[..., None]
    paths = histories.prefixes[:, None]
    for offset in range(num_tokens):
        rows = pairs.target_rows(histories.length, offset)[:, paths]
        probs = (probs[..., None] * rows).flatten(2)
        paths = (paths[..., None] * pairs.vocab_size + vocab).flatten(1)
    return probs


def number(tokens: Int64[Tensor, "histories tokens"], vocab_size: int) -> Tensor:
    powers = vocab_size ** torch.arange(tokens.shape[1]).flip(0)
    return (tokens * powers).sum(-1)


def spell(text: tuple[int, ...], vocab_size: int) -> int:
    """Convert a text to a number whose base is the vocabulary size."""
    value = 0
    for token in text:
        value = value * vocab_size + token
    return value


def compare_with_plain(pairs: ModelPairs, tree: TokenTree, seeds: range) -> tuple[int, int]:
    """Compare the walk with plain decoding for every possible draft, with the same noise.

    If each step, started from what plain decoding has committed, emits what plain decoding emits
    next, then by induction so does any number of steps, with any drafter, shared noise or not.
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
        level = len(prefix)
        if (key, level) not in self._tokens:
            probs = self.pairs.target[level].float()
            rows = probs.flatten(0, 1)
            drawn: Tensor = target_tokens(rows, torch.full((len(rows),), key))
            self._tokens[key, level] = drawn.reshape(probs.shape[:2]).tolist()
        return self._tokens[key, level][pair][spell(prefix, self.pairs.vocab_size)]

    def plain_text(self, pair: int) -> tuple[int, ...]:
        text: tuple[int, ...] = ()
        for position in range(self.pairs.horizon):
            key = position_key(self.key, NUM_PROMPT + position)
            text = (*text, self.token(pair, key, text))
        return text

    def steps(
        self, pair: int, plain: tuple[int, ...], tree: TokenTree
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the tokens that each possible step emits, and those of plain decoding."""
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


MAX_K = 3
STATE = RequestState(request_id="r", num_committed=3, max_new=9, temperature=1.0)
CAPACITY = Capacity(max_rows=64)


@dataclass(frozen=True, slots=True)
class Cheap:
    """Cost tables under which neither the smallest nor the largest K is the best."""

    def at(self, temperature: float) -> CostTable:
        line = CostLine(rows=(1, 4), verify_s=(1.0, 1.3), plain_s=1.0, draft_s=0.15)
        return CostTable(lines=(line,))


def goodput_k(num_drafts: int, num_accepted: int) -> int:
    """Return the K that a goodput controller plans after a first step, at least 1."""
    controller = GoodputController({"draft_model": Cheap()}, MAX_K)
    controller.decide([STATE], CAPACITY)
    controller.observe([outcome(num_drafts, num_accepted)])
    (plan,) = controller.decide([STATE], CAPACITY)
    return max(1, plan.num_speculative_tokens)


def outcome(num_drafts: int, num_accepted: int) -> StepRecord:
    return StepRecord(
        cycle_id=0,
        t_s=0.0,
        request_id=STATE.request_id,
        step=0,
        method="draft_model",
        k_budget=num_drafts,
        num_drafted=num_drafts,
        depth_drafted=num_drafts,
        num_accepted=num_accepted,
        num_emitted=num_accepted + 1,
        draft_s=0.15 * num_drafts,
        verify_s=1.0 + 0.1 * num_drafts,
        other_s=0.0,
        batch_rows=num_drafts + 1,
        num_prefill_rows=0,
        context_tokens=STATE.num_committed,
        last_token_source="bonus" if num_accepted == num_drafts else "recovered",
        expected_accepted=0.0,
    )
