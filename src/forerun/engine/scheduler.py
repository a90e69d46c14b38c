"""Continuous batching: which sequences run, and how many rows each gets in a pass.

By priority, then first come, first served. A prefill never starves decoding: every running sequence
gets its decode rows first, prompt chunks share what is left of the pass.

A sequence that has to give up its place loses its KV and nothing else. It waits where it would have
waited, and its tokens are read again later, as a longer prompt. Its text is not affected: noise is
keyed by position or by the committed length at the start of a step, a step is taken as a whole or
not at all, so no number is drawn twice and none is skipped.
"""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import ChainDraft
from forerun.engine.config import EngineConfig
from forerun.engine.results import TokenLogprobs
from forerun.engine.sequence import Sequence
from forerun.errors import MaskError
from forerun.models.base import Context, CycleMember, Span
from forerun.models.kv_store import MIN_SHARED_TOKENS, KVStore, count_common
from forerun.sampling.config import Choice, resolve_verification
from forerun.sampling.history import RowHistory, problem_of_allowed
from forerun.sampling.kernels import raw_logprobs
from forerun.sampling.proposal import Proposal, Verdict
from forerun.theory.tree import NO_TREE, TokenTree

Rule = Literal["greedy", "walk", "block", "token", "traversal"]
"""Names of the verifiers in `engine.verification`, which `ScheduledSequence.rule` chooses from.

They are the methods of `resolve_verification`, of which "coupled" is a walk, and "greedy", which
compares draft tokens with the argmax of the raw logits.
"""

