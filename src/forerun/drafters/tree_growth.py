"""Draft trees of a draft model, grown for a whole batch with one pass per level.

Deterministic nodes are the most probable paths (EAGLE-2, 2406.16858). A level's pass computes only
candidates of nodes that are among the best so far, for no other can have a child in the final tree.

Drawn nodes fill a shape that is fixed beforehand (Sequoia, 2402.12374), by what was accepted in
earlier steps of the request. None is left out because of what was drawn for it. Where a node's row
has no token left for another child, that child and what would follow it are not drafted: this
depends on tokens drawn before it alone.

Every pass reads the nodes above the last level once more, as a tree after the last committed token:
of rows that earlier passes staged, a pass can see a chain but no branches.

A node is worth the probability that everything up to it is accepted. Of the nodes whose candidates
are known, the B best therefore form the tree of B nodes with the largest expected number of
accepted tokens, and since no path is more probable than its beginning they always form a tree. This
is the reranking of EAGLE-2 (2406.16858), OPT-Tree (2406.17276) and DDTree (2604.12989).

`build_tree` asks for the candidates of a node when the node enters the tree, so that drafters that
look candidates up (stored text, tables, the slots of a block drafter) look up no more than they
need. A drafter that pays one model pass per level keeps the candidates of all expanded paths in a
dictionary and hands in its `get`.

The nodes may be chosen by their own probability only where they are deterministic: drawn tokens
that are left out because of their value bias the text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.control.base import Tree
from forerun.drafters.draft_sequence import DraftSequence, fit_vocabulary
from forerun.errors import DrafterError
from forerun.models.base import LanguageModel, RowBatch, Span, pack
from forerun.sampling.config import Choice
from forerun.sampling.history import RowHistory
from forerun.sampling.kernels import kernels_for, on_host
from forerun.sampling.noise import Purpose, draw, position_key, step_key, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Assurance, Proposal
from forerun.sampling.walk import race
from forerun.theory.tree import TokenTree, static_tree

Path = tuple[int, ...]
"""Tokens from the first draft token down to a node; () is the last committed token."""
Candidates = tuple[Sequence[int], Sequence[float]]
"""Distinct token ids and their log-probabilities given the path before them, most likely first."""
Expand = Callable[[Path], Candidates | None]
"""Returns the candidates after a path; None (or none) where nothing can follow it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltTree:
    """A draft tree with the tokens of its nodes.

    Nodes are numbered depth-first with the most likely child first, so the greedy path comes first
    and committing it moves no rows of a KV cache.
    """

    tree: TokenTree
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    paths: tuple[Path, ...]

    def proposal(self, stop_reason: str, *, is_assured: bool = False) -> Proposal:
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        return Proposal(
            tokens=tokens,
            tree=self.tree,
            choice=Choice.DETERMINISTIC,
            stop_reason=stop_reason,
            assurance=Assurance(tokens=tokens, draft_probs=None) if is_assured else None,
        )


def token_paths(tree: TokenTree, tokens: Sequence[int]) -> list[Path]:
    """Return the tokens on the path to each node of a tree; surplus `tokens` are ignored."""
    paths: list[Path] = []
    for parent, token in zip(tree.parents, tokens, strict=False):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def build_tree(expand: Expand, shape: Tree, *, chain_first: bool = False) -> BuiltTree:
    """Return the tree of the most probable paths within a shape.

    With `chain_first` the path of the most likely token of every level comes before all others.
    """
    most, depth, width = shape.num_nodes, shape.depth, shape.width
    parents: list[int] = []
    paths: list[Path] = []
    log_probs: list[float] = []
    # By minus the log-probability: serial number, parent, log-probability above, rank, candidates.
    heap: list[tuple[float, int, int, float, int, Candidates]] = []
    path: Path = ()
    num_pushed, node, log_prob = 0, -1, 0.0
    while True:
        candidates = expand(path) if len(path) < depth else None
        if candidates is not None and candidates[0]:
            first = log_prob + candidates[1][0]
            if first > -math.inf:
                num_pushed += 1
                cost = -math.inf if chain_first else -first
                heappush(heap, (cost, num_pushed, node, log_prob, 0, candidates))
        if not heap or len(parents) == most:
            return _depth_first(parents, paths, log_probs)
        _, _, parent, base, rank, candidates = heappop(heap)
        tokens, values = candidates
        chain_first = chain_first and rank == 0
        node, log_prob = len(parents), base + values[rank]
        path = (*paths[parent], tokens[rank]) if parent >= 0 else (tokens[rank],)
        parents.append(parent)
        paths.append(path)
        log_probs.append(log_prob)
        rank += 1
        if rank < width and rank < len(tokens) and base + values[rank] > -math.inf:
            num_pushed += 1
            heappush(heap, (-base - values[rank], num_pushed, parent, base, rank, candidates))


