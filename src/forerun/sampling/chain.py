"""Verification of sampled chains: token-level rejection and block verification.

Each rule is a probability stage (acceptance and residual weights from probabilities and drawn
tokens) and a draw stage (noise against those weights, strict u < a). `verify_chains` composes them
for service; `forerun exact` feeds the same probability stage every possible draft in fp64 and sums
over all outcomes.

Shapes: a batch of chains padded to `nodes` drafted tokens, with `rows` = nodes + 1 target rows.
Row i is the distribution of the token drafted as node i, the last valid row that of the bonus
token. Padding is never read into a result, NaN included: `num_drafted` says where each chain ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor

from forerun.sampling.kernels import SamplingKernels, kernels_for, on_host, row_chunks
from forerun.sampling.noise import draw, uniform
from forerun.sampling.processors import failed_rows

Rule = Literal["token", "block"]
TargetProbs = Float[Tensor, "batch rows vocab"]
DraftProbs = Float[Tensor, "batch nodes vocab"]
Tokens = Int64[Tensor, "batch nodes"]
PerNode = Float64[Tensor, "batch nodes"]
Counts = Int64[Tensor, " batch"]
Ratios = Float64[Tensor, "batch rows"]

RESIDUAL_ELEMENTS = 1 << 20
"""Most elements of residual rows that are summed at once: fp64 takes three times their memory."""

SMALLEST = 1e-300
"""Stands in for a draft probability of 0, which no drawn token has: ratios stay finite."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainOutcome:
    """Result of verifying a batch of chains.

    Attributes:
        num_accepted: leading draft tokens to emit.
        accept_probs: what the accept noise was compared with.
        expected_accepted: E[num_accepted | draft tokens].
    """

    num_accepted: Int64[Tensor, " batch"]
    final_tokens: Int64[Tensor, " batch"]
    accept_probs: Float64[Tensor, "batch nodes"]
    expected_accepted: Float64[Tensor, " batch"]


def verify_chains(
    target_probs: TargetProbs,
    draft_probs: DraftProbs,
    tokens: Tokens,
    num_drafted: Counts,
    keys: Int64[Tensor, "batch draws"],
    rule: Rule,
) -> ChainOutcome:
    """Accept a prefix of every chain and draw the token that follows; exact for sampled chains."""
    chains = (target_probs, draft_probs, tokens, num_drafted)
    uniforms = uniform(keys)
    ratios = prefix_ratios(*chains) if rule == "block" else None
    accept = accept_probs(*chains, rule, ratios)
    accepted = num_accepted(accept, uniforms[:, :-2], rule)
    weights = final_weights(*chains, accepted, rule, ratios)
    last_noise = torch.where(accepted < num_drafted, uniforms[:, -2], uniforms[:, -1])
    return ChainOutcome(
        num_accepted=accepted,
        final_tokens=draw(weights, last_noise),
        accept_probs=accept,
        expected_accepted=expected_accepted(accept, rule),
    )


# -------------------------------------------------------------------------------- probability stage


def accept_probs(
    target_probs: TargetProbs,
    draft_probs: DraftProbs,
    tokens: Tokens,
    num_drafted: Counts,
    rule: Rule,
    ratios: Ratios | None = None,
) -> PerNode:
    """Acceptance probability of every node under `rule`; 0 for padding nodes.

    Arguments as for `verify_chains`; `ratios` are the prefix ratios where they are known, which
    only "block" uses.
    """
    if rule == "token":
        return token_accept_probs(target_probs, draft_probs, tokens, num_drafted)
    if ratios is None:
        ratios = prefix_ratios(target_probs, draft_probs, tokens, num_drafted)
    return block_accept_probs(target_probs, draft_probs, num_drafted, ratios)


def token_accept_probs(
    target_probs: TargetProbs, draft_probs: DraftProbs, tokens: Tokens, num_drafted: Counts
) -> PerNode:
    """Return min(1, target / draft) at each drawn token (2211.17192, algorithm 1)."""
    ratios = _drawn(target_probs, tokens) / _drawn(draft_probs, tokens).clamp(min=SMALLEST)
    return ratios.clamp(max=1).masked_fill_(_places(tokens) > num_drafted[:, None], 0.0)


def block_accept_probs(
    target_probs: TargetProbs, draft_probs: DraftProbs, num_drafted: Counts, ratios: Ratios
) -> PerNode:
    """Return the acceptance probabilities h_i of block verification (2403.10444, algorithm 2).

    h_i = Z_i / (Z_i + 1 - p_i) with Z_i the mass of the residual after node i and p_i the prefix
    ratio; at the last drafted node h = p. Where nothing is left on either side (0 / 0) h = 1.
    """
    accept = ratios[:, 1:]
    places, drafted = _places(accept), num_drafted[:, None]
    if accept.shape[1] > 1:
        before = accept[:, :-1]
        mass = _residual_mass(target_probs[:, 1:-1], draft_probs[:, 1:], before)
        inner = mass.div_((1 - before).add_(mass)).nan_to_num_(nan=1.0)
        inner = torch.where(places[:-1] == drafted, before, inner)
        accept = torch.cat([inner, accept[:, -1:]], dim=1)
    return accept.masked_fill(places > drafted, 0.0)


