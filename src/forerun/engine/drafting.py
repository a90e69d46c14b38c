"""Calls the drafter; where it fails, sequences are decoded without a draft.

A batch that fails is repeated request by request. A request that fails again is decoded plainly
from then on, and the log says why once.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome, TopTokensDrafter
from forerun.engine.proposal_check import check_proposals
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.errors import DrafterError
from forerun.sampling.choice import Choice
from forerun.sampling.config import resolve_verification

__all__ = ["GuardedDrafter"]

logger = logging.getLogger("forerun.drafting")

FAILURES = (Exception, SystemExit)
"""What a drafter may raise: a library that it calls may try to end the process."""


class GuardedDrafter:
    """Wraps a drafter so that its failures lead to plain decoding.

    The drafter sees every row that the target's cache holds of a request, in order, before it is
    asked to continue it: also after a failure made it drop its state.

    Args:
        drafter: the one to guard.
        vocab_size: of the target.

    Attributes:
        required_top_k: see `TopTokensDrafter`; 0 for most drafters.
    """

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        self.drafter = drafter
        self.vocab_size = vocab_size
        self.required_top_k = 0
        if isinstance(drafter, TopTokensDrafter):
            self.required_top_k = drafter.required_top_k

    def propose(self, entries: Seq[ScheduledSequence]) -> None:
        """Give every entry a checked proposal, or none where the sequence is decoded plainly."""
        wanted = [entry for entry in entries if not entry.sequence.draft.failed]
        if not wanted:
            return
        try:
            self._propose(wanted)
        except FAILURES as error:  # a failure of the drafter must leave the text intact
            logger.info("drafter failed on a batch of %d, retrying singly: %s", len(wanted), error)
            for entry in wanted:
                self._propose_singly(entry)

    def _propose_singly(self, entry: ScheduledSequence) -> None:
        self.forget(entry.sequence)  # the failed attempt may have left half a state
        try:
            self._propose([entry])
        except FAILURES as error:
            self._give_up(entry.sequence, error)

    def _propose(self, entries: Seq[ScheduledSequence]) -> None:
        unseen = [entry for entry in entries if entry.sequence.draft.num_observed == 0]
        if unseen:
            self.drafter.observe([self._outcome(entry, entry.num_committed) for entry in unseen])
        requests = [request_of(entry.sequence) for entry in entries]
        answers = self.drafter.propose(requests, [entry.plan for entry in entries])
        if len(answers) != len(entries):
            raise DrafterError(f"{len(answers)} proposals for {len(entries)} requests")
        proposals = [None if isinstance(answer, Pause) else answer for answer in answers]
        check_proposals(entries, proposals, self.vocab_size)
        for entry, proposal, answer in zip(entries, proposals, answers, strict=True):
            entry.proposal = proposal
            if isinstance(answer, Pause):
                sequence = entry.sequence
                sequence.draft.paused_until = len(sequence.ids) + answer.num_tokens

    def _give_up(self, sequence: Sequence, error: BaseException) -> None:
        sequence.draft.failed = True
        self.forget(sequence)
        logger.warning("request %s decodes plainly: drafter failed: %s", sequence.key, error)

    def observe(self, entries: Seq[ScheduledSequence]) -> None:
        """Report a step to the drafter; one that fails here loses its state, not the text.

        An outcome cannot be reported twice. So the requests of a failing batch are forgotten and
        reported singly from the next step on; the one that fails once more is decoded plainly.
        """
        together: list[ScheduledSequence] = []
        for entry in entries:
            draft = entry.sequence.draft
            if draft.failed:
                continue
            if draft.observe_failed:
                self._observe([entry])
            else:
                together.append(entry)
        if together:
            self._observe(together)

    def _observe(self, entries: Seq[ScheduledSequence]) -> None:
        try:
            self.drafter.observe(
                [self._outcome(entry, entry.context.num_cached) for entry in entries]
            )
        except FAILURES as error:
            logger.info("drafter failed to observe a batch of %d: %s", len(entries), error)
            for entry in entries:
                if entry.sequence.draft.observe_failed:
                    self._give_up(entry.sequence, error)
                else:
                    entry.sequence.draft.observe_failed = True
                    self.forget(entry.sequence)

    def _outcome(self, entry: ScheduledSequence, num_cached: int) -> StepOutcome:
        """The rows up to `num_cached` that were not reported before, with the step's verdict."""
        draft, context = entry.sequence.draft, entry.context
        start, draft.num_observed = draft.num_observed, num_cached
        features = None
        if self.drafter.required_features:
            features = context.store.features(context.slot, start, num_cached)
        return StepOutcome(
            request=request_of(entry.sequence),
            num_committed=start,
            num_rows=num_cached - start,
            verdict=entry.verdict,
            proposal=entry.proposal if entry.verdict is not None else None,
            features=features,
            top_tokens=entry.top_tokens,
        )

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a sequence that is finished, aborted or given up."""
        sequence.draft.request = None
        sequence.draft.num_observed = 0
        try:
            self.drafter.forget(sequence.key)
        except FAILURES as error:
            logger.warning("drafter failed to forget request %s: %s", sequence.key, error)


def request_of(sequence: Sequence) -> DraftRequest:
    """The drafter's view of a sequence, the same object at every step."""
    request = sequence.draft.request
    if request is None:
        params = sequence.params
        request = sequence.draft.request = DraftRequest(
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
    return request
