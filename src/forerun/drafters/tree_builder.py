"""Best-first construction of draft trees: the nodes with the most probable paths, within a budget.

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
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import torch

from forerun.control.base import Tree
from forerun.sampling.config import Choice
from forerun.sampling.proposal import Assurance, Proposal
from forerun.theory.tree import TokenTree

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

    @property
    def expected_accepted(self) -> float:
        """Expected number of accepted nodes if the candidates' probabilities were the target's."""
        return sum(map(math.exp, self.log_probs))

    def proposal(self, stop_reason: str, *, is_assured: bool = False) -> Proposal:
        tokens = torch.tensor(self.tokens, dtype=torch.int64)
        return Proposal(
            tokens=tokens,
            tree=self.tree,
            choice=Choice.DETERMINISTIC,
            stop_reason=stop_reason,
            assurance=Assurance(tokens=tokens, draft_probs=None) if is_assured else None,
            log_probs=self.log_probs,
        )


def merged(proposals: Sequence[Proposal], shape: Tree) -> BuiltTree:
    """Return the best nodes of several deterministic trees as one."""
    best: dict[Path, float] = {}
    for proposal in proposals:
        paths: list[Path] = []
        assert proposal.log_probs is not None
        rows = zip(proposal.tree.parents, proposal.tokens.tolist(), proposal.log_probs, strict=True)
        for parent, token, log_prob in rows:
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
            best[paths[-1]] = max(log_prob, best.get(paths[-1], -math.inf))
    children: dict[Path, list[tuple[float, int]]] = {}
    for path, log_prob in best.items():
        given = best.get(path[:-1], 0.0)
        children.setdefault(path[:-1], []).append((given - log_prob, path[-1]))

    def expand(path: Path) -> Candidates | None:
        ranked = sorted(children.get(path, ()))
        return [token for _, token in ranked], [-cost for cost, _ in ranked]

    return build_tree(expand, shape)


def build_tree(
    expand: Expand, shape: Tree, *, keeps_greedy: bool = False, min_gain: float = 0.0
) -> BuiltTree:
    """Return the tree of the most probable paths within a shape."""
    lowest = math.log(min_gain) if min_gain > 0 else -sys.float_info.max
    most, depth, width = shape.num_nodes, shape.depth, shape.width
    parents: list[int] = []
    paths: list[Path] = []
    log_probs: list[float] = []
    # By minus the log-probability: serial number, parent, log-probability above, rank, candidates.
    heap: list[tuple[float, int, int, float, int, Candidates]] = []
    path: Path = ()
    num_pushed, node, log_prob, greedy = 0, -1, 0.0, -1 if keeps_greedy else -2
    while True:
        candidates = expand(path) if len(path) < depth else None
        if candidates is not None and candidates[0]:
            first = log_prob + candidates[1][0]
            if first >= lowest:
                num_pushed += 1
                key = -math.inf if node == greedy else -first
                heappush(heap, (key, num_pushed, node, log_prob, 0, candidates))
        if not heap or len(parents) == most:
            return _depth_first(parents, paths, log_probs)
        key, _, parent, base, rank, candidates = heappop(heap)
        tokens, values = candidates
        node, log_prob = len(parents), base + values[rank]
        if parent == greedy and rank == 0:
            greedy = node
        path = (*paths[parent], tokens[rank]) if parent >= 0 else (tokens[rank],)
        parents.append(parent)
        paths.append(path)
        log_probs.append(log_prob)
        rank += 1
        if rank < width and rank < len(tokens) and base + values[rank] >= lowest:
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
