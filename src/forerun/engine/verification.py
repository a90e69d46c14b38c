"""Verifies all sequences of a pass in batches, one batch per verifier.

Each batch waits for the device once: what verdicts are made of comes over together, the drafted
tokens included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.engine.scheduler import Rule, ScheduledSequence
from forerun.errors import MaskError, NumericalError
from forerun.sampling.chain import DrawnChain, verify_chain_batch
from forerun.sampling.config import Choice, TokenSource
from forerun.sampling.history import RowHistory
from forerun.sampling.kernels import largest, on_host
from forerun.sampling.noise import chain_keys
from forerun.sampling.processors import failed_rows, pack_params, target_probs
from forerun.sampling.proposal import Proposal, Verdict
from forerun.sampling.tree_rules import tree_keys, verify_trees
from forerun.sampling.walk import (
    coupled_match_probs,
    edge_probs,
    expected_accepted,
    expected_on_walk,
    target_keys,
    target_tokens,
    walk,
)
from forerun.theory.tree import expanded


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VerifyBatch:
    """Scheduled sequences of a pass that are verified by the same method.

    Attributes:
        logits: row of the last pending token of each, then one per draft node.
        tokens: the token fed at each row.
    """

    entries: Seq[ScheduledSequence]
    logits: Float[Tensor, "rows vocab"]
    tokens: Int64[Tensor, " rows"]

    def rows(self) -> Iterator[tuple[ScheduledSequence, slice]]:
        """Every sequence with the range of its rows."""
        start = 0
        for entry in self.entries:
            yield entry, slice(start, start + entry.num_logit_rows)
            start += entry.num_logit_rows


def verify(
    entries: Seq[ScheduledSequence],
    logits: Float[Tensor, "rows vocab"],
    tokens: Int64[Tensor, " rows"],
) -> list[Verdict]:
    """Return the verdict of every sequence, in order.

    `logits` and `tokens` have the rows of each: of the last pending token, then one per draft node.

    Raises:
        NumericalError: a sequence's logits are NaN or leave no token, or its parameters make the
            computation fail; it names the request, and nothing has been committed.
    """
    try:
        return _verify_by_rule(entries, logits, tokens)
    except NumericalError:
        raise
    except Exception as error:
        failed = _first_that_fails(entries, logits, tokens)
        if failed is None:
            raise
        raise NumericalError(
            f"request {failed.sequence.key}: verification failed with its parameters ({error!r}); "
            "nothing was emitted: abort it, the others go on",
            request_id=failed.sequence.request_id,
        ) from error


def _first_that_fails(
    entries: Seq[ScheduledSequence], logits: Tensor, tokens: Tensor
) -> ScheduledSequence | None:
    """Return the first sequence that cannot be verified even alone."""
    for entry, rows in VerifyBatch(entries=entries, logits=logits, tokens=tokens).rows():
        try:
            _verify_by_rule([entry], logits[rows], tokens[rows])
        except Exception:  # noqa: BLE001 (the caller raises what went wrong in the batch)
            return entry
    return None


def _verify_by_rule(
    entries: Seq[ScheduledSequence], logits: Tensor, tokens: Tensor
) -> list[Verdict]:
    by_rule: dict[Rule, list[int]] = {}
    for index, entry in enumerate(entries):
        by_rule.setdefault(entry.rule, []).append(index)
    if len(by_rule) == 1:
        (rule,) = by_rule
        return _verify_batch(rule, VerifyBatch(entries=entries, logits=logits, tokens=tokens))
    ends = list(accumulate(entry.num_logit_rows for entry in entries))
    verdicts: dict[int, Verdict] = {}
    for rule, indices in by_rule.items():
        wanted = [
            row for i in indices for row in range(ends[i] - entries[i].num_logit_rows, ends[i])
        ]
        rows = torch.tensor(wanted, device=logits.device)
        batch = VerifyBatch(
            entries=[entries[i] for i in indices], logits=logits[rows], tokens=tokens[rows]
        )
        verdicts |= zip(indices, _verify_batch(rule, batch), strict=True)
    return [verdicts[i] for i in range(len(entries))]


def _verify_batch(rule: Rule, batch: VerifyBatch) -> list[Verdict]:
    """Verify the sequences of a batch with one method and return their verdicts."""
    if rule == "greedy":
        return _verify_greedy(batch)
    if rule == "walk":
        return _verify_walked(batch)
    if rule == "traversal":
        return _verify_drawn_trees(batch)
    return _verify_sampled(batch, rule)


def refuse(entry: ScheduledSequence) -> None:
    """Raise NumericalError for a request whose logits or processed probabilities are invalid.

    It is a MaskError where the request combines a mask with other limits on tokens.
    """
    history = entry.sequence.history
    is_limited = history is not None and history.mask is not None and history.bias is not None
    raise (MaskError if is_limited else NumericalError)(
        f"request {entry.sequence.key}: the target's logits are NaN or infinite, or its parameters "
        "leave no possible token; nothing was emitted: abort it, and check dtype and weights",
        request_id=entry.sequence.request_id,
    )


def _check_visited(entry: ScheduledSequence, path: tuple[int, ...], failed: Seq[bool]) -> None:
    if failed[0] or any(failed[node + 1] for node in path):
        refuse(entry)


def verdict_of(
    entry: ScheduledSequence, path: tuple[int, ...], emitted: tuple[int, ...], expected: float
) -> Verdict:
    """Build the verdict of an accepted path, with a bonus token if the path ends at a leaf."""
    at_leaf = not entry.tree.children(path[-1] if path else -1)
    last = TokenSource.BONUS if at_leaf else TokenSource.RECOVERED
    if not entry.num_drafted:
        last = TokenSource.PLAIN
    return Verdict(
        path=path,
        tokens=emitted,
        sources=(TokenSource.ACCEPTED,) * len(path) + (last,),
        expected_accepted=expected,
    )


# ------------------------------------------------------------------------------------------- walked


def _verify_greedy(batch: VerifyBatch) -> list[Verdict]:
    """Accept nodes that equal the raw argmax, so that expected_accepted equals num_accepted.

    A row whose largest logit is not finite has no valid probabilities, as in `target_probs`.
    """
    scores, best = largest(batch.logits)
    targets, fed, highest = on_host(best, batch.tokens, scores)
    are_finite = all(map(math.isfinite, highest))
    verdicts = []
    for entry, rows in batch.rows():
        drafted = fed[rows][1:]
        path, final = walk(entry.tree, drafted, targets[rows])
        if not are_finite:
            _check_visited(entry, path, [not math.isfinite(score) for score in highest[rows]])
        verdicts.append(verdict_of(entry, path, (*[drafted[n] for n in path], final), len(path)))
    return verdicts


def _verify_walked(batch: VerifyBatch) -> list[Verdict]:
    """Draw a target token at every row, and follow the tree while its nodes match.

    A row without valid probabilities matters only on the walked path: plain decoding would never
    have reached the rows of rejected nodes.
    """
    probs = probabilities(batch)
    keys = [
        key
        for entry in batch.entries
        for key in target_keys(entry.sequence.noise_key, len(entry.sequence.ids), entry.tree)
    ]
    drawn = target_tokens(probs, torch.tensor(keys, device=probs.device))
    columns = on_host(drawn, batch.tokens, failed_rows(probs), _match_probs(batch, probs))
    targets, fed, failed, matches = columns
    verdicts = []
    for entry, rows in batch.rows():
        drafted = fed[rows][1:]
        path, final = walk(entry.tree, drafted, targets[rows])
        _check_visited(entry, path, failed[rows])
        expected = _expected_on(entry, path, matches[rows][1:])
        verdicts.append(verdict_of(entry, path, (*[drafted[n] for n in path], final), expected))
    return verdicts


def _expected_on(entry: ScheduledSequence, path: tuple[int, ...], matches: Seq[float]) -> float:
    """Return `Verdict.expected_accepted` of a walked tree from the output of `_match_probs`."""
    proposal = entry.proposal
    if proposal is None or proposal.choice is not Choice.COUPLED:
        return expected_accepted(entry.tree, matches)
    if proposal.draft_probs is None:  # nothing is known of how the draft follows the noise
        return len(path)
    if entry.tree.is_chain:
        return expected_accepted(entry.tree, matches)
    return expected_on_walk(entry.tree, path, matches)


def _match_probs(batch: VerifyBatch, probs: Tensor) -> Float[Tensor, " rows"]:
    """Return the probability that each node is accepted given its parent; 0 for the first row.

    In a coupled tree only first children have it; the others have 0.
    """
    matches = []
    for entry, rows in batch.rows():
        rows_probs, tokens, proposal = probs[rows], batch.tokens[rows][1:], entry.proposal
        matches.append(probs.new_zeros(1))
        if proposal is None or not proposal.num_drafted:
            continue
        if proposal.choice is Choice.COUPLED and proposal.draft_probs is not None:
            matches.append(_coupled_matches(proposal, rows_probs, tokens))
        else:
            matches.append(edge_probs(entry.tree, tokens, rows_probs))
    return torch.cat(matches).nan_to_num(0.0)


def _coupled_matches(proposal: Proposal, probs: Tensor, tokens: Tensor) -> Float[Tensor, " nodes"]:
    """Return the match probability of each parent's first child, in node order; 0 elsewhere."""
    assert proposal.draft_probs is not None
    draft_probs = proposal.draft_probs.to(probs.device)  # a row per expanded parent
    if proposal.tree.is_chain:
        return coupled_match_probs(probs[:-1], draft_probs, tokens)
    parents = expanded(proposal.tree)
    first = torch.tensor([proposal.tree.children(p)[0] for p in parents], device=probs.device)
    rows = torch.tensor(parents, device=probs.device) + 1
    matches = probs.new_zeros(len(tokens))
    matches[first] = coupled_match_probs(probs[rows], draft_probs, tokens[first])
    return matches


