"""Two steps of the target walk over deterministic and sampled proposals.

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

from forerun.sampling.walk import target_keys, walk
from forerun.testing.exact.chains import NUM_PROMPT, REQUEST, Emitted, draft_chain
from forerun.testing.exact.histories import Histories, Inexact
from forerun.testing.exact.pairs import ModelPairs
from forerun.testing.exact.verifiers import ChainVerifier
from forerun.theory.tree import TokenTree

__all__ = ["Walker", "emit_walks", "walk_table"]

Walk = Callable[[TokenTree, tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], int]]
Rows = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walker:
    """The target walk and the keys of its draws, as the engine computes them.

    Attributes:
        walk: accepted path and final token, from tree, draft tokens and target tokens.
        keys: per row, from request key, committed tokens and tree.
        sampled: whether chains are drawn from the draft; otherwise trees hold its top tokens.
    """

    walk: Walk = walk
    keys: Callable[[int, int, TokenTree], list[int]] = target_keys
    sampled: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkTable:
    """The texts that a walk over one tree emits, for every possible draft.

    Attributes:
        emits: by number of emitted tokens: whether, for draft tokens (as a base-vocab number), some
            target draws make the walk emit a text.
        visited: by number of emitted tokens: the sequences of rows whose draws it used.
    """

    emits: dict[int, Bool[Tensor, "drafts texts"]]
    visited: dict[int, set[Rows]]


def emit_walks(pairs: ModelPairs, walker: Walker, tree: TokenTree) -> Emitted:
    """Return the output distribution of two steps, continued by the target to the horizon.

    Args:
        pairs: target and draft, given every prefix.
        walker: the walk and how proposals are chosen.
        tree: topology of the first proposal. The second has the same, or is a chain of one more
            node than were accepted where proposals are sampled, as far as the horizon allows.

    Raises:
        Inexact: the walk is no function of the draws it visits, or noise is consumed twice.
    """
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
    """Return the histories of one step by number of emitted tokens, and the keys it used."""
    keys = walker.keys(REQUEST, NUM_PROMPT + histories.length, tree)
    drafted, drafts = draft(pairs, walker, histories, tree)
    num_drafts = drafted.weights.shape[1] // histories.weights.shape[1]
    table = walk_table(walker.walk, tree, pairs.vocab_size)
    for num_emitted, emits in table.emits.items():
        spent = used
        for rows in table.visited[num_emitted]:
            spent |= consume([keys[row] for row in rows], used | set(drafted.intervals))
        possible = emits[drafts]
        owners, texts = possible.any(0).nonzero(as_tuple=True)
        drawn = target_texts(pairs, histories, num_emitted)[:, owners // num_drafts, texts]
        probs = drawn * possible[:, owners, texts]
        prefixes = drafted.prefixes[owners] * pairs.vocab_size**num_emitted + texts
        weights = drafted.weights[:, owners] * probs
        length = drafted.length + num_emitted
        yield replace(drafted, weights=weights, prefixes=prefixes, length=length), spent


def draft(
    pairs: ModelPairs, walker: Walker, histories: Histories, tree: TokenTree
) -> tuple[Histories, Int64[Tensor, "some drafts"]]:
    """Return the histories after drafting, and the drafted tokens of each as a number."""
    if not walker.sampled:
        return histories, top_tokens(pairs, histories, tree)
    drafted = draft_chain(pairs, ChainVerifier(rule="token"), histories, len(tree.parents))
    return drafted.histories, number(drafted.tokens, pairs.vocab_size)[None]


def consume(keys: list[int], used: frozenset[int]) -> frozenset[int]:
    """Return the keys of one text, which must be new and distinct."""
    fresh = frozenset(keys) - used
    if len(fresh) < len(keys):
        raise Inexact("a target draw uses noise that has decided something before")
    return fresh


@lru_cache(maxsize=64)
def walk_table(walk: Walk, tree: TokenTree, vocab_size: int) -> WalkTable:
    """Tabulate `walk` over all draft and target tokens, checking that visited draws decide it."""
    num_nodes = len(tree.parents)
    lengths = range(1, max(tree.depths, default=0) + 2)
    emits = {
        m: torch.zeros(vocab_size**num_nodes, vocab_size**m, dtype=torch.bool) for m in lengths
    }
    visited: dict[int, set[Rows]] = {m: set() for m in lengths}
    for index, drafts in enumerate(product(range(vocab_size), repeat=num_nodes)):
        for text, rows in walk_outcomes(walk, tree, drafts, vocab_size).items():
            emits[len(text)][index, spell(text, vocab_size)] = True
            visited[len(text)].add(rows)
    return WalkTable(emits=emits, visited=visited)


def walk_outcomes(
    walk: Walk, tree: TokenTree, drafts: tuple[int, ...], vocab_size: int
) -> dict[tuple[int, ...], Rows]:
    """Return every text that the walk can emit over these drafts, with the rows it visits.

    Raises:
        Inexact: a text is not what was drawn at the visited rows, or other rows had a say.
    """
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
    """Return the draft's most likely tokens as one number per history."""
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


def target_texts(
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
    """Convert rows of tokens to base-vocab numbers."""
    powers = vocab_size ** torch.arange(tokens.shape[1]).flip(0)
    return (tokens * powers).sum(-1)


def spell(text: tuple[int, ...], vocab_size: int) -> int:
    """Convert a text to a base-vocab number."""
    value = 0
    for token in text:
        value = value * vocab_size + token
    return value
