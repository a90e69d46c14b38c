"""Distributions that are recorded wrongly, and verdicts that are not what they should be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from tests.lab.device import Device
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import DraftRequest
from forerun.drafters.draft_model import DraftModel
from forerun.engine.scheduler import ScheduledSequence
from forerun.models.base import LanguageModel
from forerun.sampling.config import TokenSource
from forerun.sampling.noise import Purpose, draw, step_key, uniform
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Proposal, Verdict

__all__ = ["LenientVerifier", "SlowVerifier", "WrongRecord", "unclipped_residual"]


class WrongRecord(DraftModel):
    """Records the draft's distribution at another temperature than it was drawn at.

    Args:
        model: of the draft.
        vocab_size: of the target.
        factor: recorded temperature over the one of the draws.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, factor: float) -> None:
        super().__init__(model, vocab_size)
        self.factor = factor

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """As drafted, but for the record."""
        return [
            proposal
            if proposal is None or proposal.draft_probs is None
            else replace(proposal, draft_probs=self._recorded(proposal.draft_probs))
            for proposal in super().propose(requests, plans)
        ]

    def _recorded(self, probs: Tensor) -> Tensor:
        return (probs.clamp(min=1e-30).log() / self.factor).softmax(-1)


def unclipped_residual(entry: ScheduledSequence, logits: Tensor) -> Verdict:
    """After a rejection draw from |p - q| instead of max(0, p - q)."""
    verdict, proposal = entry.verdict, entry.proposal
    assert verdict is not None
    if proposal is None or proposal.draft_probs is None:
        return verdict
    accepted = verdict.num_accepted
    if accepted == proposal.num_drafted:
        return verdict
    sequence = entry.sequence
    params = pack_params([sequence.params], logits.device, [0])
    target_row = target_probs(logits[accepted : accepted + 1], params, [None])
    weights = (target_row - proposal.draft_probs[accepted : accepted + 1]).abs()
    key = step_key(sequence.noise_key, len(sequence.ids), 0, Purpose.RECOVERED)
    final = int(draw(weights, uniform(torch.tensor([key])))[0])
    return replace(verdict, tokens=(*verdict.tokens[:-1], final))


class LenientVerifier:
    """Accepts more than it may: a rejected token passes with some probability after all.

    The one behind it is then taken as rejected, and replaced by the target's own choice there.

    Args:
        leniency: probability that a rejected token passes.
    """

    def __init__(self, leniency: float) -> None:
        self.leniency = leniency

    def __call__(self, entry: ScheduledSequence, logits: Tensor) -> Verdict:
        """The verdict with one more accepted, sometimes."""
        verdict, proposal = entry.verdict, entry.proposal
        assert verdict is not None
        if proposal is None or verdict.num_accepted == proposal.num_drafted:
            return verdict
        sequence, accepted = entry.sequence, verdict.num_accepted
        keys = [
            step_key(sequence.noise_key, len(sequence.ids), node, Purpose.ACCEPT)
            for node in (1000, 1001)  # of no node that there is
        ]
        lucky, last = uniform(torch.tensor(keys)).tolist()
        if lucky >= self.leniency:
            return verdict
        params = pack_params([sequence.params], logits.device, [0])
        target_row = target_probs(logits[accepted + 1 : accepted + 2], params, [None])
        final = int(draw(target_row, torch.tensor([last], dtype=torch.float64))[0])
        passed = int(proposal.tokens[accepted])
        return Verdict(
            path=(*verdict.path, accepted),
            tokens=(*verdict.tokens[:-1], passed, final),
            sources=(
                *verdict.sources[:-1],
                TokenSource.ACCEPTED,
                TokenSource.BONUS
                if accepted + 1 == proposal.num_drafted
                else TokenSource.RECOVERED,
            ),
            expected_accepted=verdict.expected_accepted,
        )


class SlowVerifier:
    """Waits once per row, as an engine does that asks the device for every token by itself.

    Args:
        device: that is waited for.
        seconds: of one wait.
    """

    def __init__(self, device: Device, seconds: float) -> None:
        self.device = device
        self.seconds = seconds

    def __call__(self, entry: ScheduledSequence, logits: Tensor) -> Verdict:
        """The verdict as it is, late."""
        verdict = entry.verdict
        assert verdict is not None
        self.device.waited_s += self.seconds * len(verdict.tokens)
        return verdict
