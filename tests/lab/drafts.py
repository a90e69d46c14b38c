"""Drafters that go wrong between steps: what they believe to be the text is not what it is."""

from __future__ import annotations

from collections.abc import Sequence

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome
from forerun.drafters.draft_model import DraftModel
from forerun.errors import DrafterError
from forerun.models.base import Context, LanguageModel
from forerun.sampling.proposal import Proposal

__all__ = ["Broken", "ForgetsOnPause", "KeepsRejected", "MissesBonus"]


class OwnText(DraftModel):
    """A draft model with a text of its own per request, which should be the committed one."""

    def __init__(self, model: LanguageModel, vocab_size: int) -> None:
        super().__init__(model, vocab_size)
        self._taken: dict[str, int] = {}
        self._proposed: dict[str, list[int]] = {}

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Take in what was committed since, then draft."""
        for request in requests:
            sequence = self._sequences.get(request.request_id)
            if sequence is not None:
                sequence.context.ids += request.ids[self._taken[request.request_id] :]
            self._taken[request.request_id] = len(request.ids)
        proposals = super().propose(requests, plans)
        for request, proposal in zip(requests, proposals, strict=True):
            tokens = [] if proposal is None else proposal.tokens.tolist()
            self._proposed[request.request_id] = tokens
        return proposals

    def _open(self, request: DraftRequest) -> Context:
        return Context(self.model.store, [*request.ids])

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Keep the rows of accepted tokens, and take in what `replaced` says instead of others."""
        for outcome in outcomes:
            if outcome.proposal is None or outcome.verdict is None:
                continue
            sequence = self._sequences[outcome.request_id]
            proposed = self._proposed[outcome.request_id]
            num_accepted = outcome.verdict.num_accepted
            num_right, instead, num_skipped = self.replaced(num_accepted, proposed)
            sequence.context.ids += proposed[:num_right]
            sequence.commit(proposed[:num_right])
            sequence.context.ids += instead
            self._taken[outcome.request_id] += num_right + num_skipped

    def replaced(
        self, num_accepted: int, proposed: Sequence[int]
    ) -> tuple[int, Sequence[int], int]:
        """What becomes of a draft: accepted tokens kept, tokens behind them, and for how many."""
        return num_accepted, (), 0

    def forget(self, request_id: str) -> None:
        """Drop all state of a request."""
        super().forget(request_id)
        self._taken.pop(request_id, None)
        self._proposed.pop(request_id, None)


class KeepsRejected(OwnText):
    """Off by one after a partial rejection: the rejected token's row stands for its replacement."""

    def replaced(
        self, num_accepted: int, proposed: Sequence[int]
    ) -> tuple[int, Sequence[int], int]:
        """The rejected token where some were accepted and one was not."""
        if 0 < num_accepted < len(proposed):
            return num_accepted, (proposed[num_accepted],), 1
        return num_accepted, (), 0


class MissesBonus(OwnText):
    """After a full acceptance the last drafted token, which was never fed, is taken for padding.

    Args:
        model: of the draft.
        vocab_size: of the target.
        padding: what is read in its place.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, padding: int) -> None:
        super().__init__(model, vocab_size)
        self.padding = padding

    def replaced(
        self, num_accepted: int, proposed: Sequence[int]
    ) -> tuple[int, Sequence[int], int]:
        """Padding where everything was accepted."""
        if proposed and num_accepted == len(proposed):
            return num_accepted - 1, (self.padding,), 1
        return num_accepted, (), 0


class ForgetsOnPause(OwnText):
    """Loses its cache whenever a step goes by without it, and goes on from the last few tokens.

    Args:
        model: of the draft.
        vocab_size: of the target.
        num_left: tokens it begins again with.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, num_left: int) -> None:
        super().__init__(model, vocab_size)
        self.num_left = num_left
        self._lost: set[str] = set()

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Lose what was paused, then draft."""
        for request in requests:
            name = request.request_id
            known = name in self._sequences
            # A step it took part in yields one token that it has not been told of yet.
            if known and len(request.ids) > self._taken[name] + 1:
                self.forget(name)
                self._lost.add(name)
        return super().propose(requests, plans)

    def _open(self, request: DraftRequest) -> Context:
        lost = request.request_id in self._lost
        return Context(self.model.store, request.ids[-self.num_left :] if lost else [*request.ids])


class Broken(Drafter):
    """A drafter that fails at once, so that everything is decoded plainly."""

    method = "draft_model"
    required_features: tuple[int, ...] = ()

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """Fail."""
        raise DrafterError("the draft cannot be reached")

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Nothing was proposed."""

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""
