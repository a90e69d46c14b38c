"""Enumerates two steps of every verifier: chains, draft trees, and the walk.

The noise of a step is keyed by the committed length, by node and by purpose, so that no key occurs
twice (`check_keys`). Then all draws are independent and the probability of a text is a sum over
drafts and outcomes. The outcomes are those of the engine's draw stage on every pattern of passed
and failed tests.

A prefix is the integer its tokens spell in base `vocab_size`, first token first; level l of a table
holds one row per prefix of length l. All tables are fp64 and carry a leading axis of pairs,
enumerated at once.

The engine's own `walk` is asked about every choice of draft and target tokens. What it emits must
be the target's draws at the rows it visited and depend on no other row; then a text has the
probability of these draws: the target's conditionals, provided that no position's noise is
consumed twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from forerun.control.base import Capacity, RequestState
from forerun.control.goodput import GoodputController
from forerun.sampling.chain import Rule, accept_probs, final_weights, num_accepted
from forerun.sampling.kernels import SamplingKernels, sampling_kernels
from forerun.sampling.noise import Purpose, chain_keys, position_key, request_key, step_key
from forerun.sampling.tree_rules import TreeWeights, accepted_node, tree_keys, tree_weights
from forerun.sampling.walk import target_keys, target_tokens, walk
from forerun.theory.cost import CostLine, CostTable
from forerun.theory.record import StepRecord
from forerun.theory.tree import TokenTree, expanded


class Inexact(Exception):
    """Raised if a verifier lacks a property that its exactness requires."""


Table = tuple[Tensor, ...]
BATCH = 64
"""Pairs enumerated together: tensors stay in cache."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPairs:
    """Target distributions over a tiny vocabulary, each paired with a draft distribution."""

    target: Table
    draft: Table

    @property
    def num_pairs(self) -> int:
        return len(self.target[0])

    @property
    def vocab_size(self) -> int:
        return self.target[0].shape[-1]

    @property
    def horizon(self) -> int:
        """Number of tokens whose joint distribution the probability tables determine."""
        return len(self.target)

    def target_rows(self, num_committed: int, depth: int) -> Tensor:
        return self.target[num_committed + depth]

    def draft_rows(self, num_committed: int, depth: int) -> Tensor:
        return self.draft[num_committed + depth]

    def with_full_drafts(self) -> ModelPairs:
        """Return pairs whose draft distributions give every token a positive probability."""
        full = torch.stack([(rows > 0).flatten(1).all(-1) for rows in self.draft]).all(0)
        return ModelPairs(
            target=tuple(rows[full] for rows in self.target),
            draft=tuple(rows[full] for rows in self.draft),
        )

    def joint(self) -> Float64[Tensor, "pairs texts"]:
        """Return the target's distribution of the first `horizon` tokens."""
        return self.complete({0: torch.ones_like(self.target[0][..., 0])})

    def complete(self, mass: Mapping[int, Tensor]) -> Float64[Tensor, "pairs texts"]:
        """Extend committed texts to the horizon with the target's distribution."""
        total = mass.get(0, torch.zeros_like(self.target[0][..., 0]))
        for level, rows in enumerate(self.target):
            total = (total[..., None] * rows).flatten(1)
            total = total + mass.get(level + 1, 0.0)
        return total


def random_pairs(
    num_pairs: int, vocab_size: int, horizon: int, generator: torch.Generator
) -> Iterator[ModelPairs]:
    """Return random pairs, from nearly uniform to nearly one-hot, with more or less agreement."""
    for start in range(0, num_pairs, BATCH):
        count = min(BATCH, num_pairs - start)
        sharpness, kinship = (
            torch.empty(count, 1, 1, dtype=torch.float64).uniform_(*ends, generator=generator)
            for ends in ((0.3, 4.0), (0.0, 1.0))
        )
        target, draft = [], []
        for level in range(horizon):
            shape = (count, vocab_size**level, vocab_size)
            common, own = (_clocks(shape, generator) for _ in range(2))
            target.append(_normalised(common**sharpness))
            draft.append(_normalised(common ** (sharpness * kinship) * own ** (1 - kinship)))
        yield ModelPairs(target=tuple(target), draft=tuple(draft))


