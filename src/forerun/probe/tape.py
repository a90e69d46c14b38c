"""Records the steps of an engine together with the proposals and their draft_probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.diagnose.evidence import Evidence
from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.record import StepRecord


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapedStep:
    """One recorded step of one request."""

    record: StepRecord
    proposal: Proposal | None

    @property
    def num_drafted(self) -> int:
        return 0 if self.proposal is None else self.record.num_drafted

    @property
    def num_reached(self) -> int:
        """Number of drafted positions whose predecessors were all accepted."""
        return min(self.num_drafted, self.record.num_accepted + 1)

    @property
    def was_cut(self) -> bool:
        return self.record.num_emitted <= self.record.num_accepted


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TapedRequest:
    """One finished request with its recorded steps."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    params: SamplingParams
    steps: tuple[TapedStep, ...]
    num_cached: int = 0

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        return self.prompt_ids + self.token_ids


class PassRecorder:
    """Observer that records the steps of every request with their proposals."""

    is_required = True
    wants_logits = False

    def __init__(self) -> None:
        self.steps: dict[str, list[TapedStep]] = {}

    def observe(self, step: ObservedStep) -> None:
        for record, entry in zip(step.records, step.emitting, strict=True):
            proposal = entry.proposal if entry.num_drafted else None
            taped = TapedStep(record=record, proposal=proposal)
            self.steps.setdefault(record.request_id, []).append(taped)


def run_taped(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[TapedRequest]:
    recorder = PassRecorder()
    engine.observers.append(recorder)
    try:
        outputs = engine.generate([list(prompt) for prompt in prompts], list(params))
    finally:
        engine.observers.remove(recorder)
    return [
        TapedRequest(
            prompt_ids=output.prompt_token_ids,
            token_ids=output.token_ids,
            params=asked,
            steps=tuple(recorder.steps.get(output.request_id, ())),
            num_cached=output.completions[0].num_cached_tokens,
        )
        for output, asked in zip(outputs, params, strict=True)
    ]


MIN_POSITIONS = 100
"""Least number of positions; neighbouring ones are alike."""
MIN_DROP = 0.15
"""A smaller difference explains no complaint."""
MIN_Z = 5.0
"""Positions of one text depend on each other, so this is higher than for independent ones."""


@dataclass(slots=True, kw_only=True)
class AcceptedShare:
    """Counts of drafted positions that were verified and of those that were accepted."""

    num_reached: int = 0
    num_accepted: int = 0

    def add(self, num_reached: int, num_accepted: int) -> None:
        self.num_reached += num_reached
        self.num_accepted += num_accepted

    @property
    def words(self) -> str:
        return f"{self.num_accepted} of {self.num_reached}"

    def is_below(self, other: AcceptedShare) -> bool | None:
        """Whether acceptance is significantly lower than elsewhere; None if that is undecided."""
        if min(self.num_reached, other.num_reached) < MIN_POSITIONS:
            return None
        difference = other.num_accepted / other.num_reached - self.num_accepted / self.num_reached
        num_both = self.num_reached + other.num_reached
        both = (self.num_accepted + other.num_accepted) / num_both
        error = math.sqrt(both * (1 - both) * (1 / self.num_reached + 1 / other.num_reached))
        if difference >= MIN_DROP and difference >= MIN_Z * error:
            return True
        return False if difference + 2 * error < MIN_DROP else None


MIN_STEPS = 30
"""Least number of steps from which their being right is a fact."""
MIN_WRONG = 3
"""Fewer may be ties that rounding decided."""
CLEAN = 0.005
"""Share of steps at which a fault may seem to begin where there is none."""
WRONG = 0.02
AFTER_STEP = ("none", "partial", "full")
STARTS = ("start", "hit")
HAND_OVER = (*STARTS, "pause")


@dataclass(slots=True)
class Onsets:
    """Counts of steps after a correct draft, and of wrong drafts among these steps."""

    num_steps: int = 0
    num_wrong: int = 0


@dataclass(slots=True)
class StateTally:
    """Counts of drafts that become wrong, by the outcome of the previous step.

    Attributes:
        onsets: by "start" of a request, "hit" (a start with a cached prefix), "pause" (a step
            without a draft), and what became of the draft before: "none" of it was accepted, a
            "partial" one, or the "full" one.
    """

    onsets: dict[str, Onsets] = field(default_factory=dict)

    def add(self, request: TapedRequest, wrong: dict[int, bool]) -> None:
        was_right = True
        for before, step in before_step(request):
            kind = wrong.get(step.record.context_tokens)
            if kind is None:
                continue
            if was_right or before in HAND_OVER:
                onsets = self.onsets.setdefault(before, Onsets())
                onsets.num_steps += 1
                onsets.num_wrong += kind
            was_right = not kind

    def add_facts(self, evidence: Evidence, *, reads_features: bool = False) -> None:
        """Add whether drafts become wrong after a verification, a request's start or a pause."""
        if reads_features and self._add_features(evidence):
            return
        self._add(evidence, "rollback_wrong", AFTER_STEP)
        self._add(evidence, "acceptance_falls_after_handoff", HAND_OVER)

    def _add_features(self, evidence: Evidence) -> bool:
        """Add whether a head computes other drafts than its checkpoint; returns whether it does."""
        cold = self.onsets.get("start", Onsets())
        after = [self.onsets[kind] for kind in AFTER_STEP if kind in self.onsets]
        num_wrong = cold.num_wrong + sum(onsets.num_wrong for onsets in after)
        differs = cold.num_wrong > 0 and num_wrong >= MIN_WRONG
        is_right = cold.num_wrong == 0 and cold.num_steps > MIN_WRONG
        answer = True if differs else False if is_right else None
        words = f"{cold.num_wrong} of {cold.num_steps} first drafts of requests that began afresh"
        evidence.add("features_differ", answer, f"{words} are not those of the checkpoint")
        return differs

    def _add(self, evidence: Evidence, name: str, kinds: tuple[str, ...]) -> None:
        seen = {kind: self.onsets[kind] for kind in kinds if kind in self.onsets}
        num = sum(onsets.num_steps for onsets in seen.values())
        wrong = sum(onsets.num_wrong for onsets in seen.values())
        listed = ", ".join(f"{o.num_wrong} of {o.num_steps} after {k}" for k, o in seen.items())
        answer: bool | None = None
        if wrong >= MIN_WRONG and wrong > WRONG * num:
            answer = True
        elif num >= MIN_STEPS and wrong <= CLEAN * num:
            answer = False
        evidence.add(name, answer, f"first drafts go wrong: {listed}")


def before_step(request: TapedRequest) -> list[tuple[str, TapedStep]]:
    found: list[tuple[str, TapedStep]] = []
    before = "hit" if request.num_cached else "start"
    for step in request.steps:
        if step.num_drafted:
            found.append((before, step))
            before = _kind_of(step)
        elif before not in STARTS:
            before = "pause"
    return found


def _kind_of(step: TapedStep) -> str:
    accepted = step.record.num_accepted
    return "none" if not accepted else "full" if accepted == step.num_drafted else "partial"
