"""Greedy text: whether it is the target's, and whether drafts come from the state they should.

At temperature 0 everything has one right answer, so single tokens tell: an emitted token that is
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

from forerun.align.evaluation.teacher_forced import logits_of
from forerun.diagnose.evidence import Evidence
from forerun.models.base import LanguageModel
from forerun.probe.evidence.replay import Replay
from forerun.probe.evidence.tape import TapedRequest, TapedStep
from forerun.theory.intervals import Interval

__all__ = ["GreedyTally", "noise_width"]

Z95 = 1.96
MIN_TOKENS = 30
"""Fewer reached positions say nothing about acceptance."""
MIN_WRONG = 3
"""Fewer drafts that are not the draft's own may be ties that rounding decided."""
TIE = 4.0
"""A gap of fewer noise widths may be closed by rounding."""
SOURCE = "greedy text replayed with fresh caches"


@dataclass(slots=True)
class GreedyTally:
    """What is counted over greedy requests.

    Attributes:
        noise: by how much rounding moves the gap between two logits.
        num_texts: requests seen.
        margins: per text that parts from plain decoding, the gap there in noise widths.
        num_parted: those of them by more than a tie.
        num_after_partial: those of them right after a step that rejected something.
        num_reached: drafted positions whose predecessors were accepted.
        num_accepted: accepted ones among them.
        num_agreeing: those where the replayed draft agrees with the target.
        squares: sum of squared differences between the two.
        first_drafts: by what the step before did, [first drafted tokens, of those not the draft's
            own by more than a tie].
    """

    noise: float
    num_texts: int = 0
    margins: list[float] = field(default_factory=list)
    num_parted: int = 0
    num_after_partial: int = 0
    num_reached: int = 0
    num_accepted: int = 0
    num_agreeing: int = 0
    squares: float = 0.0
    first_drafts: dict[str, list[int]] = field(default_factory=dict)

    def add(self, request: TapedRequest, replayed: Replay, plain_ids: Sequence[int]) -> None:
        """Take in one request and what plain decoding made of its prompt."""
        self.num_texts += 1
        self._compare(request, replayed, plain_ids)
        for before, step in request.pairs():
            self._add_draft(request, replayed, before, step)

    def _compare(self, request: TapedRequest, replayed: Replay, plain_ids: Sequence[int]) -> None:
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
        behind = [s for s in request.steps if s.record.context_tokens <= at]
        last = behind[-2] if len(behind) > 1 else None
        self.num_after_partial += last is not None and kind_of(last) in ("partial", "none")

    def _add_draft(
        self, request: TapedRequest, replayed: Replay, before: TapedStep | None, step: TapedStep
    ) -> None:
        start = step.record.context_tokens - request.num_prompt
        proposal = step.proposal
        if proposal is None or not proposal.tree.is_chain or step.was_cut:
            return
        reached = min(step.num_reached, replayed.num_read - start)
        if reached < 1:
            return
        own = replayed.draft_logits[start : start + reached].argmax(-1).tolist()
        best = replayed.target_probs[start : start + reached].argmax(-1).tolist()
        for place in range(reached):
            accepted = place < step.record.num_accepted
            agrees = own[place] == best[place]
            self.num_reached += 1
            self.num_accepted += accepted
            self.num_agreeing += agrees
            self.squares += float(accepted != agrees)
        row, drafted = replayed.draft_logits[start], int(proposal.tokens[0])
        is_wrong = float(row[own[0]] - row[drafted]) > TIE * self.noise
        counts = self.first_drafts.setdefault(
            "start" if before is None else kind_of(before), [0, 0]
        )
        counts[0] += 1
        counts[1] += is_wrong

    def add_facts(self, evidence: Evidence) -> None:
        """What the counts come to."""
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
            evidence.add(
                "output_differs_after_partial",
                all_after,
                f"{self.num_after_partial} of {self.num_parted} part after a rejection",
            )
        self._add_replay(evidence)
        self._add_rollback(evidence)

    def _add_replay(self, evidence: Evidence) -> None:
        if self.num_reached < MIN_TOKENS or self.num_agreeing == 0:
            return
        ratio = self.num_accepted / self.num_agreeing
        reach = Z95 * math.sqrt(self.squares) / self.num_agreeing
        interval = Interval(estimate=ratio, low=max(0.0, ratio - reach), high=ratio + reach)
        counts = f"{self.num_accepted} accepted, {self.num_agreeing} of {self.num_reached} replayed"
        evidence.add("replay_ratio", ratio, f"{SOURCE}: {counts}", interval)

    def _add_rollback(self, evidence: Evidence) -> None:
        later = [counts for kind, counts in self.first_drafts.items() if kind != "start"]
        num, wrong = sum(c[0] for c in later), sum(c[1] for c in later)
        if num < MIN_TOKENS:
            return
        words = ", ".join(f"{c[1]} of {c[0]} after {kind}" for kind, c in self.first_drafts.items())
        share = wrong / num
        answer = True if wrong >= MIN_WRONG and share > 0.02 else False if share < 0.01 else None
        evidence.add("rollback_wrong", answer, f"first drafts that are not the draft's: {words}")


def kind_of(step: TapedStep) -> str:
    """What became of a step's draft."""
    accepted = step.record.num_accepted
    return "none" if not accepted else "full" if accepted == step.num_drafted else "partial"


@torch.inference_mode()
def noise_width(model: LanguageModel, request: TapedRequest, replayed: Replay, rows: int) -> float:
    """How far rounding moves the gap between the two likeliest tokens.

    The largest move over one text, between passes of many rows and of few; not less than what
    adding up in fp32 does anyway.

    Args:
        model: the target.
        request: the text.
        replayed: its logits in passes of many rows.
        rows: of the narrow passes.
    """
    few = torch.cat([*logits_of(model, request.ids, request.num_prompt - 1, rows)]).float()
    many = replayed.target_logits
    top = many.topk(2, dim=-1).indices
    moved = (gaps(few, top) - gaps(many, top)).abs().max()
    floor = torch.finfo(torch.float32).eps * 8 * many.abs().max()
    return float(torch.maximum(moved, floor))


def gaps(logits: Float[Tensor, "rows vocab"], top: Tensor) -> Float[Tensor, " rows"]:
    """First minus second of two given tokens per row."""
    two = logits.gather(-1, top)
    return two[:, 0] - two[:, 1]
