"""Ask the drafter, and survive it.

A drafter is a guess: whatever goes wrong in one must not cost a token. A failing batch is retried
row by row once; a sequence whose row fails again decodes plainly from then on, with one logged
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from forerun.drafters.base import Drafter, DraftRequest, Outcome, Pause
from forerun.engine.proposal_check import check_proposals
from forerun.engine.sequence import Sequence
from forerun.engine.turn import Turn
from forerun.errors import DrafterError
from forerun.sampling.choice import Choice
from forerun.sampling.config import resolve_verification

__all__ = ["GuardedDrafter"]

logger = logging.getLogger("forerun.drafting")


class GuardedDrafter:
    """A drafter whose failures turn into plain decoding."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self._requests: dict[str, DraftRequest] = {}

    def propose(self, turns: Seq[Turn]) -> None:
        """Give every turn a checked proposal, or none where the sequence decodes plainly."""
        wanted = [turn for turn in turns if not turn.sequence.drafting_failed]
        if not wanted:
            return
        try:
            self._propose(wanted)
        except Exception as error:  # noqa: BLE001 - any drafter failure must leave the text intact
            logger.info("drafter failed on a batch of %d, retrying singly: %s", len(wanted), error)
            for turn in wanted:
                self._propose_singly(turn)

    def _propose_singly(self, turn: Turn) -> None:
        self.forget(turn.sequence)  # the failed attempt may have left half a state
        try:
            self._propose([turn])
        except Exception as error:  # noqa: BLE001 - as above
            self._give_up(turn.sequence, error)

    def _propose(self, turns: Seq[Turn]) -> None:
        requests = [self._request(turn.sequence) for turn in turns]
        answers = self.drafter.propose(requests, [turn.plan for turn in turns])
        if len(answers) != len(turns):
            raise DrafterError(f"{len(answers)} proposals for {len(turns)} requests")
        proposals = [None if isinstance(answer, Pause) else answer for answer in answers]
        check_proposals(turns, proposals, self.vocab_size)
        for turn, proposal, answer in zip(turns, proposals, answers, strict=True):
            turn.proposal = proposal
            if isinstance(answer, Pause):
                turn.sequence.drafts_from = len(turn.sequence.ids) + answer.num_tokens

    def _request(self, sequence: Sequence) -> DraftRequest:
        """The drafter's view of a sequence, the same object at every step."""
        request = self._requests.get(sequence.key)
        if request is None:
            request = self._requests[sequence.key] = as_request(sequence)
        return request

    def _give_up(self, sequence: Sequence, error: Exception) -> None:
        sequence.drafting_failed = True
        self.forget(sequence)
        logger.warning("request %s decodes plainly: drafter failed: %s", sequence.key, error)

    def observe(self, turns: Seq[Turn]) -> None:
        """Pass verdicts on; a drafter that fails here loses its state, not the text.

        Half-told outcomes cannot be told again. So a failing batch is forgotten, its sequences are
        told singly from the next step on, and the one that fails once more decodes plainly.
        """
        together = [turn for turn in turns if not turn.sequence.observing_failed]
        singly = [[turn] for turn in turns if turn.sequence.observing_failed]
        for group in [together, *singly] if together else singly:
            self._tell(group)

    def _tell(self, turns: Seq[Turn]) -> None:
        outcomes = [
            Outcome(request_id=turn.sequence.key, verdict=turn.verdict)
            for turn in turns
            if turn.verdict is not None
        ]
        try:
            self.drafter.observe(outcomes)
        except Exception as error:  # noqa: BLE001 - as above
            logger.info("drafter failed to observe a batch of %d: %s", len(turns), error)
            for turn in turns:
                if turn.sequence.observing_failed:
                    self._give_up(turn.sequence, error)
                else:
                    turn.sequence.observing_failed = True
                    self.forget(turn.sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that is finished, aborted or given up."""
        self._requests.pop(sequence.key, None)
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
        scope=sequence.scope,
        context=sequence.context,
    )