def _depth_first(parents: list[int], paths: list[Path], log_probs: list[float]) -> BuiltTree:
    """Number nodes depth-first; siblings keep their order."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for node in range(len(parents) - 1, -1, -1):
        children[parents[node]].append(node)  # -1 is the last entry
    order: list[int] = []
    numbers = {-1: -1}
    waiting = children[-1]
    while waiting:
        node = waiting.pop()
        numbers[node] = len(order)
        order.append(node)
        waiting += children[node]
    return BuiltTree(
        tree=TokenTree(tuple([numbers[parents[node]] for node in order])),
        tokens=tuple([paths[node][-1] for node in order]),
        log_probs=tuple([log_probs[node] for node in order]),
        paths=tuple([paths[node] for node in order]),
    )


LATER_RANKS = (0.4, 0.18, 0.1, 0.06, 0.04, 0.03, 0.02)
"""Acceptance rates of the second, third, ... drawn sibling, given that the first is rejected."""
MAX_WIDTH = 1 + len(LATER_RANKS)
STEP = 0.05
"""The acceptance of first siblings is rounded to multiples of this, so that few shapes occur."""


def acceptance_by_rank(first: float) -> tuple[float, ...]:
    rounded = min(1 - STEP, max(STEP, STEP * round(first / STEP)))
    return (rounded, *((1 - rounded) * share for share in LATER_RANKS))


class Drawings(NamedTuple):
    """The children chosen for every node of a level, and their probabilities.

    Attributes:
        chances: 0 (or NaN) where a token could not be drawn because none was left.
    """

    tokens: Int64[Tensor, "rows siblings"]
    chances: Float[Tensor, "rows siblings"]
    rows: Float[Tensor, "rows vocab"]


class BestFirst:
    """A tree of deterministic nodes, which grows by the most probable paths."""

    def __init__(self, sequence: DraftSequence) -> None:
        self.sequence = sequence
        self.frontier: list[Path] = [()]
        self._candidates: dict[Path, Candidates] = {}
        self._built: BuiltTree | None = None

    def add(
        self, tokens: Sequence[Sequence[int]], probs: Sequence[Sequence[float]], _rows: Tensor
    ) -> None:
        """Add the candidate children of the frontier, and choose the next frontier."""
        level, shape = len(self.frontier[0]) + 1, self.sequence.tree_shape
        for path, ids, values in zip(self.frontier, tokens, probs, strict=True):
            # NaN and 0 become -inf, which no tree holds.
            log_probs = [math.log(p) if p > 0 else -math.inf for p in values]
            self._candidates[path] = ids, log_probs
        built = self._built = build_tree(self._candidates.get, shape)
        lowest = -math.inf
        if len(built.tokens) == shape.num_nodes:  # a child must be better than the worst node
            lowest = min(built.log_probs)
        self.frontier = [
            path
            for path, log_prob in zip(built.paths, built.log_probs, strict=True)
            if len(path) == level < shape.depth and log_prob > lowest
        ]

    def read_paths(self) -> list[Path]:
        assert self._built is not None
        frontier = {*self.frontier}
        return [p for p in self._built.paths if p in self._candidates or p in frontier]

    def proposal(self) -> Proposal:
        built, sequence = self._built, self.sequence
        if built is None or not built.tokens:
            raise invalid_probs(sequence)
        return built.proposal(sequence.stop_reason, is_assured=True)


class Drawn:
    """A tree of drawn nodes in a shape fixed in advance."""

    def __init__(self, sequence: DraftSequence) -> None:
        self.sequence = sequence
        shape = sequence.tree_shape
        ranks = acceptance_by_rank(sequence.first_acceptance)
        self.template = static_tree(ranks, shape.num_nodes, shape.depth, shape.width)
        self.frontier: list[Path] = [()]
        self._paths: dict[int, Path] = {-1: ()}  # of every node of the template drawn so far
        self._nodes: dict[Path, int] = {(): -1}
        self._rows: dict[int, Tensor] = {}

    def noise_keys(self) -> list[list[int]]:
        """Return the noise keys of the children of every path of the frontier.

        By committed length and node: a rejected position is drawn afresh next step. Under the
        target's noise by position alone.
        """
        key, num_committed = self.sequence.request.noise_key, self.sequence.num_committed
        if self.sequence.tree_choice is Choice.COUPLED:
            return [
                [position_key(key, num_committed + len(path))] * len(self.children(path))
                for path in self.frontier
            ]
        return [
            [step_key(key, num_committed, child, Purpose.DRAFT) for child in self.children(path)]
            for path in self.frontier
        ]

    def children(self, path: Path) -> tuple[int, ...]:
        return self.template.children(self._nodes[path])

    def add(
        self, tokens: Sequence[Sequence[int]], chances: Sequence[Sequence[float]], rows: Tensor
    ) -> None:
        level: list[int] = []
        for path, ids, left, row in zip(self.frontier, tokens, chances, rows, strict=True):
            node = self._nodes[path]
            for child, token, chance in zip(self.template.children(node), ids, left, strict=False):
                if not chance > 0:  # no token was left, or the row is NaN
                    break
                self._paths[child] = (*path, token)
                self._nodes[*path, token] = child
                self._rows[node] = row
                level.append(child)
        self.frontier = [self._paths[node] for node in level if self.template.children(node)]

    def read_paths(self) -> list[Path]:
        drawn = sorted(self._paths)
        return [self._paths[n] for n in drawn if n >= 0 and self.template.children(n)]

    def proposal(self) -> Proposal:
        """Return the finished tree with the distributions that its tokens were drawn from."""
        if not self._rows:
            raise invalid_probs(self.sequence)
        nodes = sorted(self._paths)  # -1 first
        places = {node: place - 1 for place, node in enumerate(nodes)}
        tree = TokenTree(tuple([places[self.template.parents[node]] for node in nodes[1:]]))
        tokens = torch.tensor([self._paths[node][-1] for node in nodes[1:]], dtype=torch.int64)
        draft_probs = torch.stack([self._rows[node] for node in nodes if node in self._rows])
        return Proposal(
            tokens=tokens,
            tree=tree,
            choice=self.sequence.tree_choice,
            draft_probs=draft_probs,
            stop_reason=self.sequence.stop_reason,
            assurance=Assurance(tokens=tokens, draft_probs=draft_probs),
        )


def invalid_probs(sequence: DraftSequence) -> DrafterError:
    return DrafterError(f"the draft's probabilities for request {sequence.name} are not valid")


def draw_siblings(
    probs: Float[Tensor, "rows vocab"], keys: Int64[Tensor, "rows siblings"]
) -> Drawings:
    uniforms = uniform(keys)
    if kernels := kernels_for(probs):
        tokens, chances = kernels.draw_siblings(probs, uniforms)
        return Drawings(tokens=tokens, chances=chances, rows=probs)
    return _without_replacement(probs, keys, lambda left, rank: draw(left, uniforms[:, rank]))


def race_siblings(
    probs: Float[Tensor, "rows vocab"], keys: Int64[Tensor, "rows siblings"]
) -> Drawings:
    """Draw siblings from every row without replacement, by exponential races on the target's noise.

    The first token is the one that a coupled chain has; the target, racing on the same clocks, is
    likely to have one of the first.
    """
    own = keys[:, 0].contiguous()
    return _without_replacement(probs, keys, lambda left, _: race(left, own))


def _without_replacement(
    probs: Tensor, keys: Tensor, choose_one: Callable[[Tensor, int], Tensor]
) -> Drawings:
    left = probs.clone() if keys.shape[1] > 1 else probs
    tokens, chances = torch.empty_like(keys), probs.new_empty(keys.shape)
    for rank in range(keys.shape[1]):
        drawn = choose_one(left, rank)[:, None]
        tokens[:, rank : rank + 1] = drawn
        chances[:, rank : rank + 1] = left.gather(1, drawn)
        if rank + 1 < keys.shape[1]:
            left.scatter_(1, drawn, 0.0)
    return Drawings(tokens=tokens, chances=chances, rows=probs)


def draft_trees(
    model: LanguageModel, sequences: Sequence[DraftSequence], batch: RowBatch, vocab_size: int
) -> list[Proposal]:
    """Draft a tree per sequence; the shapes may differ."""
    growths: list[BestFirst | Drawn] = [
        BestFirst(s) if s.tree_choice is Choice.DETERMINISTIC else Drawn(s) for s in sequences
    ]
    going = growths
    while going:
        logits = fit_vocabulary(model.forward(batch).logits, vocab_size)
        _add_level(going, _frontier_probs(going, logits))
        going = [growth for growth in going if growth.frontier]
        if going:
            batch = next_pass(going, model.device)
    return [growth.proposal() for growth in growths]


def next_pass(growths: Sequence[BestFirst | Drawn], device: torch.device) -> RowBatch:
    """Return the pass that feeds every tree so far and computes logits after the frontiers."""
    spans: list[Span] = []
    tokens: list[int] = []
    wanted: list[int] = []
    for growth in growths:
        sequence, paths, first = growth.sequence, growth.read_paths(), len(tokens) + 1
        rows = {path: row for row, path in enumerate(paths)}
        spans.append(
            sequence.tree_span(TokenTree(tuple([rows.get(p[:-1], -1) for p in paths])), rows)
        )
        tokens += [sequence.context.ids[-1], *[path[-1] for path in paths]]
        wanted += [first + rows[path] for path in growth.frontier]
    return pack(spans, tokens, wanted, device)


def _frontier_probs(
    growths: Sequence[BestFirst | Drawn], logits: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    """Return the distribution after every path of the frontiers, with penalties for its history."""
    rows = [index for index, growth in enumerate(growths) for _ in growth.frontier]
    params = pack_params([g.sequence.tree_params for g in growths], logits.device, rows)
    histories: list[RowHistory | None] = []
    if any(growth.sequence.request.history is not None for growth in growths):
        histories = [
            None if (history := growth.sequence.request.history) is None else history.at(path)
            for growth in growths
            for path in growth.frontier
        ]
    return target_probs(logits, params, histories)


def _add_level(growths: Sequence[BestFirst | Drawn], probs: Float[Tensor, "rows vocab"]) -> None:
    """Add the children of the frontier to every tree; this waits for the device once."""
    members: dict[Choice, list[BestFirst | Drawn]] = {}
    rows: dict[Choice, list[int]] = {}
    first = 0
    for growth in growths:
        choice, end = growth.sequence.tree_choice, first + len(growth.frontier)
        members.setdefault(choice, []).append(growth)
        rows.setdefault(choice, []).extend(range(first, end))
        first = end
    chosen = [
        choose(choice, members[choice], probs if len(rows) == 1 else probs[rows[choice]])
        for choice in members
    ]
    columns = on_host(*[column for c in chosen for column in (c.tokens, c.chances)])
    for group, found in zip(members.values(), chosen, strict=True):
        tokens, chances = columns.pop(0), columns.pop(0)
        row = 0
        for growth in group:
            end = row + len(growth.frontier)
            growth.add(tokens[row:end], chances[row:end], found.rows[row:end])
            row = end


def choose(
    choice: Choice, growths: Sequence[BestFirst | Drawn], probs: Float[Tensor, "rows vocab"]
) -> Drawings:
    """Choose the children of the frontiers of all trees with the same rule for choosing nodes."""
    if choice is Choice.DETERMINISTIC:
        width = max(growth.sequence.tree_shape.width for growth in growths)
        values, tokens = probs.topk(min(width, probs.shape[1]), dim=-1)
        return Drawings(tokens=tokens, chances=values, rows=probs)
    keys = [keys for g in growths if isinstance(g, Drawn) for keys in g.noise_keys()]
    padded = torch.nn.utils.rnn.pad_sequence([*map(torch.tensor, keys)], batch_first=True)
    draw = race_siblings if choice is Choice.COUPLED else draw_siblings
    return draw(probs, padded.to(probs.device))
