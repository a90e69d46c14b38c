"""Shares the rows of a target pass between requests so that the step yields most tokens per second.

A node costs one row for every request alike and is worth the probability that it is accepted, so
the R best nodes of a batch are the R of highest survival (`theory.tree`). The time of R nodes is
known too: each node adds its share of the target pass, each level a draft pass and its overhead. So
the number of nodes follows from v(n), plain decoding is the choice of 0 nodes, and the largest
depth is searched as well. The costs of trees are computed in the same way: nodes as rows of the
target pass, levels as draft passes of all requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from operator import add, truediv
from typing import NamedTuple

from forerun.control.acceptance import AcceptanceCurve
from forerun.control.costs import StepTimes
from forerun.theory.tree import Node, ranked_nodes


class RequestCandidate(NamedTuple):
    """One request that may draft."""

    method: str
    curve: AcceptanceCurve


class TreeLevels(NamedTuple):
    """The drafter and the number of levels of all draft trees in a step."""

    method: str
    depth: int


class Allocation(NamedTuple):
    """K of each request in a step, with the expected tokens and duration of the step.

    Attributes:
        depths: K, in the order of the candidates; the nodes where drafts are trees.
        tree: drafter and levels where drafts are trees; else None.
    """

    depths: tuple[int, ...]
    tokens: float
    step_s: float
    tree: TreeLevels | None = None

    @property
    def tokens_per_s(self) -> float:
        """Expected tokens per second of the step, the objective."""
        return self.tokens / self.step_s

    @property
    def shape(self) -> str:
        """The largest draft in words, such as "K=4"."""
        most = max(self.depths)
        if self.tree is not None and most:
            return f"{most} nodes in {self.tree.depth} levels"
        return f"K={most}" if most else "nothing"


def chain_values(
    curve: AcceptanceCurve, times: StepTimes, batch: int = 1
) -> tuple[list[float], list[float]]:
    """Return the expected tokens of a request and the seconds of a step, for K = 0, 1, 2, ..."""
    tokens, steps_s = [1.0], [times.plain_s]
    depth, overhead_s = 0.0, 0.0
    for level, (survived, drafted) in enumerate(zip(*curve, strict=True)):
        # A draft that may end early begins in any case, and its beginning takes time.
        reached = drafted if level else 1.0
        overhead_s += reached * (times.overhead_s[level + 1] - times.overhead_s[level])
        depth += drafted
        tokens.append(tokens[-1] + survived)
        pass_s = times.verify_nodes_s(depth * batch)
        steps_s.append(depth * times.draft_s[batch - 1] + overhead_s + pass_s)
    return tokens, steps_s


def best_chains(
    candidates: Sequence[RequestCandidate], times: Mapping[str, StepTimes], max_nodes: int
) -> Allocation:
    """Return the depths with the most expected tokens per second."""
    batch = len(candidates)
    best = Allocation((0,) * batch, float(batch), times[candidates[0].method].plain_s)
    nodes = ranked_nodes([candidate.curve.survival for candidate in candidates])
    deepest = max([len(candidate.curve.survival) for candidate in candidates])
    added = [*growing(nodes, candidates, times)]
    own = times[candidates[0].method]
    is_whole = all([reached == 1.0 for _, _, _, reached, _ in added])
    # A level may cost more than the next one, so all depths are compared, not only neighbours.
    for limit in (deepest,) if batch == 1 else range(1, deepest + 1):
        within = [node for node in added if node[1] < limit][:max_nodes]
        if not within:
            break
        survived, _, indices, reached, levels_s = zip(*within, strict=True)
        tokens = [*accumulate(survived, initial=float(batch))][1:]
        rows_s = own.verify_s[1:] if is_whole else map(own.verify_nodes_s, accumulate(reached))
        steps_s = [*map(add, accumulate(levels_s), rows_s)]
        rates = [*map(truediv, tokens, steps_s)]
        rate = max(rates)
        if rate > best.tokens_per_s:
            at = rates.index(rate)
            best = Allocation(_depths_of(indices[: at + 1], batch), tokens[at], steps_s[at])
    return best


def best_trees(
    levels: TreeLevels,
    survival: Sequence[Sequence[float]],
    times: StepTimes,
    max_nodes: int,
) -> Allocation:
    batch, draft_s = len(survival), times.tree_s(levels.depth)
    nodes = ranked_nodes(survival)[:max_nodes]
    tokens = [*accumulate([-lost for lost, _, _ in nodes], initial=float(batch))]
    passes_s = times.verify_s[1 : len(tokens)]
    steps_s = [times.plain_s, *[draft_s + pass_s for pass_s in passes_s]]
    rates = [*map(truediv, tokens, steps_s)]
    at = rates.index(max(rates))
    depths = _depths_of([index for _, _, index in nodes[:at]], batch)
    return Allocation(depths, tokens[at], steps_s[at], levels if at else None)


def growing(
    nodes: Sequence[Node], candidates: Sequence[RequestCandidate], times: Mapping[str, StepTimes]
) -> Iterator[tuple[float, int, int, float, float]]:
    """Yield what each node adds: tokens, its depth and request, rows, seconds of drafting."""
    deepest = max([len(candidate.curve.survival) for candidate in candidates])
    active = {method: [0] * deepest for method in times}
    ways = [(c.curve.drafted, times[c.method], active[c.method]) for c in candidates]
    for lost, depth, index in nodes:
        drafted, own, num_active = ways[index]
        count = num_active[depth]
        num_active[depth] = count + 1
        reached = drafted[depth]
        level_s = own.draft_s[count] - own.draft_s[count - 1] if count else own.draft_s[0]
        draft_s = reached * level_s
        if count == 0:  # methods beside each other add their overheads
            more_s = own.overhead_s[depth + 1] - own.overhead_s[depth]
            draft_s += (reached if depth else 1.0) * more_s
        yield -lost, depth, index, reached, draft_s


def _depths_of(indices: Sequence[int], num_requests: int) -> tuple[int, ...]:
    depths = [0] * num_requests
    for index in indices:
        depths[index] += 1
    return tuple(depths)
