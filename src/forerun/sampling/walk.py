"""Target walk and exponential race: draws the target's tokens and follows the draft that matches.

Clocks of rates p ring first with probabilities p (the Gumbel-max trick in the exponential domain),
and of two distributions racing on the same clocks the likelier token of one tends to be that of
the other. A clock costs a dozen operations, so first groups of tokens race with their added
probabilities, then the members of the winning group: P(group) P(token | group) is the distribution
itself, at an eighth of the noise. What is lost is a little agreement, where two distributions put
their mass on different members of one group; ids of one group lie far apart, as likely ids do not.

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
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.kernels import kernels_for, row_chunks
from forerun.sampling.noise import exponential, position_key
from forerun.theory.tree import TokenTree

NUM_MEMBERS = 8
"""Tokens of a group; a power of two."""


def race(
    probs: Float[Tensor, "rows vocab"], keys: Int64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw a token from every row with the exponential noise of its key.

    A token of probability 0 never rings; a one-hot row needs no noise to be right; of a NaN row any
    token comes.
    """
    if kernels := kernels_for(probs):
        return kernels.race(probs, keys)
    num_rows, vocab_size = probs.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=probs.device)
    for rows in row_chunks(num_rows, vocab_size):
        tokens[rows] = _race(_members(probs[rows]), keys[rows])
    return tokens.clamp_(max=vocab_size - 1)


def _race(members: Float[Tensor, "rows members groups"], keys: Tensor) -> Tensor:
    num_groups = members.shape[2]
    clocks = exponential(keys, num_groups + NUM_MEMBERS)
    group = (clocks[:, :num_groups] / _group_probs(members)).argmin(-1)
    member = (clocks[:, num_groups:] / _of_group(members, group)).argmin(-1)
    return member.mul_(num_groups).add_(group)


def coupled_match_probs(
    target_rows: Float[Tensor, "nodes vocab"],
    draft_rows: Float[Tensor, "nodes vocab"],
    tokens: Int64[Tensor, " nodes"],
) -> Float[Tensor, " nodes"]:
    """Return the probability that the target's draw is the drafted token, given the draft's draw.

    The two must agree on the group and, on other clocks, on the member.
    """
    kernels = kernels_for(target_rows)
    if kernels and draft_rows.dtype is torch.float32 and draft_rows.stride(1) == 1:
        return kernels.coupled_match(target_rows, draft_rows, tokens)
    matches = torch.empty(len(tokens), device=target_rows.device)
    for rows in row_chunks(*target_rows.shape):
        target, draft = _members(target_rows[rows]), _members(draft_rows[rows])
        group = tokens[rows] % target.shape[2]
        member = tokens[rows] // target.shape[2]
        groups = _same_winner(_group_probs(target), _group_probs(draft), group)
        members = _same_winner(_of_group(target, group), _of_group(draft, group), member)
        matches[rows] = groups * members
    return matches


def _same_winner(target: Tensor, draft: Tensor, winner: Tensor) -> Tensor:
    """Return the probability that both races have the same winner, given the draft's winner.

    Both races choose x with probability 1 / sum_y max(target_y / target_x, draft_y / draft_x), for
    x must ring before every y in the two of them; dividing by draft_x conditions on the draft. The
    distributions need not add up to 1: that cancels for the target, and the draft's sum is divided
    out.
    """
    target_x, draft_x = target.gather(-1, winner[:, None]), draft.gather(-1, winner[:, None])
    # both sides times target_x: a token impossible under the target then matches with probability 0
    needed = torch.maximum(draft_x * target, target_x * draft).sum(-1)
    matched = target_x[:, 0] * draft.sum(-1)
    return matched / needed.clamp(min=torch.finfo(needed.dtype).tiny)


def _members(probs: Tensor) -> Float[Tensor, "rows members groups"]:
    padded = F.pad(probs, (0, -probs.shape[1] % NUM_MEMBERS))
    return padded.view(len(probs), NUM_MEMBERS, -1)


def _group_probs(members: Tensor) -> Float[Tensor, "rows groups"]:
    """Sum probabilities by group pairwise, in an order that does not depend on the batch.

    A reduction may add in another order when there are more rows, and a text drawn by plain passes
    would not be the one drawn by verifying ones.
    """
    while members.shape[1] > 1:
        half = members.shape[1] // 2
        members = members[:, :half] + members[:, half:]
    return members[:, 0]


def _of_group(members: Tensor, group: Int64[Tensor, " rows"]) -> Float[Tensor, "rows members"]:
    index = group[:, None, None].expand(-1, NUM_MEMBERS, 1)
    return members.gather(2, index)[:, :, 0]


def target_keys(request_key: int, num_committed: int, tree: TokenTree) -> list[int]:
    """Return the keys of the target's draws at the rows of the root and of every node.

    The root row draws the token at position `num_committed` of prompt + output.
    """
    depths = (0, *tree.depths)
    return [position_key(request_key, num_committed + depth) for depth in depths]


def target_tokens(
    probs: Float[Tensor, "rows vocab"], keys: Int64[Tensor, " rows"]
) -> Int64[Tensor, " rows"]:
    """Draw the target's own token at every row; siblings share the position key of theirs."""
    return race(probs, keys)


def walk(
    tree: TokenTree, draft_tokens: Sequence[int], target_tokens: Sequence[int]
) -> tuple[tuple[int, ...], int]:
    """Follow the target's drawn tokens, one per row, down the tree.

    Returns the accepted path (nodes from the root down) and the first target token no child
    carries.
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


def expected_on_walk(tree: TokenTree, path: Sequence[int], first_matches: Sequence[float]) -> float:
    """Return the expected number of accepted nodes of a coupled tree, given the walk taken.

    At every node the walk visits, the first child counts with its probability of being the target's
    draw given that the draft drew it (`first_matches`, read at first children alone). That a later
    sibling matches has no closed form given the draws before it, so such a match counts as it came.
    Accepted minus expected is therefore a sum of differences with mean 0, as for other proposals.
    """
    first_children = [children[0] for node in (-1, *path) if (children := tree.children(node))]
    num_others = len(set(path) - set(first_children))
    return sum(first_matches[child] for child in first_children) + num_others
