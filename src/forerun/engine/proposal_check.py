"""Checks proposals, because verification of an invalid one would fail or bias the text.

A verifier trusts `draft_probs`: rows that the tokens were not drawn from bias the text unnoticed.
Not every mistake of a drafter can be found, but those that can be are refused here, before the
target pass that all requests share. Values are read for the whole step at once, which waits for the
device once; those that a drafter vouches for (`Assurance`) are read only where that is free.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from forerun.control.base import Tree
from forerun.engine.scheduler import ScheduledSequence
from forerun.errors import DrafterError
from forerun.sampling.choice import Choice
from forerun.sampling.config import resolve_verification
from forerun.sampling.proposal import Proposal
from forerun.sampling.tree_rules import expanded
from forerun.theory.tree import TokenTree

__all__ = ["check_proposals"]

MASS_TOLERANCE = 1e-4
"""Bounds the bias of rows that are off by a factor: fp32 softmax is far below, bf16 (0.4%) not."""


def check_proposals(
    entries: Sequence[ScheduledSequence], proposals: Sequence[Proposal | None], vocab_size: int
) -> None:
    """Refuse proposals that cannot be verified, or not exactly.

    Args:
        entries: what was asked for.
        proposals: what the drafter returned.
        vocab_size: of the target.

    Raises:
        DrafterError: one is malformed.
        InvalidRequest: the verifier a request asks for is not exact for its proposal.
    """
    filled: list[Proposal] = []
    for entry, proposal in zip(entries, proposals, strict=True):
        if proposal is not None:
            check_structure(entry, proposal, vocab_size)
            if proposal.num_drafted:
                filled.append(proposal)
    check_ids([p.tokens for p in filled if p.tokens.is_cpu or not p.is_assured], vocab_size)
    check_probs([p for p in filled if p.draft_probs is not None and not p.is_assured])


def check_structure(entry: ScheduledSequence, proposal: Proposal, vocab_size: int) -> None:
    """Check plan, shapes and dtypes of a proposal, but no values."""
    num_nodes, most = proposal.num_drafted, entry.plan.num_speculative_tokens
    if num_nodes > most:
        raise DrafterError(f"{num_nodes} nodes, but K is {most}")
    if isinstance(entry.plan.shape, Tree):
        check_tree(entry.plan.shape, proposal.tree)
    if proposal.tokens.shape != (num_nodes,) or proposal.tokens.dtype != torch.int64:
        raise DrafterError(
            f"{num_nodes} nodes, but tokens of shape {tuple(proposal.tokens.shape)} and dtype "
            f"{proposal.tokens.dtype}; there must be one int64 id per node"
        )
    if proposal.draft_probs is not None:
        check_shape(proposal, proposal.draft_probs, vocab_size)
    if num_nodes == 0:
        return
    resolve_verification(entry.params, proposal.choice, is_chain=proposal.tree.is_chain)
    if proposal.draft_probs is None and proposal.choice.is_drawn:
        raise DrafterError("a sampled proposal needs the draft_probs it was drawn from")


def check_tree(shape: Tree, tree: TokenTree) -> None:
    """Refuse a tree that is deeper or wider than planned."""
    depth, width = max(tree.depths, default=0), max(Counter(tree.parents).values(), default=0)
    if depth > shape.depth or width > shape.width:
        raise DrafterError(
            f"a tree of depth {depth} and width {width}, but the plan allows depth {shape.depth} "
            f"and width {shape.width}"
        )


def check_shape(proposal: Proposal, draft_probs: Tensor, vocab_size: int) -> None:
    """Refuse draft_probs unless they have one row per expanded parent, over the target's ids."""
    num_rows = len(set(proposal.tree.parents))
    if draft_probs.shape != (num_rows, vocab_size):
        raise DrafterError(
            f"draft_probs of shape {tuple(draft_probs.shape)}; {num_rows} expanded parents and "
            f"{vocab_size} tokens need ({num_rows}, {vocab_size})"
        )


def check_ids(tokens: Sequence[Tensor], vocab_size: int) -> None:
    """Refuse token ids that the target does not have."""
    if not tokens:
        return
    together = tokens[0] if len(tokens) == 1 else torch.cat([*tokens])
    ids: list[int] = together.tolist()
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise DrafterError(f"token id {low if low < 0 else high} is outside 0..{vocab_size - 1}")


def check_probs(proposals: Sequence[Proposal]) -> None:
    """Refuse draft_probs that are no distributions, or that give a drawn token probability 0."""
    if not proposals:
        return
    found: list[list[float]] = torch.stack([probs_figures(p) for p in proposals]).tolist()
    for excess, smallest, drawn in found:
        if not excess <= MASS_TOLERANCE or smallest < 0:  # NaN is not <= either
            raise DrafterError(
                "draft_probs are no distributions: NaN, negative or not adding up to 1; draw from "
                "softmax rows in fp32 and hand in these"
            )
        if drawn <= 0:
            raise DrafterError("a token has probability 0 in the draft_probs it was drawn from")


def probs_figures(proposal: Proposal) -> Tensor:
    """Largest deviation of a row's sum from 1, smallest entry, and smallest entry of a drawn token.

    In trees the last is looked at where verification needs it: of siblings that were drawn without
    replacement, and of last children. A token that was drawn twice counts as impossible.
    """
    rows = proposal.draft_probs
    assert rows is not None
    excess = (rows.sum(-1, dtype=torch.float32) - 1).abs().amax()
    smallest = rows.amin()
    drawn = torch.ones_like(excess)
    if proposal.tree.is_chain:
        drawn = rows.gather(-1, proposal.tokens[:, None].to(rows.device)).amin()
    elif proposal.choice in (Choice.WITHOUT_REPLACEMENT, Choice.TOP_AND_SAMPLED):
        drawn = smallest_drawn(proposal, rows)
    return torch.stack([figure.to(torch.float64) for figure in (excess, smallest, drawn)])


def smallest_drawn(proposal: Proposal, rows: Tensor) -> Tensor:
    """Smallest probability of a drawn node in a tree; 0 where siblings break their rule."""
    tree, tokens = proposal.tree, proposal.tokens.to(rows.device)
    is_top = proposal.choice is Choice.TOP_AND_SAMPLED
    smallest = rows.new_ones(())
    for row, parent in enumerate(expanded(tree)):
        children = tree.children(parent)
        ids = tokens[list(children)]
        probs = rows[row, ids]
        drawn = probs[-1] if is_top else probs.amin()
        is_wrong = len(set(ids.tolist())) < len(children) or bool(is_top and probs[:-1].any())
        smallest = torch.minimum(smallest, drawn * (not is_wrong))
    return smallest
