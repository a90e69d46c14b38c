"""From one pass's logits to verdicts: the right verifier per sequence, batched by rule.

Sequences that are walked (greedy, deterministic, coupled) need target tokens at every row; sampled
chains need the draft's rows beside the target's.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from forerun.engine.results import TokenLogprobs
from forerun.engine.sequence import Sequence
from forerun.errors import NumericalError
from forerun.sampling.chain import Rule, verify_chains
from forerun.sampling.choice import Choice, TokenSource
from forerun.sampling.config import Method, resolve_verification
from forerun.sampling.history import RowHistory
from forerun.sampling.logprobs import raw_logprobs
from forerun.sampling.noise import chain_keys
from forerun.sampling.processors import failed_rows, pack_params, target_probs
from forerun.sampling.proposal import Proposal, Verdict
from forerun.sampling.walk import (
    coupled_match_probs,
    edge_probs,
    expected_accepted,
    target_keys,
    target_tokens,
    walk,
)
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = ["Scored", "verify"]


@dataclass(slots=True, kw_only=True, eq=False)
class Scored:
    """A sequence whose pass yields tokens.

    `logits` holds the row of the last chain token, then one per draft node.
    """

    sequence: Sequence
    proposal: Proposal | None
    num_chain: int
    logits: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def tree(self) -> TokenTree:
        """Draft nodes; empty for a plain step."""
        return self.proposal.tree if self.proposal else NO_TREE

    @property
    def num_rows(self) -> int:
        """Logits rows."""
        return 1 + len(self.tree.parents)

    @property
    def method(self) -> Method:
        """The verifier its parameters and proposal ask for."""
        choice = self.proposal.choice if self.proposal else Choice.SAMPLED
        return resolve_verification(self.sequence.params, choice, is_chain=self.tree.is_chain)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the raw argmax decides."""
        return self.sequence.params.greedy and self.sequence.history is None

    def drafted(self) -> list[int]:
        """Ids of the draft nodes; waits for the drafter's device."""
        ids: list[int] = self.proposal.tokens.tolist() if self.proposal else []
        return ids

    def row_histories(self) -> list[RowHistory | None]:
        """History of every row, extended along its path in the tree."""
        history = self.sequence.history
        if history is None:
            return [None] * self.num_rows
        ids = self.drafted()
        paths = [self.tree.path(node) for node in range(len(ids))]
        return [history.at(), *(history.at([ids[n] for n in path]) for path in paths)]

    def row_keys(self) -> list[int]:
        """Noise keys of the target's draws at every row."""
        return target_keys(self.sequence.noise_key, len(self.sequence.ids), self.tree)

    def draw_keys(self, num_nodes: int) -> list[int]:
        """Noise keys of accept tests and final draw, for a chain padded to `num_nodes`."""
        return chain_keys(self.sequence.noise_key, len(self.sequence.ids), num_nodes)

    def token_logprobs(self, verdict: Verdict, num_taken: int) -> list[TokenLogprobs]:
        """Raw log-probabilities of the first `num_taken` emitted tokens."""
        rows = [0, *(node + 1 for node in verdict.path)][:num_taken]
        tokens = torch.tensor(verdict.tokens[:num_taken], device=self.logits.device)
        raw = raw_logprobs(self.logits[rows], tokens, self.sequence.params.logprobs or 0)
        tops = zip(raw.top_tokens.tolist(), raw.top_logprobs.tolist(), strict=True)
        return [
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
            for token, logprob, (ids, values) in zip(
                verdict.tokens, raw.token_logprobs.tolist(), tops, strict=False
            )
        ]


def verify(scored: Seq[Scored]) -> list[Verdict]:
    """Verdict of every scored sequence, in order.

    Raises:
        NumericalError: a sequence's logits are NaN or leave no token; nothing has been committed.
    """
    by_method: dict[Method, list[int]] = {}
    for index, item in enumerate(scored):
        by_method.setdefault(item.method, []).append(index)
    verdicts: dict[int, Verdict] = {}
    for method, indices in by_method.items():
        items = [scored[i] for i in indices]
        if method in ("block", "token"):
            found = verify_sampled(items, "block" if method == "block" else "token")
        else:
            found = verify_walked(items)
        verdicts.update(zip(indices, found, strict=True))
    return [verdicts[i] for i in range(len(scored))]


def probabilities(items: Seq[Scored]) -> tuple[Tensor, list[set[int]]]:
    """Processed target probabilities of all rows of `items`, shape (rows, vocab).

    Also returns which rows of each item have no law. Where only a rejected draft led there, they
    must not cost the request its text: plain decoding would never have seen them.
    """
    logits = torch.cat([item.logits for item in items]) if len(items) > 1 else items[0].logits
    rows = [i for i, item in enumerate(items) for _ in range(item.num_rows)]
    params = pack_params([item.sequence.params for item in items], logits.device, rows)
    histories: list[RowHistory | None] = []
    if any(item.sequence.history is not None for item in items):
        histories = [history for item in items for history in item.row_histories()]
    probs = target_probs(logits, params, histories)
    failed: list[set[int]] = [set() for _ in items]
    for row in failed_rows(probs):
        failed[rows[row]].add(row - rows.index(rows[row]))
    return probs, failed