def probabilities(batch: VerifyBatch) -> Float[Tensor, "rows vocab"]:
    """Compute the processed target probabilities of all rows."""
    entries = batch.entries
    rows = [index for index, entry in enumerate(entries) for _ in range(entry.num_logit_rows)]
    params = pack_params([entry.sequence.params for entry in entries], batch.logits.device, rows)
    histories: list[RowHistory | None] = []
    if any(entry.sequence.history is not None for entry in entries):
        drafted: list[int] = batch.tokens.tolist()
        for entry, entry_rows in batch.rows():
            histories += entry.row_histories(drafted[entry_rows][1:], batch.logits.shape[-1])
    return target_probs(batch.logits, params, histories)


def drafted_probs(
    entry: ScheduledSequence, *, is_raw: bool = False
) -> tuple[list[float] | None, list[float] | None]:
    """Return target's and draft's probability of every drafted token, after a step with its logits.

    The target's are those that verification used, or with `is_raw` or where the argmax decides
    those before the request's parameters. None where penalties or a mask, which have changed since,
    apply to the target, and where no distribution was drawn from.
    """
    proposal, logits = entry.proposal, entry.logits
    assert proposal is not None
    assert logits is not None
    parents = torch.tensor(proposal.tree.parents, device=logits.device)
    tokens = proposal.tokens.to(logits.device)[:, None]
    targets = drafts = None
    if is_raw or entry.rule == "greedy":
        targets = logits[parents + 1].float().softmax(-1).gather(-1, tokens)[:, 0].tolist()
    elif entry.sequence.history is None:
        params = pack_params([entry.sequence.params], logits.device, [0] * len(logits))
        rows = target_probs(logits, params, [])
        targets = rows[parents + 1].gather(-1, tokens)[:, 0].tolist()
    if proposal.draft_probs is not None:
        places = {node: row for row, node in enumerate(expanded(proposal.tree))}
        of_nodes = proposal.draft_probs.to(logits.device)[
            [places[p] for p in proposal.tree.parents]
        ]
        drafts = of_nodes.gather(-1, tokens)[:, 0].tolist()
    return targets, drafts


