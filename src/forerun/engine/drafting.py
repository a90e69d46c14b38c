"""Ask the drafter, and survive it.

A drafter is a guess: whatever goes wrong in one must not cost a token. A failing batch is retried
row by row once; a sequence whose row fails again decodes plainly from then on, with one logged
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Outcome
from forerun.engine.proposal_check import check_proposal
from forerun.engine.sequence import Sequence
from forerun.errors import DrafterError
from forerun.sampling.choice import Choice
from forerun.sampling.config import resolve_verification
from forerun.sampling.proposal import Proposal

__all__ = ["GuardedDrafter"]

logger = logging.getLogger("forerun.drafting")


class GuardedDrafter:
    """A drafter whose failures turn into plain decoding."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size

    def propose(self, sequences: Seq[Sequence], plans: Seq[Plan]) -> list[Proposal | None]:
        """One checked proposal per sequence; None where the sequence decodes plainly."""
        wanted = [
            i
            for i, (sequence, plan) in enumerate(zip(sequences, plans, strict=True))
            if plan.num_speculative_tokens > 0 and not sequence.drafting_failed
        ]
        proposals: list[Proposal | None] = [None] * len(sequences)
        if not wanted:
            return proposals
        chosen = [sequences[i] for i in wanted]
        for i, proposal in zip(
            wanted, self._batch(chosen, [plans[i] for i in wanted]), strict=True
        ):
            proposals[i] = proposal
        return proposals

    def _batch(self, sequences: list[Sequence], plans: list[Plan]) -> list[Proposal | None]:
        try:
            return self._checked(sequences, plans)
        except Exception as error:  # noqa: BLE001 - any drafter failure must leave the text intact
            logger.info("drafter failed on a batch of %d, retrying singly: %s", len(plans), error)
        return [self._single(s, p) for s, p in zip(sequences, plans, strict=True)]

    def _single(self, sequence: Sequence, plan: Plan) -> Proposal | None:
        self.forget(sequence)  # the failed attempt may have left half a state
        try:
            return self._checked([sequence], [plan])[0]
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(sequence, error)
            return None

    def _checked(self, sequences: list[Sequence], plans: list[Plan]) -> list[Proposal | None]:
        proposals = self.drafter.propose([as_request(s) for s in sequences], plans)
        if len(proposals) != len(plans):
            raise DrafterError(f"{len(proposals)} proposals for {len(plans)} requests")
        for sequence, proposal, plan in zip(sequences, proposals, plans, strict=True):
            if proposal is not None:
                check_proposal(
                    proposal,
                    num_speculative_tokens=plan.num_speculative_tokens,
                    vocab_size=self.vocab_size,
                    params=sequence.params,
                )
        return proposals

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        sequence.drafting_failed = True
        self.forget(sequence)
        logger.warning("request %s decodes plainly: drafter failed: %s", sequence.key, error)

    def observe(self, sequences: Seq[Sequence], outcomes: Seq[Outcome]) -> None:
        """Pass verdicts on; a drafter that fails here loses its state, not the text.

        Half-told outcomes cannot be told again. So a failing batch is forgotten, its sequences are
        told singly from the next step on, and the one that fails once more decodes plainly.
        """
        pairs = list(zip(sequences, outcomes, strict=True))
        together = [pair for pair in pairs if not pair[0].observing_failed]
        singly = [[pair] for pair in pairs if pair[0].observing_failed]
        for group in [together, *singly] if together else singly:
            self._tell(group)

    def _tell(self, group: list[tuple[Sequence, Outcome]]) -> None:
        try:
            self.drafter.observe([outcome for _, outcome in group])
        except Exception as error:  # noqa: BLE001 - as above
            logger.info("drafter failed to observe a batch of %d: %s", len(group), error)
            for sequence, _ in group:
                if sequence.observing_failed:
                    self._give_up(sequence, error)
                else:
                    sequence.observing_failed = True
                    self.forget(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that is finished, aborted or given up."""
        try:
            self.drafter.forget(sequence.key)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("drafter failed to forget request %s: %s", sequence.key, error)


def as_request(sequence: Sequence) -> DraftRequest:
    """The drafter's view of a sequence."""
    params = sequence.params
    return DraftRequest(
        request_id=sequence.key,
        ids=sequence.ids,
        num_prompt=sequence.num_prompt,
        params=params,
        noise_key=sequence.noise_key,
        history=sequence.history,
        coupled=resolve_verification(params, Choice.SAMPLED) == "coupled",
    )