def prefix_ratios(
    target_probs: TargetProbs, draft_probs: DraftProbs, tokens: Tokens, num_drafted: Counts
) -> Ratios:
    """Return the prefix ratios p_0 = 1, p_i = min(1, p_{i-1} * target_i / draft_i) of each block.

    In logs the recursion is S_i - max(0, S_1 .. S_i), S the running sum of log ratios: a handful of
    operations for any K, and no underflow on the way. 0 in padding.
    """
    draft = _drawn(draft_probs, tokens).clamp(min=SMALLEST)
    logs = _drawn(target_probs, tokens).div_(draft).log_()
    sums = logs.masked_fill_(_places(tokens) > num_drafted[:, None], -torch.inf).cumsum(-1)
    # A leading 0 stands for p_0, and in the maximum for the 0 of the recursion.
    sums = torch.nn.functional.pad(sums, (1, 0))
    return sums.sub_(sums.cummax(-1).values).exp_()


def residual_weights(
    target_row: Float[Tensor, "batch vocab"],
    draft_row: Float[Tensor, "batch vocab"],
    prefix_ratio: Float64[Tensor, " batch"],
) -> Float[Tensor, "batch vocab"]:
    """Return the unnormalised residual distribution [prefix_ratio * target - draft]+ of each row.

    The token rule has ratio 1. Where nothing remains the two distributions agree up to rounding,
    and the target's own row is the limit.
    """
    residual = _residual(target_row, draft_row, prefix_ratio)
    is_nothing = residual.sum(-1, keepdim=True) <= 0
    return residual.addcmul_(target_row, is_nothing.to(residual.dtype))


def final_weights(  # noqa: PLR0913 (what a chain is made of)
    target_probs: TargetProbs,
    draft_probs: DraftProbs,
    tokens: Tokens,
    num_drafted: Counts,
    num_accepted: Counts,
    rule: Rule,
    ratios: Ratios | None = None,
) -> Float[Tensor, "batch vocab"]:
    """Return the weights of the final token: a residual row, or the bonus row after all nodes."""
    num_chains, num_nodes = tokens.shape
    target_row = _rows(target_probs, num_accepted)
    if num_nodes == 0:
        return target_row
    is_bonus = num_accepted >= num_drafted
    draft_row = _rows(draft_probs, num_accepted.clamp(max=num_nodes - 1))
    draft_row.mul_((~is_bonus[:, None]).to(draft_row.dtype))  # a bonus has nothing to subtract
    if rule == "token":
        ratio = torch.ones(num_chains, dtype=torch.float64, device=tokens.device)
    else:
        if ratios is None:
            ratios = prefix_ratios(target_probs, draft_probs, tokens, num_drafted)
        ratio = ratios.gather(1, num_accepted[:, None])[:, 0].masked_fill_(is_bonus, 1.0)
    return residual_weights(target_row, draft_row, ratio)


def expected_accepted(accept_probs: PerNode, rule: Rule) -> Float64[Tensor, " batch"]:
    """Return E[num_accepted] over the acceptance noise, given the draft tokens."""
    if rule == "token":
        return accept_probs.cumprod(-1).sum(-1)
    # P(num_accepted >= i) = 1 - P(no test from i on passes)
    none_from = (1 - accept_probs).flip(-1).cumprod(-1)
    return accept_probs.shape[1] - none_from.sum(-1)


# --------------------------------------------------------------------------------------- draw stage


def num_accepted(accept_probs: PerNode, uniforms: PerNode, rule: Rule) -> Counts:
    """Count tokens before the first failed test (rule "token") or up to the last passed one."""
    passed = uniforms < accept_probs
    if rule == "token":
        return passed.cumprod(-1).sum(-1)
    if passed.shape[1] == 0:
        return torch.zeros(len(passed), dtype=torch.int64, device=passed.device)
    return (passed * _places(passed)).amax(-1)


# ------------------------------------------------------------------------------------------ details


def _drawn(probs: Float[Tensor, "batch rows vocab"], tokens: Tokens) -> PerNode:
    return probs[:, : tokens.shape[1]].gather(-1, tokens[..., None])[..., 0].to(torch.float64)


def _places(nodes: Tensor) -> Int64[Tensor, " nodes"]:
    return torch.arange(1, nodes.shape[1] + 1, device=nodes.device)


def _rows(probs: Float[Tensor, "batch rows vocab"], index: Counts) -> Float[Tensor, "batch vocab"]:
    num_chains, num_rows, vocab_size = probs.shape
    first = torch.arange(0, num_chains * num_rows, num_rows, device=probs.device)
    return probs.reshape(-1, vocab_size).index_select(0, index + first)


def _residual(target: Tensor, draft: Tensor, ratio: Tensor) -> Tensor:
    return target.mul(ratio[..., None].to(target.dtype)).sub_(draft).clamp_(min=0)


def _residual_mass(target: Tensor, draft: Tensor, ratios: Tensor) -> PerNode:
    """Return the residual mass of every node: the sum of max(0, ratio * target - draft).

    It is the one pass over the vocabulary, taken in chunks of chains and of their nodes.
    """
    mass = torch.empty_like(ratios)
    num_chains, num_nodes, vocab_size = draft.shape
    for chains in row_chunks(num_chains, num_nodes * vocab_size):
        width = (chains.stop - chains.start) * vocab_size
        for nodes in row_chunks(num_nodes, width, RESIDUAL_ELEMENTS):
            part = (chains, nodes)
            residual = _residual(target[part], draft[part], ratios[part])
            mass[part] = residual.sum(-1, dtype=torch.float64)
    return mass


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
