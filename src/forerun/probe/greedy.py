"""Finds facts from greedy text: whether it equals the target's, and whether drafts are correct.

At temperature 0 everything has one right answer, so single tokens notify: an emitted token that is
not the target's first choice, a drafted one that is not the draft's own when it reads the same text
from an empty cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.diagnose.evidence import Evidence
from forerun.measure.judge.judge import logits_of
from forerun.models.base import LanguageModel
from forerun.probe.replay import Replay
from forerun.probe.tape import (
    AcceptedShare,
    StateTally,
    TapedRequest,
    TapedStep,
    before_step,
)
from forerun.theory.intervals import normal_interval
from forerun.theory.record import StepRecord

MIN_TOKENS = 30
"""Least number of reached positions for a fact about acceptance."""
CHANCE = 0.05
"""Of all texts parting after a rejection when rejections have nothing to do with it."""
TIE = 4.0
"""A gap of fewer noise widths may be closed by rounding."""
REJECTING = ("partial", "none")
SOURCE = "greedy text replayed with fresh caches"


@dataclass(slots=True)
class GreedyTally:
    """Counts over greedy requests, compared with plain decoding and replays.

    Attributes:
        noise: by how much rounding moves the gap between two logits.
        margins: per text that parts from plain decoding, the gap there in noise widths.
        num_after_partial: those of them right after a step that rejected something.
        num_agreeing: those of them where the replayed draft agrees with the target.
        alphas: 1 where the replayed draft agrees with the target and 0 where not, at every position
            it could read.
        first_only: the replayed draft stands for the first drafted token of a step alone: later
            tokens of a head continue from its own states.
        state: where first drafted tokens stop being the draft's own, by more than a tie.
    """

    noise: float
    num_texts: int = 0
    margins: list[float] = field(default_factory=list)
    num_parted: int = 0
    num_after_partial: int = 0
    num_steps: int = 0
    num_rejecting: int = 0
    hits: AcceptedShare = field(default_factory=AcceptedShare)
    num_agreeing: int = 0
    num_apart: int = 0
    alphas: list[float] = field(default_factory=list)
    first_only: bool = False
    state: StateTally = field(default_factory=StateTally)
    records: list[StepRecord] = field(default_factory=list)

    def add(self, request: TapedRequest, replayed: Replay, plain_ids: Sequence[int]) -> None:
        self.num_texts += 1
        self.records += [step.record for step in request.steps]
        self._compare(request, replayed, plain_ids)
        best = replayed.target_probs[: replayed.num_read].argmax(-1)
        self.alphas += (best == replayed.draft_probs.argmax(-1)).float().tolist()
        wrong: dict[int, bool] = {}
        for step in request.steps:
            if (found := self._add_draft(request, replayed, step)) is not None:
                wrong[step.record.context_tokens] = found
        self.state.add(request, wrong)

    def _compare(self, request: TapedRequest, replayed: Replay, plain_ids: Sequence[int]) -> None:
        kinds = [kind for kind, _ in before_step(request)]
        self.num_steps += len(kinds)
        self.num_rejecting += sum(kind in REJECTING for kind in kinds)
        ids = request.token_ids
        place = next((i for i, (a, b) in enumerate(zip(ids, plain_ids)) if a != b), None)  # noqa: B905 (either may end first)
        if place is None:
            return
        row = replayed.target_logits[place]
        margin = abs(float(row[ids[place]] - row[plain_ids[place]])) / self.noise
        self.margins.append(margin)
        if margin <= TIE:
            return
        self.num_parted += 1
        at = request.num_prompt + place
        begun = sum(step.record.context_tokens <= at for _, step in before_step(request))
        self.num_after_partial += bool(begun) and kinds[begun - 1] in REJECTING

    def _add_draft(self, request: TapedRequest, replayed: Replay, step: TapedStep) -> bool | None:
        """Count a draft; returns whether its first token contradicts the replay, if known."""
        start = step.record.context_tokens - request.num_prompt
        proposal = step.proposal
        if proposal is None or not proposal.tree.is_chain or step.was_cut:
            return None
        most = 1 if self.first_only else step.num_reached
        reached = min(most, step.num_reached, replayed.num_read - start)
        if reached < 1:
            return None
        own = replayed.draft_probs[start : start + reached].argmax(-1).tolist()
        best = replayed.target_probs[start : start + reached].argmax(-1).tolist()
        for place in range(reached):
            accepted = place < step.record.num_accepted
            agrees = own[place] == best[place]
            self.hits.add(1, accepted)
            self.num_agreeing += agrees
            self.num_apart += accepted != agrees
        row, drafted = replayed.draft_logits[start], int(proposal.tokens[0])
        return float(row[own[0]] - row[drafted]) > TIE * self.noise

    def add_facts(self, evidence: Evidence) -> None:
        if self.num_texts:
            evidence.add(
                "output_differs",
                bool(self.margins),
                f"{len(self.margins)} of {self.num_texts} greedy texts part from plain decoding",
            )
        if self.margins:
            worst = max(self.margins)
            words = f"widest of {len(self.margins)} gaps; one width is {self.noise:.2g}"
            evidence.add("greedy_margin", worst, words)
        if self.num_parted:
            all_after = self.num_after_partial == self.num_parted
            by_chance = (self.num_rejecting / max(1, self.num_steps)) ** self.num_parted
            answer = False if not all_after else True if by_chance < CHANCE else None
            words = f"{self.num_after_partial} of {self.num_parted} part after a rejection"
            often = f"{self.num_rejecting} of {self.num_steps} steps come after one"
            evidence.add("output_differs_after_partial", answer, f"{words}; {often}")
        self._add_replay(evidence)

    def _add_replay(self, evidence: Evidence) -> None:
        hits = self.hits
        if hits.num_reached < MIN_TOKENS or self.num_agreeing == 0:
            return
        ratio = hits.num_accepted / self.num_agreeing
        interval = normal_interval(ratio, math.sqrt(self.num_apart) / self.num_agreeing)
        counts = f"{hits.num_accepted} accepted, {self.num_agreeing} of {hits.num_reached} replayed"
        evidence.add("replay_ratio", ratio, f"{SOURCE}: {counts}", interval)


@torch.inference_mode()
def noise_width(model: LanguageModel, request: TapedRequest, replayed: Replay, rows: int) -> float:
    """Return the largest change by rounding in the difference between the two largest logits."""
    few = torch.cat([*logits_of(model, request.ids, request.num_prompt - 1, rows)]).float()
    many = replayed.target_logits
    top = many.topk(2, dim=-1).indices
    moved = (gaps(few, top) - gaps(many, top)).abs().max()
    floor = torch.finfo(torch.float32).eps * 8 * many.abs().max()
    return float(torch.maximum(moved, floor))


def gaps(logits: Float[Tensor, "rows vocab"], top: Tensor) -> Float[Tensor, " rows"]:
    """Return the difference between the logits of two given tokens in every row."""
    two = logits.gather(-1, top)
    return two[:, 0] - two[:, 1]
