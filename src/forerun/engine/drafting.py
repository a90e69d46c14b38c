"""Ask the drafter, and survive it.

A drafter is a guess: whatever goes wrong in one must not cost a token. A failing batch is retried
row by row once; a sequence whose row fails again decodes plainly from then on, with one logged
reason.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Outcome
from forerun.engine.sequence import Sequence
from forerun.errors import DrafterError
from forerun.sampling.config import resolve_verification
from forerun.sampling.proposal import Choice, Proposal

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
        self.drafter.forget(sequence.key)  # the failed attempt may have left half a state
        try:
            return self._checked([sequence], [plan])[0]
        except Exception as error:  # noqa: BLE001 - as above
            sequence.drafting_failed = True
            self.drafter.forget(sequence.key)
            logger.warning("request %s decodes plainly: drafter failed: %s", sequence.key, error)
            return None

    def _checked(self, sequences: list[Sequence], plans: list[Plan]) -> list[Proposal | None]:
        proposals = self.drafter.propose([as_request(s) for s in sequences], plans)
        if len(proposals) != len(plans):
            raise DrafterError(f"{len(proposals)} proposals for {len(plans)} requests")
        for proposal, plan in zip(proposals, plans, strict=True):
            if proposal is not None:
                self._check(proposal, plan)
        return proposals

    def _check(self, proposal: Proposal, plan: Plan) -> None:
        num_nodes = proposal.num_drafted
        if num_nodes > plan.num_speculative_tokens:
            raise DrafterError(f"{num_nodes} nodes, but K is {plan.num_speculative_tokens}")
        if proposal.tokens.shape != (num_nodes,):
            raise DrafterError(f"{num_nodes} nodes, tokens of shape {tuple(proposal.tokens.shape)}")
        if num_nodes == 0:
            return
        low, high = (int(x) for x in torch.aminmax(proposal.tokens))
        if low < 0 or high >= self.vocab_size:
            raise DrafterError(
                f"token id {low if low < 0 else high} is outside 0..{self.vocab_size - 1}"
            )
        probs = proposal.draft_probs
        if proposal.choice is Choice.SAMPLED and probs is None:
            raise DrafterError("a sampled proposal needs the draft_probs it was drawn from")
        if probs is not None and not bool(torch.isfinite(probs).all()):
            raise DrafterError("draft_probs are not finite")

    def observe(self, outcomes: Seq[Outcome]) -> None:
        """Pass verdicts on; a drafter that fails here loses its state, not the text."""
        try:
            self.drafter.observe(outcomes)
        except Exception as error:  # noqa: BLE001 - as above
            logger.warning("drafter failed to observe, its state is dropped: %s", error)
            for outcome in outcomes:
                self.drafter.forget(outcome.request_id)

    def forget(self, sequence: Sequence) -> None:
        """Drop the drafter's state of a finished or aborted sequence."""
        self.drafter.forget(sequence.key)


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
