"""A scheduled sequence: what one running sequence plans, drafts, feeds and gets in one step."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.engine.results import TokenLogprobs
from forerun.engine.sequence import Sequence
from forerun.errors import MaskError
from forerun.models.base import Span
from forerun.models.context import Context
from forerun.sampling.choice import Choice
from forerun.sampling.config import SamplingParams, resolve_verification
from forerun.sampling.history import RowHistory
from forerun.sampling.logprobs import raw_logprobs
from forerun.sampling.mask import problem_of_allowed
from forerun.sampling.proposal import Proposal, Verdict
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = ["PLAIN", "Rule", "ScheduledSequence"]

Rule = Literal["greedy", "walk", "block", "token", "traversal", "greedy_coupling"]

PLAIN = Plan()


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledSequence:
    """What one running sequence drafts, feeds and emits in one step, filled in by the step.

    Attributes:
        sequence: the first view, which holds the committed state.
        num_committed: rows in the target's cache before the step.
        num_pending: committed tokens that the target has not seen.
        plan: what the controller decided.
        proposal: what was drafted; None is plain decoding.
        num_chain: pending tokens fed in this pass, before the draft nodes (a chain in the sense of
            `Span`, not of a draft); 0 where the pass had no room.
        verdict: the accepted path and the emitted tokens; None while a prompt is being read.
        logits: of its rows, where log-probabilities or an observer need them.
        num_emitted: tokens of the verdict that were appended; a stop may cut them.
    """

    sequence: Sequence
    num_committed: int = 0
    num_pending: int
    plan: Plan = PLAIN
    proposal: Proposal | None = None
    num_chain: int = 0
    verdict: Verdict | None = None
    logits: Tensor | None = None
    num_emitted: int = 0

    @classmethod
    def of(cls, sequence: Sequence) -> ScheduledSequence:
        """Create the entry of a running sequence for the next step."""
        assert sequence.context is not None
        num_cached = sequence.context.num_cached
        num_pending = len(sequence.ids) - num_cached
        return cls(sequence=sequence, num_committed=num_cached, num_pending=num_pending)

    @property
    def context(self) -> Context:
        """The target's view of the sequence."""
        context = self.sequence.context
        assert context is not None
        return context

    @property
    def decodes(self) -> bool:
        """Whether the whole prompt was read, so that the sequence may draft."""
        return self.num_pending == 1

    @property
    def prefills(self) -> bool:
        """Whether it feeds prompt tokens, or reads its output again after a preemption."""
        # The last chunk of a prompt may be one row, as decoding always is.
        return self.num_chain > 1 or self.sequence.num_output == self.num_emitted

    @property
    def completes(self) -> bool:
        """Whether all pending tokens are fed, so that the pass yields tokens."""
        return self.num_chain == self.num_pending

    @property
    def tree(self) -> TokenTree:
        """Draft nodes; empty for a plain step."""
        return NO_TREE if self.proposal is None else self.proposal.tree

    @property
    def num_drafted(self) -> int:
        """Draft nodes, each a row of the pass."""
        return 0 if self.proposal is None else len(self.proposal.tree.parents)

    @property
    def num_logit_rows(self) -> int:
        """Rows whose logits yield tokens: the last pending token's, then one per draft node."""
        return 1 + self.num_drafted

    @property
    def depth(self) -> int:
        """Depth of the deepest draft node, 0 without any."""
        return max(self.tree.depths, default=0)

    @property
    def params(self) -> SamplingParams:
        """Parameters of the request, with the plan's verification where it has one."""
        params, verification = self.sequence.params, self.plan.verification
        return params if verification is None else replace(params, verification=verification)

    @property
    def rule(self) -> Rule:
        """Name of the verifier; "greedy" where the argmax of the raw logits decides."""
        params = self.params
        if params.greedy and self.sequence.history is None:
            return "greedy"
        proposal = self.proposal  # without a draft every verifier draws the same token
        choice = proposal.choice if proposal and proposal.num_drafted else Choice.SAMPLED
        method = resolve_verification(params, choice, is_chain=self.tree.is_chain)
        return "walk" if method == "coupled" else method

    def pending(self) -> list[int]:
        """Return the pending tokens, which are fed before the draft nodes."""
        return self.context.pending(self.num_chain)

    def span(self) -> Span:
        """Return the rows of the sequence in the pass."""
        return self.context.span(self.num_chain, self.tree)

    def row_histories(self, drafted: list[int], vocab_size: int) -> list[RowHistory | None]:
        """History of every row, extended along its path in the tree of `drafted` ids.

        Raises:
            MaskError: the token mask of the request raised, or returned something else than one
                boolean per token.
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
        """The error for a token mask of this request."""
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
            sequence.acceptance.add(self.depth, verdict.num_accepted, num_drafted=self.num_drafted)
            self._note_times()
            path = verdict.path if sequence.stop is None else ()
        if not path or path[-1] == len(path) - 1:
            self.context.commit(range(self.num_chain + len(path)))
        else:
            self.context.commit([*range(self.num_chain), *(self.num_chain + n for n in path)])

    def _note_times(self) -> None:
        """Note when the first token came, and when the sequence ended."""
        sequence = self.sequence
        if sequence.first_token_at_s is not None and sequence.stop is None:
            return
        now_s = time.monotonic()
        if sequence.first_token_at_s is None:
            sequence.first_token_at_s = now_s
        if sequence.stop is not None:
            sequence.finished_at_s = now_s

    def token_logprobs(self) -> list[TokenLogprobs]:
        """Raw log-probabilities of the emitted tokens; the logits must have been kept."""
        verdict, logits = self.verdict, self.logits
        assert verdict is not None
        assert logits is not None
        rows = [0, *(node + 1 for node in verdict.path)][: self.num_emitted]
        tokens = torch.tensor(verdict.tokens[: self.num_emitted], device=logits.device)
        raw = raw_logprobs(logits[rows], tokens, self.sequence.params.logprobs or 0)
        tops = zip(raw.top_tokens.tolist(), raw.top_logprobs.tolist(), strict=True)
        return [
            TokenLogprobs(token_id=token, logprob=logprob, top=tuple(zip(ids, values, strict=True)))
            for token, logprob, (ids, values) in zip(
                verdict.tokens, raw.token_logprobs.tolist(), tops, strict=False
            )
        ]
