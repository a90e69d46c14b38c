"""A separate, smaller language model as drafter: greedy at T=0, sampled otherwise.

Cost per step: one pass over what the draft has not seen, then K - 1 passes of one row per sequence;
each pass reads the draft's weights once and scores batch x vocabulary logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest, Outcome
from forerun.models.base import LanguageModel
from forerun.models.context import Context, pack
from forerun.sampling.choice import Choice
from forerun.sampling.config import SamplingParams, draft_params
from forerun.sampling.history import RowHistory
from forerun.sampling.noise import Purpose, draw, exponential, position_key, race, step_key, uniform
from forerun.sampling.processors import failed_rows, pack_params, target_probs
from forerun.sampling.proposal import Proposal
from forerun.theory.tree import TokenTree

__all__ = ["DraftModel"]

PREFILL_CHUNK = 256


@dataclass(slots=True, kw_only=True, eq=False)
class Branch:
    """One sequence while its chain grows.

    Attributes:
        request: what to continue.
        context: the draft's own view of it.
        params: the request's parameters with the draft's temperature.
        choice: how its nodes are chosen.
        budget: tokens to draft.
        num_chain: pending committed tokens fed by the first pass.
        tokens: drafted so far, scalars on the draft's device.
        laws: the rows they were drawn from, unless deterministic.
    """

    request: DraftRequest
    context: Context
    params: SamplingParams
    choice: Choice
    budget: int
    num_chain: int = 0
    tokens: list[Tensor] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    @property
    def num_staged(self) -> int:
        """Rows in the draft's KV past its committed length."""
        return self.num_chain + max(0, len(self.tokens) - 1)

    def row_history(self) -> RowHistory | None:
        """Token counts up to the next node; reading the drafted ids waits for the device."""
        history = self.request.history
        return None if history is None else history.at([int(token) for token in self.tokens])


class DraftModel:
    """Drafts chains with a causal language model that shares the target's token ids."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        self.model = model
        self.vocab_size = vocab_size
        self._contexts: dict[str, Context] = {}
        self._staged: dict[str, Branch] = {}

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Draft up to K tokens for every request, one pass per level for the whole batch."""
        branches = [self._branch(r, p) for r, p in zip(requests, plans, strict=True)]
        growing = [b for b in branches if b.budget > 0]
        # One call need not cover all of a step's requests: branches of others stay staged.
        self._staged |= {b.request.request_id: b for b in growing}
        self._prefill(growing)
        while growing:
            self._draw(growing, self._forward(growing))
            growing = [b for b in growing if len(b.tokens) < b.budget]
        return [
            as_proposal(b, p) if b.tokens else None for b, p in zip(branches, plans, strict=True)
        ]

    def _branch(self, request: DraftRequest, plan: Plan) -> Branch:
        context = self._contexts.get(request.request_id)
        if context is None:
            context = self._contexts[request.request_id] = Context(self.model.store, request.ids)
        params = draft_params(request.params)
        room = self.model.max_context - len(request.ids)
        return Branch(
            request=request,
            context=context,
            params=params,
            choice=choice_of(params, request.coupled),
            budget=max(0, min(plan.num_speculative_tokens, room)),
        )

    def _prefill(self, branches: Sequence[Branch]) -> None:
        """Feed long unseen prefixes in chunks until what is left fits one pass."""
        while long := [b for b in branches if b.context.num_pending > PREFILL_CHUNK]:
            chains = [b.context.pending(PREFILL_CHUNK) for b in long]
            spans = [b.context.span(PREFILL_CHUNK) for b in long]
            tokens = torch.tensor([t for chain in chains for t in chain], dtype=torch.int64)
            self.model.forward(pack(spans, tokens, [], self.model.device))
            for branch in long:
                branch.context.commit(range(PREFILL_CHUNK))

    def _forward(self, branches: Sequence[Branch]) -> Tensor:
        """Logits of the next token of every branch, shape (branches, vocab)."""
        if branches[0].tokens:
            spans = [b.context.span(1, num_staged=b.num_staged) for b in branches]
            tokens = torch.stack([b.tokens[-1] for b in branches])
        else:
            for branch in branches:
                branch.num_chain = branch.context.num_pending
            spans = [b.context.span(b.num_chain) for b in branches]
            ids = [t for b in branches for t in b.context.pending()]
            tokens = torch.tensor(ids, dtype=torch.int64)
        last_rows = [end - 1 for end in accumulate(span.num_rows for span in spans)]
        logits = self.model.forward(pack(spans, tokens, last_rows, self.model.device)).logits
        return fit_vocabulary(logits, self.vocab_size)

    def _draw(self, branches: Sequence[Branch], logits: Tensor) -> None:
        """Choose the next token of every branch and keep the law of sampled ones."""
        if all(b.params.greedy and not b.params.has_processors for b in branches):
            for branch, token in zip(branches, logits.argmax(dim=-1), strict=True):
                branch.tokens.append(token)
            return
        probs = self._laws(branches, logits)
        for choice, choose in CHOOSERS.items():
            rows = [i for i, b in enumerate(branches) if b.choice is choice]
            if not rows:
                continue
            tokens = choose([branches[i] for i in rows], probs[rows])
            for row, token in zip(rows, tokens, strict=True):
                branches[row].tokens.append(token)
                if choice is not Choice.DETERMINISTIC:
                    branches[row].laws.append(probs[row])

    def _laws(self, branches: Sequence[Branch], logits: Tensor) -> Tensor:
        """Processed draft probabilities; penalties see the chain drafted so far."""
        histories: list[RowHistory | None] = []
        if any(b.request.history is not None for b in branches):
            histories = [b.row_history() for b in branches]
        params = pack_params([b.params for b in branches], logits.device)
        return target_probs(logits, params, histories)

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Keep the KV of accepted tokens; the last drafted token was never fed."""
        for outcome in outcomes:
            branch = self._staged.pop(outcome.request_id)
            num_kept = min(outcome.verdict.num_accepted, len(branch.tokens) - 1)
            branch.context.commit(range(branch.num_chain + num_kept))

    def forget(self, request_id: str) -> None:
        """Give the sequence's slot back."""
        self._staged.pop(request_id, None)
        context = self._contexts.pop(request_id, None)
        if context is not None:
            context.close()


