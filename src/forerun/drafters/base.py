"""The drafter's contract: contexts and plans in, token trees out, outcomes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from forerun.control.base import Plan
from forerun.models.context import Context
from forerun.sampling.config import SamplingParams
from forerun.sampling.history import History
from forerun.sampling.proposal import Proposal, Verdict

__all__ = ["DraftRequest", "Drafter", "Outcome", "Pause"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftRequest:
    """One sequence a drafter is asked to continue.

    Attributes:
        request_id: key of the drafter's own state for this sequence.
        ids: committed prompt and output tokens (shared with the engine: read only).
        num_prompt: how many of them are prompt.
        params: the request's sampling parameters.
        noise_key: key of (seed, sample index), see `forerun.sampling.noise`.
        history: token counts of prompt and output where penalties need them (read only).
        coupled: draw with the target's position-keyed noise.
        scope: requests of one scope may use what was computed from each other's tokens; None: none.
        context: the target's view of the sequence, for drafters that work in the target's own KV
            (staging rows there is all they may do).
    """

    request_id: str
    ids: list[int]
    num_prompt: int
    params: SamplingParams
    noise_key: int
    history: History | None
    coupled: bool
    scope: str | None = None
    context: Context | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """Nothing to propose, and nothing expected before `num_tokens` more are committed.

    Until then the sequence decodes plainly, at no cost of drafting.
    """

    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What became of one proposal."""

    request_id: str
    verdict: Verdict


@runtime_checkable
class Drafter(Protocol):
    """Proposes token trees. State is per request_id, created on first use, dropped by `forget`."""

    @property
    def method(self) -> str:
        """What plans and traces call it."""

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> Sequence[Proposal | Pause | None]:
        """One proposal of at most K nodes per request; None where there is nothing to propose.

        Whether a sampled node is proposed must not depend on what was drawn for it: to raise, to
        return None or to prune because of a drawn token biases the text. Where drafting cannot go
        on, return the chain up to there.
        """

    def observe(self, outcomes: Sequence[Outcome]) -> None:
        """Verdicts on the last proposals, called once the accepted tokens are committed."""

    def forget(self, request_id: str) -> None:
        """Drop all state of a request; unknown ids are ignored."""