PLAIN = Plan()


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledSequence:
    """A running sequence in one step: what it drafts, feeds and emits.

    Attributes:
        num_cached: committed tokens whose KV the target held before the step.
        num_pending: committed tokens whose KV it did not hold; after the prompt the last token.
        proposal: what was drafted; None is plain decoding. `draft` sets it.
        tree: of the draft nodes; empty for a plain step.
        num_logit_rows: rows with logits: the last pending token's, and one per draft node.
        num_chain: pending tokens fed in this pass, before the draft nodes (a chain in the sense of
            `Span`, not of a draft); 0 where the pass had no room.
        verdict: the accepted path and the emitted tokens; None while a prompt is being read.
        num_emitted: tokens of the verdict that were appended; a stop may cut them.
        top_tokens: the target's most likely tokens after every token fed at a row with logits, for
            drafters that learn from them.
    """

    sequence: Sequence
    context: Context
    num_cached: int = 0
    num_pending: int
    plan: Plan = PLAIN
    proposal: Proposal | None = None
    tree: TokenTree = NO_TREE
    num_drafted: int = 0
    num_logit_rows: int = 1
    num_chain: int = 0
    verdict: Verdict | None = None
    logits: Tensor | None = None
    num_emitted: int = 0
    top_tokens: Mapping[int, list[int]] = field(default_factory=dict)

    @classmethod
    def of(cls, sequence: Sequence) -> ScheduledSequence:
        """Create the entry of a running sequence for the next step."""
        context = sequence.context
        assert context is not None
        num_cached = context.num_cached
        return cls(
            sequence=sequence,
            context=context,
            num_cached=num_cached,
            num_pending=len(sequence.ids) - num_cached,
        )

    def draft(self, proposal: Proposal | None) -> None:
        """Set the draft of this step; None decodes plainly."""
        self.proposal = proposal
        self.tree = NO_TREE if proposal is None else proposal.tree
        self.num_drafted = len(self.tree.parents)
        self.num_logit_rows = 1 + self.num_drafted

    @property
    def decodes(self) -> bool:
        """Whether a single token is pending, so that the sequence can draft."""
        return self.num_pending == 1

    @property
    def prefills(self) -> bool:
        # The last chunk of a prompt may be one row, as decoding always is.
        return self.num_chain > 1 or self.sequence.num_output == self.num_emitted

    @property
    def decodes_plainly(self) -> bool:
        return self.plan.num_speculative_tokens == 0 and not self.prefills

    @property
    def completes(self) -> bool:
        return self.num_chain == self.num_pending

    @property
    def depth(self) -> int:
        """Depth of the deepest draft node; 0 without draft nodes."""
        return max(self.tree.depths, default=0)

    @property
    def rule(self) -> Rule:
        """Name of the verifier; "greedy" if the argmax of the raw logits decides."""
        params = self.sequence.params
        if params.greedy and self.sequence.history is None:
            return "greedy"
        proposal = self.proposal  # without a draft every verifier draws the same token
        choice = proposal.choice if proposal and proposal.num_drafted else Choice.SAMPLED
        method = resolve_verification(params, choice, is_chain=self.tree.is_chain)
        return "walk" if method == "coupled" else method

    def pending(self) -> list[int]:
        """Return the pending tokens, whose rows precede those of the draft nodes."""
        return self.sequence.ids[self.num_cached : self.num_cached + self.num_chain]

    def span(self) -> Span:
        """Return the rows of the sequence in the pass."""
        return Span(
            slot=self.context.slot, start=self.num_cached, num_chain=self.num_chain, tree=self.tree
        )

    def member(self, draft: ChainDraft | None) -> CycleMember | None:
        """Return the sequence as a member of cycles; None where it needs steps of Python.

        Kernels shape distributions by temperature, min_p, top_k and top_p alone, and keep no
        log-probabilities.
        """
        sequence, params = self.sequence, self.sequence.params
        is_scored = params.logprobs is not None or params.prompt_logprobs is not None
        if is_scored or sequence.history is not None or self.num_pending != 1:
            return None
        choice = Choice.SAMPLED if draft is None else draft.choice
        rule = "greedy" if params.greedy else resolve_verification(params, choice)
        context = None if draft is None else draft.context
        return CycleMember(
            noise_key=sequence.noise_key,
            num_committed=self.num_cached + 1,
            num_left=sequence.max_new,
            slot=self.context.slot,
            unread=sequence.ids[-1:] if context is None else context.pending(),
            draft_slot=0 if context is None else context.slot,
            num_draft_rows=0 if context is None else context.num_cached,
            num_drafted=self.plan.num_speculative_tokens,
            rule="walk" if rule == "coupled" else rule,
            is_coupled=choice is Choice.COUPLED,
            ends=sequence.stops.ends,
            temperature=params.temperature,
            draft_temperature=0.0 if draft is None else draft.temperature,
            truncation=(params.min_p, max(params.top_k, 0), 1 - params.top_p),
        )

    def row_histories(self, drafted: list[int], vocab_size: int) -> list[RowHistory | None]:
        """Return the history of every row, extended along its path in the tree of `drafted` ids.

        Raises MaskError where the request's token mask raised, or returned no boolean per token.
        """
        history = self.sequence.history
        if history is None:
            return [None] * self.num_logit_rows
        try:
            rows = [*history.along(self.tree, drafted)]
        except (Exception, SystemExit) as error:  # a mask is the caller's own code
            raise self._mask_error(f"raised {error!r}") from error
        for row in rows:
            if row.mask is not None and (problem := problem_of_allowed(row.allowed, vocab_size)):
                raise self._mask_error(problem)
        return list(rows)

    def _mask_error(self, problem: str) -> MaskError:
        """Return the error for an exception in this request's token mask."""
        return MaskError(
            f"request {self.sequence.key}: its token mask {problem}; nothing of this step was "
            "emitted: abort it, the others go on",
            request_id=self.sequence.request_id,
        )

    def commit(self) -> None:
        """Append the emitted tokens and commit the rows of fed tokens and of the accepted path.

        The other rows are gone. A sequence that a stop ends keeps only the fed tokens' rows, which
        other sequences may begin with.
        """
        sequence, verdict = self.sequence, self.verdict
        path: tuple[int, ...] = ()
        if verdict is not None:
            self.num_emitted = sequence.append(verdict.tokens, verdict.sources)
            if sequence.params.logprobs is not None:
                sequence.logprobs += self.token_logprobs()
            sequence.acceptance.add(self.depth, len(verdict.path), num_drafted=self.num_drafted)
            self._note_times()
            path = verdict.path if sequence.stop is None else ()
        if not path or path[-1] == len(path) - 1:
            self.context.commit(range(self.num_chain + len(path)))
        else:
            self.context.commit([*range(self.num_chain), *(self.num_chain + n for n in path)])

    @property
    def scored_rows(self) -> range:
        """Fed rows whose next token is of the prompt and gets its log-probability from them."""
        missing = self.sequence.num_unscored
        if not missing:
            return range(0)
        first = self.sequence.num_prompt - 1 - missing - self.num_cached
        return range(max(0, first), min(self.num_chain, first + missing))

    def score_prompt(self, logits: Tensor) -> None:
        """Store log-probabilities of prompt tokens, from the logits of the scored rows."""
        sequence, rows = self.sequence, self.scored_rows
        first = self.num_cached + rows.start + 1
        tokens = sequence.ids[first : first + len(rows)]
        most = sequence.params.prompt_logprobs or 0
        sequence.prompt_logprobs += _logprobs_of(logits, tokens, most)

    def _note_times(self) -> None:
        """Record the times of the first token and of the sequence's end."""
        sequence = self.sequence
        if sequence.first_token_at_s is not None and sequence.stop is None:
            return
        now_s = time.monotonic()
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
        if sequence.stop is not None:
            sequence.finished_at_s = now_s

    def token_logprobs(self) -> list[TokenLogprobs]:
        """Return raw log-probabilities of the emitted tokens, whose logits must have been kept."""
        verdict, logits = self.verdict, self.logits
        assert verdict is not None
        assert logits is not None
        rows = [0, *(node + 1 for node in verdict.path)][: self.num_emitted]
        tokens = verdict.tokens[: self.num_emitted]
        return _logprobs_of(logits[rows], tokens, self.sequence.params.logprobs or 0)


