"""Topology of a token tree: parents, depths, children, paths. A chain is a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

__all__ = ["NO_TREE", "TokenTree"]


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The shape of one proposal; tokens live elsewhere.

    Nodes are numbered in topological order, siblings in the order they were drawn. Node -1 is the
    last committed token: everything hangs off it, but it is no node itself.

    Attributes:
        parents: parent of every node, smaller than the node itself; -1 for children of the last
            committed token.
        depths: tokens between the committed text and each node's end: 1 for children of node -1.

    Raises:
        ValueError: a parent is neither -1 nor an earlier node.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _children: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate, and derive once what every step asks for."""
        depths: list[int] = []
        children: list[list[int]] = [[] for _ in range(len(self.parents) + 1)]
        for node, parent in enumerate(self.parents):
            if not -1 <= parent < node:
                raise ValueError(
                    f"parent of node {node} is {parent}; it must be -1 or an earlier node, "
                    "so list parents before their children"
                )
            depths.append(1 + depths[parent] if parent >= 0 else 1)
            children[parent + 1].append(node)
        object.__setattr__(self, "depths", tuple(depths))
        object.__setattr__(self, "_children", tuple(map(tuple, children)))

    @classmethod
    def chain(cls, num_nodes: int) -> TokenTree:
        """The tree with one path of `num_nodes` nodes; the same object every time.

        Raises:
            ValueError: `num_nodes` is negative.
        """
        return _chain(num_nodes)

    @property
    def is_chain(self) -> bool:
        """Whether no node has a sibling. True of the empty tree."""
        # Only if all other nodes are its ancestors can the last node be that deep.
        return not self.depths or self.depths[-1] == len(self.depths)

    def children(self, node: int) -> tuple[int, ...]:
        """Children of `node` in draw order; of the last committed token for -1."""
        return self._children[node + 1]

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root down to `node`, itself included; empty for -1."""
        upwards = []
        while node >= 0:
            upwards.append(node)
            node = self.parents[node]
        return tuple(reversed(upwards))

    def ancestor_mask(self) -> tuple[tuple[bool, ...], ...]:
        """Square mask: row i is true at i and at its ancestors."""
        return _ancestor_mask(self.parents)


NO_TREE = TokenTree(())
"""What a plain step proposes."""

# Chains and recurring templates come back every step: what is derived from them is kept.


@lru_cache(maxsize=1024)
def _chain(num_nodes: int) -> TokenTree:
    if num_nodes < 0:
        raise ValueError(f"a chain of {num_nodes} nodes; it takes 0 or more")
    return TokenTree(tuple(range(-1, num_nodes - 1)))


@lru_cache(maxsize=1024)
def _ancestor_mask(parents: tuple[int, ...]) -> tuple[tuple[bool, ...], ...]:
    rows: list[tuple[bool, ...]] = []
    for node, parent in enumerate(parents):
        above = rows[parent] if parent >= 0 else (False,) * len(parents)
        rows.append((*above[:node], True, *above[node + 1 :]))
    return tuple(rows)