def refuse(item: Scored) -> None:
    """Name the request whose logits cannot be used."""
    raise NumericalError(
        f"request {item.sequence.key}: the target's logits are NaN or infinite, or its parameters "
        "leave no possible token; nothing was emitted: abort it, and check dtype and weights",
        request_id=item.sequence.request_id,
    )


def verify_walked(items: Seq[Scored]) -> list[Verdict]:
    """Draw (or take the argmax) at every row and follow the draft as far as it agrees."""
    if all(item.is_plain_greedy for item in items):
        return [greedy_verdict(item) for item in items]
    probs, failed = probabilities(items)
    keys = torch.tensor([k for item in items for k in item.row_keys()], device=probs.device)
    tokens: list[int] = target_tokens(probs, keys).tolist()
    verdicts, start = [], 0
    for item, lawless in zip(items, failed, strict=True):
        end = start + item.num_rows
        verdict = walk_verdict(item, tokens[start:end], probs[start:end])
        check_visited(item, verdict.path, lawless)
        verdicts.append(verdict)
        start = end
    return verdicts


def check_visited(item: Scored, path: tuple[int, ...], failed: Collection[int]) -> None:
    """Refuse a sequence whose tokens were taken from a row without a law."""
    if failed and not {0, *(node + 1 for node in path)}.isdisjoint(failed):
        refuse(item)


def greedy_verdict(item: Scored) -> Verdict:
    """The walk of an argmax; what is accepted is certain, so it is also what is expected.

    A row whose largest logit is not finite has no law, as `target_probs` sees it.
    """
    finite = item.logits.amax(dim=-1).isfinite().tolist()
    path, final = walk(item.tree, item.drafted(), item.logits.argmax(dim=-1).tolist())
    check_visited(item, path, {row for row, good in enumerate(finite) if not good})
    return make_verdict(item, path, final, float(len(path)))


def walk_verdict(item: Scored, tokens: list[int], probs: Tensor) -> Verdict:
    """The walk of drawn target tokens, and how far it was expected to get."""
    proposal = item.proposal
    if proposal is None:
        return make_verdict(item, (), tokens[0], 0.0)
    drafted = proposal.tokens.to(probs.device)
    if proposal.choice is Choice.COUPLED and proposal.draft_probs is not None:
        edges = coupled_match_probs(probs[:-1], proposal.draft_probs.to(probs.device), drafted)
    else:
        edges = edge_probs(item.tree, drafted, probs)
    path, final = walk(item.tree, drafted.tolist(), tokens)
    return make_verdict(
        item, path, final, expected_accepted(item.tree, edges.nan_to_num(0.0).tolist())
    )


def make_verdict(item: Scored, path: tuple[int, ...], final: int, expected: float) -> Verdict:
    """Accepted tokens along `path`, then `final`: a bonus where nothing was left to reject."""
    drafted = item.drafted()
    at_leaf = not item.tree.children(path[-1] if path else -1)
    last = TokenSource.BONUS if at_leaf else TokenSource.RECOVERED
    return Verdict(
        path=path,
        tokens=(*(drafted[node] for node in path), final),
        sources=(*(TokenSource.ACCEPTED for _ in path), last),
        expected_accepted=expected,
    )


def verify_sampled(items: Seq[Scored], rule: Rule) -> list[Verdict]:
    """Block or token-level verification of sampled chains, padded to the longest of them.

    A chain ends where the target has no law: the tokens before decide that, so it is no bias.
    """
    probs, failed = probabilities(items)
    num_drafted = [min({item.num_rows - 1} | f) for item, f in zip(items, failed, strict=True)]
    depth = max(item.num_rows for item in items) - 1
    vocab_size = probs.shape[-1]
    target = probs.new_zeros(len(items), depth + 1, vocab_size)
    draft = probs.new_zeros(len(items), depth, vocab_size)
    tokens = torch.zeros(len(items), depth, dtype=torch.int64, device=probs.device)
    start = 0
    for row, item in enumerate(items):
        target[row, : item.num_rows] = probs[start : start + item.num_rows]
        start += item.num_rows
        if item.proposal is not None and item.proposal.draft_probs is not None:
            draft[row, : item.num_rows - 1] = item.proposal.draft_probs
            tokens[row, : item.num_rows - 1] = item.proposal.tokens
    outcome = verify_chains(
        target,
        draft,
        tokens,
        torch.tensor(num_drafted, device=probs.device),
        torch.tensor([item.draw_keys(depth) for item in items], device=probs.device),
        rule,
    )
    columns = (outcome.num_accepted, outcome.final_tokens, outcome.expected_accepted)
    verdicts = []
    for item, lawless, n, final, expected in zip(
        items, failed, *(column.tolist() for column in columns), strict=True
    ):
        check_visited(item, tuple(range(n)), lawless)
        verdicts.append(make_verdict(item, tuple(range(n)), final, expected))
    return verdicts