def _logprobs_of(logits: Tensor, tokens: Seq[int], top_n: int) -> list[TokenLogprobs]:
    """Return the raw log-probability of one token per row, and of the most likely ones there."""
    raw = raw_logprobs(logits, torch.tensor(tokens, dtype=torch.int64, device=logits.device), top_n)
    tops = zip(raw.top_tokens.tolist(), raw.top_logprobs.tolist(), strict=True)
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
        for token, logprob, (ids, values) in zip(
            tokens, raw.token_logprobs.tolist(), tops, strict=True
        )
    ]


MAX_LOOKED_AT = 32
"""Waiting sequences that are compared with the running ones at most, before each step."""


class Scheduler:
    """Queue of waiting sequences and batch of running ones."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    @property
    def has_unfinished(self) -> bool:
        """Whether any sequence waits or runs."""
        return bool(self.waiting or self.running)

    @property
    def num_unfinished(self) -> int:
        """Number of sequences that wait or run."""
        return len(self.waiting) + len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue by its rank."""
        insort(self.waiting, sequence, key=rank)

    def schedule(
        self, store: KVStore, release: Callable[[Sequence], None]
    ) -> list[ScheduledSequence]:
        """Preempt and admit sequences, and return the entries of all that run.

        Rows of prompts depend on what is drafted and are shared out afterwards, by `assign_rows`.

        Args:
            store: of the target; an admitted sequence reuses a prefix that is in it.
            release: frees what a preempted sequence held.
        """
        if self.waiting or self.config.max_kv_tokens is not None:
            for sequence in self.preempt(store.num_free):
                release(sequence)
            for sequence in self.admit(store.num_free, shares_parts=store.shares_parts):
                sequence.context = Context(store, sequence.ids, sequence.scope)
                if sequence.joined_at_s is None:
                    sequence.joined_at_s = time.monotonic()
                    sequence.num_cached = sequence.context.num_cached
        return self.entries()

    def entries(self) -> list[ScheduledSequence]:
        """Return a new entry of every running sequence."""
        return [ScheduledSequence.of(sequence) for sequence in self.running]

    def must_change(self) -> bool:
        """Whether the running sequences cannot all go on: one has ended, or the KV is full."""
        if self.config.max_kv_tokens is not None and self._holds_too_much():
            return True
        return any([sequence.stop is not None for sequence in self.running])

    def preempt(self, num_free_slots: int) -> list[Sequence]:
        """Move sequences back to the queue; returns them before their KV slots are freed.

        The last in order gives way where the KV holds too many rows, and where a waiting sequence
        with a lower priority number would have no room otherwise. One sequence always stays.
        """
        victims: list[Sequence] = []
        while self.running:
            last = max(self.running, key=rank)
            num_free = num_free_slots + len(victims)
            if not (self._holds_too_much() or self._outranks(last, num_free)):
                break
            self.running.remove(last)
            victims.append(last)
        for victim in victims:
            victim.num_preemptions += 1
            self.add(victim)
        return victims

    def _holds_too_much(self) -> bool:
        most = self.config.max_kv_tokens
        return most is not None and len(self.running) > 1 and self._num_kv_tokens() > most

    def _outranks(self, last: Sequence, num_free_slots: int) -> bool:
        if not self.waiting or self.waiting[0].rank[0] >= last.rank[0]:
            return False
        return not self._has_room(self.waiting[0], num_free_slots)

    def admit(self, num_free_slots: int, *, shares_parts: bool = True) -> Iterator[Sequence]:
        """Move waiting sequences into the batch one at a time while there is room.

        Give each its context before asking for the next: the next may begin with its tokens. Where
        a store cannot share parts of a text, no sequence waits for another's prompt.
        """
        place = 0
        while place < min(len(self.waiting), MAX_LOOKED_AT):
            sequence = self.waiting[place]
            if not self._has_room(sequence, num_free_slots):
                return
            if shares_parts and self._is_being_read(sequence):
                place += 1  # the sequences after it need not wait
                continue
            self.running.append(self.waiting.pop(place))
            num_free_slots -= 1
            yield sequence

    def _has_room(self, sequence: Sequence, num_free_slots: int) -> bool:
        if num_free_slots < 1 or len(self.running) >= self.config.max_batch:
            return False
        most = self.config.max_kv_tokens
        if most is None or not self.running:
            return True
        return self._num_kv_tokens() + self._kv_tokens(sequence) <= most

    def _kv_tokens(self, sequence: Sequence) -> int:
        return len(sequence.ids) + self.config.max_nodes

    def _num_kv_tokens(self) -> int:
        return sum(map(self._kv_tokens, self.running))

    def _is_being_read(self, sequence: Sequence) -> bool:
        """Whether a running sequence is feeding a prefix that `sequence` could reuse afterwards."""
        return sequence.scope is not None and any(
            num_unread(reader, sequence) >= MIN_SHARED_TOKENS
            for reader in self.running
            if reader.scope == sequence.scope
        )

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from the queue or from the batch."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)

    def drop_finished(self) -> list[Sequence]:
        """Remove finished sequences from the batch and return them."""
        finished = [s for s in self.running if s.stop is not None]
        if finished:
            self.running = [s for s in self.running if s.stop is None]
        return finished

    def assign_rows(self, scheduled: Seq[ScheduledSequence]) -> list[ScheduledSequence]:
        """Decide how many pending tokens each running sequence feeds in this pass."""
        budget = self.config.max_step_rows
        for entry in scheduled:
            if entry.decodes:
                entry.num_chain = 1
                budget -= entry.num_logit_rows
        for entry in scheduled:
            if not entry.decodes:
                entry.num_chain = max(0, min(entry.num_pending, self.config.prefill_chunk, budget))
                budget -= entry.num_chain
        return [entry for entry in scheduled if entry.num_chain]


def rank(sequence: Sequence) -> tuple[int, int]:
    """Return the sort key of a sequence: priority, then order of arrival."""
    return sequence.rank


def num_unread(reader: Sequence, sequence: Sequence) -> int:
    """Number of shared prefix tokens that `reader` has not fed yet; 0 if it decodes."""
    if reader.context is None or reader.context.num_pending <= 1:
        return 0
    num_common = min(count_common(reader.ids, sequence.ids), len(sequence.ids) - 1)
    return num_common - reader.context.num_cached
