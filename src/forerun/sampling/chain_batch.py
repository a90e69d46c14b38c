"""Verifies all sampled chains of one pass, which can have different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.sampling.chain import Rule, verify_chains
from forerun.sampling.kernels import SamplingKernels, kernels_for, on_host, row_chunks
from forerun.sampling.processors import failed_rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnChain:
    """A chain with the distributions that it was drawn from and its verification's noise keys.

    Attributes:
        keys: `noise.chain_keys`: one per node, then RECOVERED and BONUS.
    """

    draft_probs: Float[Tensor, "nodes vocab"] | None
    keys: Sequence[int]

    @property
    def num_drafted(self) -> int:
        """Number of draft tokens."""
        return len(self.keys) - 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainVerdicts:
    """Verdicts on the chains of a pass, with one entry per chain in each column.

    A chain ends where the target has no distribution: the tokens before decide that, so it is no
    bias. Where all of `num_valid` rows are accepted there is no final token.

    Attributes:
        num_valid: rows before the first without a distribution, of one more than were drafted.
        expected_accepted: E[num_accepted | draft tokens].
    """

    num_accepted: Sequence[int]
    final_tokens: Sequence[int]
    num_valid: Sequence[int]
    expected_accepted: Sequence[float]
    tokens: Sequence[int]


def verify_chain_batch(
    target_probs: Float[Tensor, "rows vocab"],
    tokens: Int64[Tensor, " rows"],
    chains: Sequence[DrawnChain],
    rule: Rule,
) -> ChainVerdicts:
    """Verify chains of different lengths with `chain.verify_chains`.

    Args:
        target_probs: of every chain one row more than it has nodes, in order.
        tokens: fed at these rows; the first of every chain is not a draft token.
    """
    draft_probs = [chain.draft_probs for chain in chains if chain.draft_probs is not None]
    kernels = kernels_for(target_probs)
    if kernels and all(probs.is_cpu and probs.dtype is torch.float32 for probs in draft_probs):
        return _by_kernels(kernels, target_probs, tokens, chains, rule)
    sizes = [chain.num_drafted + 1 for chain in chains]
    starts = [0, *accumulate(sizes)]
    columns = []
    for some in row_chunks(len(chains), max(sizes) * target_probs.shape[-1]):
        rows = slice(starts[some.start], starts[some.stop])  # so that padded copies stay small
        columns.append(_padded(target_probs[rows], tokens[rows], chains[some], rule))
    together = columns[0] if len(columns) == 1 else map(torch.cat, zip(*columns, strict=True))
    accepted, final, valid, expected, fed = on_host(*together, tokens)
    return ChainVerdicts(
        num_accepted=accepted,
        final_tokens=final,
        num_valid=valid,
        expected_accepted=expected,
        tokens=fed,
    )


def _by_kernels(
    kernels: SamplingKernels,
    target_probs: Tensor,
    tokens: Tensor,
    chains: Sequence[DrawnChain],
    rule: Rule,
) -> ChainVerdicts:
    draft_probs = [chain.draft_probs for chain in chains]
    found = kernels.verify_chains(
        target_probs,
        tokens.contiguous(),
        [
            probs if probs is None or probs.stride(1) == 1 else probs.contiguous()
            for probs in draft_probs
        ],
        [chain.keys for chain in chains],
        is_block=rule == "block",
    )
    accepted, final, valid, expected = zip(*found, strict=True)
    return ChainVerdicts(
        num_accepted=accepted,
        final_tokens=final,
        num_valid=valid,
        expected_accepted=expected,
        tokens=tokens.tolist(),
    )


def _padded(
    target_probs: Tensor, tokens: Tensor, chains: Sequence[DrawnChain], rule: Rule
) -> tuple[Tensor, ...]:
    """Verify chains padded to one length; returns the columns of `ChainVerdicts`."""
    device = target_probs.device
    lengths = [chain.num_drafted for chain in chains]
    rows = [length + 1 for length in lengths]
    target = _side_by_side(torch.split_with_sizes(target_probs, rows))
    fed = _side_by_side(torch.split_with_sizes(tokens, rows))
    none = target_probs[:0]
    draft = _side_by_side(
        [none if c.draft_probs is None else c.draft_probs.to(target_probs) for c in chains]
    )
    num_rows = torch.tensor(rows, device=device)
    num_valid = (~failed_rows(target)).cumprod(-1).sum(-1).minimum(num_rows)
    outcome = verify_chains(
        target,
        draft,
        fed[:, 1:],
        (num_rows - 1).minimum(num_valid),
        torch.tensor([_padded_keys(c.keys, max(lengths)) for c in chains], device=device),
        rule,
    )
    return outcome.num_accepted, outcome.final_tokens, num_valid, outcome.expected_accepted


def _padded_keys(keys: Sequence[int], num_nodes: int) -> list[int]:
    return [*keys[:-2], *[0] * (num_nodes + 2 - len(keys)), *keys[-2:]]


def _side_by_side(chains: Sequence[Tensor]) -> Tensor:
    """Stack rows by chain; chains of unequal length are padded with zeros."""
    if len(chains) == 1:
        return chains[0][None]
    if all(len(chain) == len(chains[0]) for chain in chains):
        return torch.stack([*chains])
    return torch.nn.utils.rnn.pad_sequence([*chains], batch_first=True)
