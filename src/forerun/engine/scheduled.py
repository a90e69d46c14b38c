"""One running sequence in one step: what it plans, drafts, feeds and gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from forerun.control.base import Plan
from forerun.engine.sequence import Sequence
from forerun.errors import MaskError
from forerun.models.base import Span
from forerun.sampling.choice import Choice
from forerun.sampling.config import SamplingParams, resolve_verification
from forerun.sampling.history import RowHistory
from forerun.sampling.proposal import Proposal, Verdict
from forerun.theory.tree import NO_TREE, TokenTree

__all__ = ["PLAIN", "Rule", "ScheduledSequence"]

Rule = Literal["greedy", "walk", "block", "token"]

PLAIN = Plan()


@dataclass(slots=True, kw_only=True, eq=False)
class ScheduledSequence:
    """Filled in from top to bottom while the step goes on.

    Attributes:
        sequence: whose entry.
        num_committed: rows of it in the target's cache before the step.
        num_pending: its tokens the target has not seen.
        plan: what the controller decided.
        proposal: what was drafted; None decodes plainly.
        num_chain: pending tokens fed in this pass; 0 where there was no room.
        verdict: what became of the proposal.
        logits: of its rows, where their log-probabilities were asked for.
        num_emitted: tokens taken of the verdict; a stop may cut it.
    """

    sequence: Sequence
    num_pending: int
    num_committed: int = 0
    plan: Plan = PLAIN
    proposal: Proposal | None = None
    num_chain: int = 0
    verdict: Verdict | None = None
    logits: Tensor | None = None
    num_emitted: int = 0

    @property
    def decodes(self) -> bool:
        """Whether its prompt is read, so that it may draft."""
        return self.num_pending == 1

    @property
    def prefills(self) -> bool:
        """Whether it fed a prompt, or again what it had emitted before it had to wait."""
        # The last chunk of a prompt may be one row, as decoding always is.
        return self.num_chain > 1 or self.sequence.num_output == self.num_emitted

    @property
    def completes(self) -> bool:
        """Whether nothing stays pending, so that the pass yields tokens."""
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
        """Of the deepest draft node, 0 without any."""
        return max(self.tree.depths, default=0)

    @property
    def params(self) -> SamplingParams:
        """Parameters of the request, verified as the plan demands where it does."""
        params, verification = self.sequence.params, self.plan.verification
        return params if verification is None else replace(params, verification=verification)

    @property
    def rule(self) -> Rule:
        """How its rows are verified; "greedy" where the raw argmax decides."""
        params = self.params
        if params.greedy and self.sequence.history is None:
            return "greedy"
        proposal = self.proposal  # where nothing was drafted, it does not matter how
        choice = proposal.choice if proposal and proposal.num_drafted else Choice.SAMPLED
        method = resolve_verification(params, choice, is_chain=self.tree.is_chain)
        return "walk" if method == "coupled" else method

    def pending(self) -> list[int]:
        """The tokens fed before its draft nodes."""
        context = self.sequence.context
        assert context is not None
        return context.pending(self.num_chain)

    def span(self) -> Span:
        """Its rows in the pass."""
        context = self.sequence.context
        assert context is not None
        return context.span(self.num_chain, self.tree)

    def row_histories(self, drafted: list[int]) -> list[RowHistory | None]:
        """History of every row, extended along its path in the tree of `drafted` ids.

        Raises:
            MaskError: the mask of the request raised.
        """
        history = self.sequence.history
        if history is None:
            return [None] * self.num_logit_rows
        try:
            return [*history.along(self.tree, drafted)]
        except Exception as error:  # a mask is the caller's own code
            raise MaskError(
                f"request {self.sequence.key}: its token mask raised {error!r}; nothing of this "
                "step was emitted: abort it, the others go on",
                request_id=self.sequence.request_id,
            ) from error

    @property
    def num_cached(self) -> int:
        """Rows in the target's cache now: after `commit`, those of the step included."""
        context = self.sequence.context
        assert context is not None
        return context.num_cached

    def commit(self) -> None:
        """Keep the rows of the fed tokens and of the accepted path; the others are gone."""
        context = self.sequence.context
        assert context is not None
        path = () if self.verdict is None else self.verdict.path
        if not path or path[-1] == len(path) - 1:
            context.commit(range(self.num_chain + len(path)))
        else:
            context.commit([*range(self.num_chain), *(self.num_chain + node for node in path)])
