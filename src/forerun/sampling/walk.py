"""Target walk: draws the target's tokens and follows the draft as long as it matches.

Every emitted token is a draw from the target's distribution given the tokens before it, whatever
was drafted, so the output distribution is the target's for deterministic, sampled and coupled
proposals, chains and trees alike:

- deterministic or sampled: the drafts are independent of the target's noise;
- coupled: the drafts are functions of that noise, but a token is emitted as the target's race on
  the clocks of its position, never because it was drafted. Each position's clocks decide at most
  one emitted token: the walk stops before it looks at a position whose token it does not emit.

As that noise is keyed by position, the text is a function of the seed alone and equals plain
decoding. For trees fixed before the target's randomness is seen no exact verifier accepts more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.noise import position_key
from forerun.sampling.race import race
from forerun.theory.tree import TokenTree

__all__ = [
    "edge_probs",
    "expected_accepted",
    "target_keys",
    "target_tokens",
    "walk",
]


def target_keys(request_key: int, num_committed: int, tree: TokenTree) -> list[int]:
    """Return the keys of the target's draws at the rows of the root and of every node.

    Args:
        request_key: of the sample.
        num_committed: tokens of prompt + output; the root row draws the one at this position.
        tree: the proposal's.
    """
    depths = (0, *tree.depths)
    return [position_key(request_key, num_committed + depth) for depth in depths]


def target_tokens(
    probs: Float[Tensor, "rows vocab"], keys: Int64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw the target's own token at every row.

    Args:
        probs: distributions, from `target_probs`.
        keys: position keys of the rows, see `target_keys`; siblings share theirs.
    """
    return race(probs, keys)


def walk(
    tree: TokenTree, draft_tokens: Sequence[int], target_tokens: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Follow the target's drawn tokens down the tree.

    Args:
        tree: topology of the proposal; may be empty.
        draft_tokens: token of every node.
        target_tokens: the target's token at the root row, then at the row of every node.

    Returns:
        The accepted path (nodes from the root down) and the first target token no child carries.
    """
    path: list[int] = []
    token = target_tokens[0]
    children = tree.children(-1)
    while children:
        for node in children:
            if draft_tokens[node] == token:
                break
        else:
            break
        path.append(node)
        token = target_tokens[node + 1]
        children = tree.children(node)
    return tuple(path), token


def edge_probs(
    tree: TokenTree, tokens: Int64[Tensor, " nodes"], probs: Float[Tensor, "rows vocab"]
) -> Float[Tensor, " nodes"]:
    """Return the target's probability of every node's token, at its parent's row."""
    parent_rows = torch.tensor(tree.parents, dtype=torch.int64, device=probs.device) + 1
    return probs[parent_rows, tokens]


def expected_accepted(tree: TokenTree, edge_probs: Sequence[float]) -> float:
    """Return E[num_accepted | proposal], the sum of path probabilities over all nodes.

    For a coupled chain hand in `coupled_match_probs` instead of the target's edge probabilities:
    given its draft, the target's draw is no longer independent of it.
    """
    mass: list[float] = []
    for parent, prob in zip(tree.parents, edge_probs, strict=True):
        mass.append(prob * mass[parent] if parent >= 0 else prob)
    return sum(mass)