def choice_of(params: SamplingParams, coupled: bool) -> Choice:
    """Greedy chains are deterministic; drawn ones are coupled or independent of the target."""
    if params.greedy:
        return Choice.DETERMINISTIC
    return Choice.COUPLED if coupled else Choice.SAMPLED


def choose_greedy(branches: Sequence[Branch], probs: Tensor) -> Tensor:
    """Most likely token, lowest id on ties."""
    return probs.argmax(dim=-1)


def choose_sampled(branches: Sequence[Branch], probs: Tensor) -> Tensor:
    """A draw keyed by committed length and node: a rejected position is drawn afresh next step."""
    keys = [
        step_key(b.request.noise_key, len(b.request.ids), len(b.tokens), Purpose.DRAFT)
        for b in branches
    ]
    return draw(probs, uniform(torch.tensor(keys, dtype=torch.int64, device=probs.device)))


def choose_coupled(branches: Sequence[Branch], probs: Tensor) -> Tensor:
    """The race the target will run at the same position, on the draft's law."""
    keys = [position_key(b.request.noise_key, len(b.request.ids) + len(b.tokens)) for b in branches]
    keys_tensor = torch.tensor(keys, dtype=torch.int64, device=probs.device)
    return race(probs, exponential(keys_tensor, probs.shape[-1]))


CHOOSERS = {
    Choice.DETERMINISTIC: choose_greedy,
    Choice.SAMPLED: choose_sampled,
    Choice.COUPLED: choose_coupled,
}


def fit_vocabulary(logits: Tensor, vocab_size: int) -> Tensor:
    """Draft logits over the target's ids: padding ids are cut off or made impossible."""
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[:, :vocab_size]
    return torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))


def as_proposal(branch: Branch, plan: Plan) -> Proposal:
    """The finished chain."""
    laws = torch.stack(branch.laws) if branch.laws else None
    length = len(branch.tokens) if laws is None else num_lawful(laws)
    cut_by = "budget" if branch.budget == plan.num_speculative_tokens else "context"
    return Proposal(
        tokens=torch.stack(branch.tokens[:length]),
        tree=TokenTree.chain(length),
        choice=branch.choice,
        draft_probs=None if laws is None else laws[:length],
        stop_reason=cut_by if length == len(branch.tokens) else "no_law",
    )


def num_lawful(laws: Tensor) -> int:
    """Nodes before the first whose law is NaN; at least one.

    Where the draft fails may depend on what it drew before. To refuse the whole chain would then be
    to drop drawn tokens for what they are, which biases the text; to end it there is not. A failure
    at the first node depends on committed tokens alone and is left for the engine to refuse.
    """
    return max(1, min(failed_rows(laws), default=len(laws)))