# ------------------------------------------------------------------------------------------ sampled


def _verify_sampled(batch: VerifyBatch, rule: Rule) -> list[Verdict]:
    """Verify sampled chains by block or token-level verification."""
    assert rule in ("block", "token")
    found = verify_chain_batch(
        probabilities(batch), batch.tokens, [_drawn_chain(entry) for entry in batch.entries], rule
    )
    verdicts = []
    for index, (entry, rows) in enumerate(batch.rows()):
        num_accepted = found.num_accepted[index]
        if num_accepted == found.num_valid[index]:
            refuse(entry)
        emitted = (
            *found.tokens[rows.start + 1 : rows.start + 1 + num_accepted],
            found.final_tokens[index],
        )
        path, expected = tuple(range(num_accepted)), found.expected_accepted[index]
        verdicts.append(verdict_of(entry, path, emitted, expected))
    return verdicts


def _drawn_chain(entry: ScheduledSequence) -> DrawnChain:
    """Return the drafted chain of a sequence with its noise keys; empty for a plain step."""
    sequence, proposal = entry.sequence, entry.proposal
    return DrawnChain(
        draft_probs=None if proposal is None else proposal.draft_probs,
        keys=chain_keys(sequence.noise_key, len(sequence.ids), entry.num_drafted),
    )


# -------------------------------------------------------------------------------------------- trees


def _verify_drawn_trees(batch: VerifyBatch) -> list[Verdict]:
    """Verify trees whose nodes were drawn from the draft, one tree after another."""
    probs = probabilities(batch)
    proposals = [entry.proposal for entry in batch.entries]
    draft_probs = [p.draft_probs for p in proposals if p and p.draft_probs is not None]
    outcomes = verify_trees(
        [entry.tree for entry in batch.entries],
        probs,
        draft_probs,
        batch.tokens,
        [
            tree_keys(entry.sequence.noise_key, len(entry.sequence.ids), entry.num_drafted)
            for entry in batch.entries
        ],
    )
    verdicts = []
    for entry, found in zip(batch.entries, outcomes, strict=True):
        if not found.is_valid:
            refuse(entry)
        verdicts.append(verdict_of(entry, found.path, found.tokens, found.expected_accepted))
    return verdicts
