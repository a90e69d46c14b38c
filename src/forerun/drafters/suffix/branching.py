"""Trees copied from earlier text: several continuations of a match, and of its shorter suffixes.

The continuations of a state follow it with the shares of its occurrences. What the longest match
leaves over, as its hit rate says, goes to the next shorter suffix that also occurs elsewhere, as in
prediction by partial matching (Cleary and Witten 1984). Texts are combined by the larger
probability.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from forerun.control.base import Tree
from forerun.drafters.suffix.automaton import NONE, ROOT, SEPARATOR
from forerun.drafters.suffix.config import SuffixConfig
from forerun.drafters.suffix.copying import Match
from forerun.drafters.tree_builder import BuiltTree, Candidates, Path, build_tree

__all__ = ["branches_on", "most_valuable"]

MAX_SUFFIXES = 4
"""Suffixes of a match whose continuations are looked at, the longest first."""
Suffixes = list[tuple[int, int]]
"""States of one text with the lengths of the matches that they stand for, the longest first."""


def branches_on(matches: Sequence[Match], shape: Tree, config: SuffixConfig) -> BuiltTree | None:
    """Return the tree of copied tokens whose every node is expected to make the step faster.

    Args:
        matches: of the text's end, in every text to copy from.
        shape: the largest tree.
        config: budget and costs.

    Returns:
        The tree; None where plain decoding is expected to be as fast.
    """
    longest = max(match.place[1] for match in matches)
    depth = min(shape.depth, int(config.tokens_per_match * longest))
    if depth < 1:
        return None
    lookup = Lookup(matches, shape.width)
    shape = Tree(num_nodes=shape.num_nodes, depth=depth, width=shape.width)
    built = build_tree(lookup.expand, shape, min_gain=config.row_cost / (1 + config.step_cost))
    size = most_valuable(built, config)
    if size == 0:
        return None
    if size == len(built.tokens):
        return built
    shape = Tree(num_nodes=size, depth=depth, width=shape.width)
    return build_tree(lookup.expand, shape)


def most_valuable(built: BuiltTree, config: SuffixConfig) -> int:
    """Return the number of best nodes with the most tokens per plain step; 0 if none saves time.

    With S tokens expected to be accepted of n drafted, a step yields 1 + S tokens and costs
    1 + step_cost + n row_cost.
    """
    gains = sorted(map(math.exp, built.log_probs), reverse=True)
    best, size = 1.0, 0
    for num_nodes, accepted in enumerate(accumulate(gains), start=1):
        value = (1 + accepted) / (1 + config.step_cost + num_nodes * config.row_cost)
        if value > best:
            best, size = value, num_nodes
    return size


class Lookup:
    """Finds the tokens that may follow the paths of one tree, in the texts of its matches.

    Args:
        matches: of the text's end.
        width: the most candidates per path.
    """

    def __init__(self, matches: Sequence[Match], width: int) -> None:
        self.matches = matches
        self.width = width
        self._suffixes: dict[Path, list[Suffixes]] = {(): [suffixes_of(m) for m in matches]}

    def expand(self, path: Path) -> Candidates:
        """Return the most probable continuations of a path; see `tree_builder.build_tree`."""
        suffixes = self._suffixes.get(path)
        if suffixes is None:
            suffixes = self._suffixes[path] = [
                followed(match, states, path[-1])
                for match, states in zip(self.matches, self._suffixes[path[:-1]], strict=True)
            ]
        probs: dict[int, float] = {}
        for match, states in zip(self.matches, suffixes, strict=True):
            for token, prob in continuations(match, states, self.width).items():
                probs[token] = max(prob, probs.get(token, 0.0))
        best = sorted(probs.items(), key=lambda item: -item[1])[: self.width]
        return [token for token, _ in best], [math.log(prob) for _, prob in best]


def suffixes_of(match: Match) -> Suffixes:
    """Return the longest match and those of its shorter suffixes that occur in further places."""
    state, length = match.place
    found: Suffixes = []
    while state not in (ROOT, NONE) and length and len(found) < MAX_SUFFIXES:
        found.append((state, length))
        state = match.automaton.link(state)
        length = match.automaton.length(state) if state != NONE else 0
    return found


def followed(match: Match, suffixes: Suffixes, token: int) -> Suffixes:
    """Return the matches that can be extended by `token`, one token longer."""
    follow = match.automaton.follow
    longer = [(follow(state, token), length + 1) for state, length in suffixes]
    return [(state, length) for state, length in longer if state != NONE]


def continuations(match: Match, suffixes: Suffixes, width: int) -> dict[int, float]:
    """Return tokens that may follow, with their probabilities."""
    left = 1.0
    probs: dict[int, float] = {}
    for state, length in suffixes:
        rate = match.rates.probability(length, 1.0)
        followers = match.automaton.followers(state, width)
        for token, share in followers:
            if token != SEPARATOR:
                probs[token] = probs.get(token, 0.0) + left * rate * share
        if followers:
            left *= 1 - rate
    return {token: prob for token, prob in probs.items() if prob > 0}