def structured_pairs(vocab_size: int, horizon: int, generator: torch.Generator) -> ModelPairs:
    """Return a batch of corner cases, such as equal or disjoint distributions.

    In order: identical; one-hot target; one-hot draft; both one-hot, sometimes agreeing; zero
    overlap, the target on one token; zero overlap, the draft on one token; zeros in the target;
    zeros in both.
    """
    target, draft = [], []
    for level in range(horizon):
        shape = (vocab_size**level, vocab_size)
        first, second = (_normalised(_clocks(shape, generator)) for _ in range(2))
        one, other = (_one_hot(_clocks(shape, generator)) for _ in range(2))
        without = _normalised(first * (1 - one))
        holes = _normalised(second * (1 - other))
        target.append(torch.stack([first, one, first, one, one, without, without, without]))
        draft.append(torch.stack([first, second, one, other, without, one, second, holes]))
    return ModelPairs(target=tuple(target), draft=tuple(draft))


def _clocks(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.empty(shape, dtype=torch.float64).exponential_(generator=generator)


def _normalised(weights: Tensor) -> Tensor:
    return weights / weights.sum(-1, keepdim=True)


def _one_hot(weights: Tensor) -> Tensor:
    return torch.zeros_like(weights).scatter_(-1, weights.argmax(-1, keepdim=True), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainRows:
    """Input of verification for all pairs and histories, flattened to rows."""

    target: Float64[Tensor, "batch rows vocab"]
    draft: Float64[Tensor, "batch rows vocab"]
    tokens: Int64[Tensor, "batch nodes"]
    num_drafted: Int64[Tensor, " batch"]

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of both stages; the draft's row after the last node is of no use there."""
        return self.target, self.draft[:, :-1], self.tokens, self.num_drafted


def engine_accept(rows: ChainRows, rule: Rule) -> Tensor:
    return accept_probs(*rows.inputs, rule)


def engine_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    return final_weights(*rows.inputs, accepted, rule)


def kernel_accept(rows: ChainRows, rule: Rule) -> Tensor:
    return loaded_kernels().chain_accept(*rows.inputs, is_block=rule == "block")


def kernel_final(rows: ChainRows, accepted: Tensor, rule: Rule) -> Tensor:
    return loaded_kernels().chain_weights(*rows.inputs, accepted, is_block=rule == "block")


def loaded_kernels() -> SamplingKernels:
    kernels = sampling_kernels()
    assert kernels is not None
    return kernels


def _engine_draft_key(request_key: int, num_committed: int, node: int) -> int:
    return step_key(request_key, num_committed, node, Purpose.DRAFT)


def confident_before(draft_row: Tensor, drawn_prob: Tensor) -> Tensor:
    """Keep a token only where the draft was confident before drawing it, which is exact."""
    return ~(draft_row.amax(-1) < 0.55)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerifier:
    """Functions that draft, accept and complete chains in the enumeration.

    Attributes:
        accept: acceptance probabilities, from rows and rule.
        final: weights of the final token, from rows, number accepted and rule.
        draft_key: key of a draft draw, from request key, committed tokens and node.
        verify_keys: keys of verification, from request key, committed tokens and number of nodes.
        keep: whether drafting goes on through a node, from its distribution and the drawn token's
            probability.
        next_k: K of the second step, from that of the first and how many it accepted.
    """

    rule: Rule
    accept: Callable[[ChainRows, Rule], Tensor] = engine_accept
    final: Callable[[ChainRows, Tensor, Rule], Tensor] = engine_final
    draft_key: Callable[[int, int, int], int] = _engine_draft_key
    verify_keys: Callable[[int, int, int], list[int]] = chain_keys
    keep: Callable[[Tensor, Tensor], Tensor] = lambda draft_row, drawn_prob: drawn_prob >= 0.0
    next_k: Callable[[int, int], int] = lambda num_drafts, num_accepted: num_accepted + 1


REQUEST = request_key(0, 0)
NUM_PROMPT = 3
"""Tokens committed before the first step; keys count them."""

Texts = Mapping[int, Float64[Tensor, "pairs prefixes texts"]]
"""Probabilities of the texts that a step emits, by their length, after every prefix."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Emitted:
    """Output distribution of one or more enumerated steps."""

    joint: Float64[Tensor, "pairs texts"]
    num_histories: int


def join_steps(pairs: ModelPairs, first: Texts, texts_after: Callable[[int], Texts]) -> Emitted:
    """Return the distribution of two steps, completed by the target to the horizon.

    Args:
        texts_after: the texts of the second step, given the length of the first one's.
    """
    mass: dict[int, Tensor] = {}
    num_histories = 0
    for length, texts in first.items():
        for more, then in texts_after(length).items():
            joint = (texts[:, 0, :, None] * then).flatten(1)
            mass[length + more] = mass.get(length + more, 0.0) + joint
            num_histories += int(joint.count_nonzero())
    return Emitted(joint=pairs.complete(mass), num_histories=num_histories)


def check_keys(first: Sequence[int], seconds: Iterable[Sequence[int]]) -> None:
    """Refuse noise keys that occur twice in a step or in two consecutive steps."""
    for keys in ([], *seconds):
        both = [*first, *keys]
        if len(set(both)) < len(both):
            raise Inexact("a noise key decides twice")


def sum_patterns(
    accept: Float64[Tensor, "batch nodes"], verdict: Callable[[Tensor], Sequence[int]]
) -> dict[int, Float64[Tensor, " batch"]]:
    """Return the probability of each verdict of the draw stage, over all outcomes of the tests."""
    num_nodes = accept.shape[1]
    patterns = torch.tensor([*product((False, True), repeat=num_nodes)], dtype=torch.bool)
    found: dict[int, Tensor] = {}
    for passed, at in zip(patterns, verdict(patterns.reshape(-1, num_nodes)), strict=True):
        prob = torch.where(passed, accept, 1 - accept).prod(-1)
        found[at] = found.get(at, 0.0) + prob
    return found


def add_texts(found: dict[int, Tensor], tokens: Tensor, path: Sequence[int], rows: Tensor) -> None:
    """Add the probabilities of the texts that consist of a path and one more token.

    Args:
        tokens: of every draft, (drafts, nodes).
        rows: of the last token, (pairs, prefixes, drafts, vocab).
    """
    vocab = rows.shape[-1]
    texts = torch.zeros(*rows.shape[:2], vocab ** (len(path) + 1), dtype=torch.float64)
    index = _spelled(tokens, path, vocab)[:, None] * vocab + torch.arange(vocab)
    texts.index_add_(2, index.flatten(), rows.flatten(2))
    found[len(path) + 1] = found.get(len(path) + 1, 0.0) + texts


def emit_chains(pairs: ModelPairs, verifier: ChainVerifier, num_drafts: int) -> Emitted:
    """Return the output distribution of two steps, completed by the target to the horizon.

    The K of the second step depends on what the first one accepted.
    """

    def next_k(length: int) -> int:
        return min(verifier.next_k(num_drafts, length - 1), pairs.horizon - 1 - length)

    lengths = range(1, num_drafts + 2)
    check_keys(
        _chain_keys(verifier, 0, num_drafts),
        (_chain_keys(verifier, length, next_k(length)) for length in lengths),
    )
    return join_steps(
        pairs,
        _chain_step(pairs, verifier, 0, num_drafts),
        lambda length: _chain_step(pairs, verifier, length, next_k(length)),
    )


def _chain_keys(verifier: ChainVerifier, start: int, num_drafts: int) -> list[int]:
    at = NUM_PROMPT + start
    drafts = [verifier.draft_key(REQUEST, at, node) for node in range(num_drafts)]
    return drafts + verifier.verify_keys(REQUEST, at, num_drafts)


def _chain_step(pairs: ModelPairs, verifier: ChainVerifier, start: int, num_drafts: int) -> Texts:
    tokens, paths = _all_chains(pairs, start, num_drafts)
    drawn = [pairs.draft[start + node][:, paths[node]] for node in range(num_drafts)]
    taken = [_of_token(row, tokens[:, node]) for node, row in enumerate(drawn)]
    probs = torch.ones(pairs.num_pairs, *paths[0].shape, dtype=torch.float64)
    num_drafted = torch.zeros_like(probs, dtype=torch.int64)
    is_kept = torch.ones_like(probs, dtype=torch.bool)
    for row, prob in zip(drawn, taken, strict=True):
        probs = probs * prob
        is_kept = is_kept & verifier.keep(row, prob)
        num_drafted += is_kept
    levels = range(num_drafts + 1)
    rows = ChainRows(
        target=torch.stack([pairs.target_rows(start, i)[:, paths[i]] for i in levels], 3).flatten(
            0, 2
        ),
        draft=torch.stack([pairs.draft_rows(start, i)[:, paths[i]] for i in levels], 3).flatten(
            0, 2
        ),
        tokens=tokens.expand(*probs.shape, num_drafts).flatten(0, 2),
        num_drafted=num_drafted.flatten(),
    )
    found: dict[int, Tensor] = {}
    accept = verifier.accept(rows, verifier.rule)
    for accepted, prob in sum_patterns(accept, partial(_count_accepted, verifier.rule)).items():
        # the row after `accepted` tokens; shorter proposals have probability 0 but must be valid
        counts = torch.full_like(rows.num_drafted, accepted).minimum(rows.num_drafted)
        final = verifier.final(rows, counts, verifier.rule)
        final = final / final.sum(-1, keepdim=True)
        weights = (probs.flatten() * prob)[:, None] * final
        add_texts(found, tokens, range(accepted), weights.reshape(*probs.shape, -1))
    return found


def _count_accepted(rule: Rule, passed: Tensor) -> list[int]:
    uniforms = torch.where(passed, 0.25, 0.75).double()
    counts: list[int] = num_accepted(torch.full_like(uniforms, 0.5), uniforms, rule).tolist()
    return counts


def _all_chains(
    pairs: ModelPairs, start: int, num_drafts: int
) -> tuple[Int64[Tensor, "drafts nodes"], list[Int64[Tensor, "prefixes drafts"]]]:
    """Return all chains, and the texts before each of their nodes after every prefix."""
    vocab = pairs.vocab_size
    tokens = all_tokens(vocab, num_drafts)
    prefixes = torch.arange(vocab**start)[:, None]
    levels = range(num_drafts + 1)
    return tokens, [prefixes * vocab**i + _spelled(tokens, range(i), vocab) for i in levels]


def all_tokens(vocab_size: int, num_nodes: int) -> Int64[Tensor, "drafts nodes"]:
    """Return every choice of the tokens of so many nodes."""
    choices = [*product(range(vocab_size), repeat=num_nodes)]
    return torch.tensor(choices, dtype=torch.int64).reshape(len(choices), num_nodes)


def _of_token(rows: Tensor, tokens: Int64[Tensor, " drafts"]) -> Tensor:
    return rows.gather(-1, tokens.expand(rows.shape[:-1])[..., None])[..., 0]


Stage = Callable[[TokenTree, Tensor, Tensor, Tensor], TreeWeights]
Keys = Callable[[int, int, int], tuple[list[int], list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnTrees:
    """All drafts with one tree topology, after every prefix of one length.

    Attributes:
        draft: row of each expanded parent that its children were drawn from.
        target: the target's row after the prefix and after every node.
    """

    tokens: Int64[Tensor, "drafts nodes"]
    probs: Float64[Tensor, "pairs prefixes drafts"]
    draft: Float64[Tensor, "pairs prefixes drafts parents vocab"]
    target: Float64[Tensor, "pairs prefixes drafts rows vocab"]


def kernel_weights(
    tree: TokenTree,
    target_probs: Float64[Tensor, "batch rows vocab"],
    draft_probs: Float64[Tensor, "batch parents vocab"],
    tokens: Int64[Tensor, "batch nodes"],
) -> TreeWeights:
    return TreeWeights(*loaded_kernels().tree_weights(tree, target_probs, draft_probs, tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeVerifier:
    """Functions that draw and verify trees in the enumeration, by default the engine's."""

    stage: Stage = tree_weights
    damage: Callable[[DrawnTrees, TokenTree], DrawnTrees] = lambda trees, tree: trees
    keys: Keys = tree_keys


def all_trees(max_nodes: int, max_depth: int, max_width: int) -> list[TokenTree]:
    """Return every ordered tree with 2 to `max_nodes` nodes within limits, sorted by level."""
    found = []
    for num_nodes in range(2, max_nodes + 1):
        for parents in product(*(range(-1, node) for node in range(num_nodes))):
            if list(parents) != sorted(parents):
                continue
            tree = TokenTree(parents)
            width = max(parents.count(parent) for parent in parents)
            if max(tree.depths) <= max_depth and width <= max_width:
                found.append(tree)
    return found


def emit_trees(
    pairs: ModelPairs, verifier: TreeVerifier, tree: TokenTree, second: TokenTree
) -> Emitted:
    """Return the output distribution of two steps, completed by the target to the horizon."""
    lengths = range(1, max(tree.depths) + 2)
    check_keys(
        _tree_keys(verifier, tree, 0), (_tree_keys(verifier, second, length) for length in lengths)
    )
    return join_steps(
        pairs,
        step(pairs, verifier, tree, 0),
        lambda length: step(pairs, verifier, second, length),
    )


def step(pairs: ModelPairs, verifier: TreeVerifier, tree: TokenTree, start: int) -> Texts:
    """Return the probability of every emitted text by length, after every prefix of `start`."""
    trees = verifier.damage(_draw_trees(pairs, tree, start), tree)
    shape = trees.probs.shape
    tokens = trees.tokens.expand(*shape, len(tree.parents)).flatten(0, 2)
    weights = verifier.stage(tree, trees.target.flatten(0, 2), trees.draft.flatten(0, 2), tokens)
    final = weights.final / weights.final.sum(-1, keepdim=True)
    emitted: dict[int, Tensor] = {}
    for node, prob in reach_probs(tree, weights.accept).items():
        rows = (trees.probs.flatten() * prob)[:, None] * final[:, node + 1]
        add_texts(emitted, trees.tokens, tree.path(node), rows.reshape(*shape, -1))
    return emitted


def reach_probs(tree: TokenTree, accept: Tensor) -> dict[int, Tensor]:
    """Return the probability that each node is the last accepted one.

    It sums the engine's draw stage over all patterns of passed and failed tests.
    """
    return sum_patterns(
        accept, lambda patterns: [accepted_node(tree, passed) for passed in patterns.tolist()]
    )


def _draw_trees(pairs: ModelPairs, tree: TokenTree, start: int) -> DrawnTrees:
    """Enumerate drafts after every prefix, with children drawn without replacement."""
    vocab, num_nodes = pairs.vocab_size, len(tree.parents)
    tokens = all_tokens(vocab, num_nodes)
    prefixes = torch.arange(vocab**start)
    probs = torch.ones(pairs.num_pairs, len(prefixes), len(tokens), dtype=torch.float64)
    draft: list[Tensor] = []
    for parent in expanded(tree):
        path = tree.path(parent)
        after = prefixes[:, None] * vocab ** len(path) + _spelled(tokens, path, vocab)
        row = pairs.draft[start + len(path)][:, after]
        draft.append(row)
        for child in tree.children(parent):
            probs = probs * _of_token(row, tokens[:, child])
            row = without(row, tokens[:, child])
    target = []
    for path in (tree.path(node) for node in range(-1, num_nodes)):
        after = prefixes[:, None] * vocab ** len(path) + _spelled(tokens, path, vocab)
        target.append(pairs.target[start + len(path)][:, after])
    return DrawnTrees(
        tokens=tokens, probs=probs, draft=torch.stack(draft, 3), target=torch.stack(target, 3)
    )


def without(rows: Tensor, tokens: Int64[Tensor, " drafts"]) -> Tensor:
    """Remove a token from every row and renormalise; a row may become 0."""
    left = rows.scatter(-1, tokens.expand(rows.shape[:-1])[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=1e-300)


def _spelled(tokens: Int64[Tensor, "drafts nodes"], path: Iterable[int], vocab: int) -> Tensor:
    value = torch.zeros(len(tokens), dtype=torch.int64)
    for node in path:
        value = value * vocab + tokens[:, node]
    return value


def _tree_keys(verifier: TreeVerifier, tree: TokenTree, start: int) -> list[int]:
    """Return all noise keys of one step: draft draws, acceptance tests and final draws."""
    at, num_nodes = NUM_PROMPT + start, len(tree.parents)
    drafts = [step_key(REQUEST, at, node, Purpose.DRAFT) for node in range(num_nodes)]
    tests, finals = verifier.keys(REQUEST, at, num_nodes)
    return drafts + tests + finals


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
    spent: dict[int, frozenset[int]] = {}
    first: dict[int, Tensor] = {}
    for length, texts, keys in _walk_step(pairs, walker, tree, 0, frozenset()):
        first[length], spent[length] = texts, keys

    def second(length: int) -> Texts:
        room = pairs.horizon - 1 - length
        fits = not walker.sampled and max(tree.depths) <= room
        next_tree = tree if fits else TokenTree.chain(min(length, room))
        found = _walk_step(pairs, walker, next_tree, length, spent[length])
        return {more: texts for more, texts, _ in found}

    return join_steps(pairs, first, second)


def _walk_step(
    pairs: ModelPairs, walker: Walker, tree: TokenTree, start: int, used: frozenset[int]
) -> Iterator[tuple[int, Tensor, frozenset[int]]]:
    """Yield the texts of a step by length, with the noise keys that have decided until then."""
    keys = walker.keys(REQUEST, NUM_PROMPT + start, tree)
    if walker.sampled:
        nodes = range(len(tree.parents))
        used |= _consume([_engine_draft_key(REQUEST, NUM_PROMPT + start, n) for n in nodes], used)
        tokens, paths = _all_chains(pairs, start, len(nodes))
        probs = torch.ones(pairs.num_pairs, *paths[0].shape, dtype=torch.float64)
        for node in nodes:
            probs = probs * _of_token(pairs.draft[start + node][:, paths[node]], tokens[:, node])
    else:
        drafts = top_tokens(pairs, start, tree)
        num_drafts = pairs.vocab_size ** len(tree.parents)
        probs = torch.nn.functional.one_hot(drafts, num_drafts).double()
    table = walk_table(walker.walk, tree, pairs.vocab_size)
    for num_emitted, emits in table.emits.items():
        spent = used
        for rows in table.visited[num_emitted]:
            spent |= _consume([keys[row] for row in rows], used)
        yield num_emitted, probs @ emits.double() * _target_texts(pairs, start, num_emitted), spent


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


def top_tokens(pairs: ModelPairs, start: int, tree: TokenTree) -> Int64[Tensor, "pairs prefixes"]:
    """Return one number per prefix, which encodes the greedy draft tokens of the whole tree."""
    pair_index = torch.arange(pairs.num_pairs)[:, None]
    root = torch.arange(pairs.vocab_size**start).expand(pairs.num_pairs, -1)
    paths: list[Tensor] = []
    drafts = torch.zeros_like(root)
    for node, parent in enumerate(tree.parents):
        before = paths[parent] if parent >= 0 else root
        level = start + tree.depths[node] - 1
        ranked = pairs.draft[level][pair_index, before].argsort(stable=True, descending=True)
        token = ranked[..., tree.children(parent).index(node)]
        paths.append(before * pairs.vocab_size + token)
        drafts = drafts * pairs.vocab_size + token
    return drafts


def _target_texts(
    pairs: ModelPairs, start: int, num_tokens: int
) -> Float64[Tensor, "pairs prefixes texts"]:
    """Return the target's probability of every next `num_tokens` tokens after each prefix."""
    prefixes = torch.arange(pairs.vocab_size**start)
    probs = torch.ones(pairs.num_pairs, len(prefixes), 1, dtype=torch.float64)
    for offset in range(num_tokens):
        size = pairs.vocab_size**offset
        paths = prefixes[:, None] * size + torch.arange(size)
        probs = (probs[..., None] * pairs.target_rows(start, offset)[:, paths]).flatten(2)
    return probs


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
    (plan,) = controller.decide([STATE], CAPACITY).plans
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
