"""Topology of a token tree: parents, depths, children, paths. A chain is a tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class TokenTree:
    """The shape of one proposal, without its tokens.

    Nodes are numbered in topological order, siblings in the order they were drawn. Node -1 is the
    last committed token: everything hangs off it, but it is no node itself.

    Attributes:
        parents: parent of every node, smaller than the node itself; -1 for children of the last
            committed token.
        depths: tokens between the committed text and each node's end: 1 for children of node -1.
    """

    parents: tuple[int, ...]
    depths: tuple[int, ...] = field(init=False, repr=False, compare=False)
    _children: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Validate the parents, and derive the depths and children once."""
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
        """Return the tree with one path of `num_nodes` nodes, the same object every time."""
        return _chain(num_nodes)

    @property
    def is_chain(self) -> bool:
        """Return whether no node has a sibling, which holds for the empty tree."""
        # Only if all other nodes are its ancestors can the last node be that deep.
        return not self.depths or self.depths[-1] == len(self.depths)

    @property
    def width(self) -> int:
        """Return the most children of a node."""
        return max(map(len, self._children))

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of `node` in draw order; -1 is the last committed token."""
        return self._children[node + 1]

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from the root down to `node`, itself included; none for -1."""
        upwards = []
        while node >= 0:
            upwards.append(node)
            node = self.parents[node]
        return tuple(reversed(upwards))

    def ancestor_mask(self) -> tuple[tuple[bool, ...], ...]:
        """Return the square mask whose row i is true at i and at its ancestors."""
        return _ancestor_mask(self.parents)


NO_TREE = TokenTree(())
"""The proposal of a plain step."""

# The same chains and templates recur in every step, so what is derived from them is cached.


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


@lru_cache(maxsize=1024)
def expanded(tree: TokenTree) -> tuple[int, ...]:
    """Return the nodes that have children, ascending; -1 is the last committed token."""
    return tuple(sorted(set(tree.parents)))


@lru_cache(maxsize=1024)
def post_order(tree: TokenTree) -> tuple[int, ...]:
    """Return every node after all its descendants, siblings in draw order."""
    order: list[int] = []

    def visit(node: int) -> None:
        for child in tree.children(node):
            visit(child)
            order.append(child)

    visit(-1)
    return tuple(order)
