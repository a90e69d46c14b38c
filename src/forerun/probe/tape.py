"""Records the steps of an engine together with the proposals and their draft_probs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.diagnose.evidence import Evidence
from forerun.drafters.draft_sequence import fit_vocabulary
from forerun.drafters.eagle3.formats import is_eagle3
from forerun.drafters.eagle3.head import Eagle3Head
from forerun.drafters.eagle3.load import examine
from forerun.drafters.medusa import MedusaHeads, read_medusa
from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.measure.judge import (
    head_logits,
    histories_before,
    logits_of,
    num_known,
    probs_of_rows,
    read_text,
)
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.sampling.config import SamplingParams, draft_params
from forerun.sampling.history import History, RowHistory
from forerun.sampling.noise import position_key, request_key, uniform
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


class ReferenceHead:
    """A head with its target, evaluated over whole texts without caches."""

    def __init__(self, head: Eagle3Head | MedusaHeads, target: LanguageModel) -> None:
        self.head = head
        self.target = target

    def logits(self, ids: Sequence[int], first: int) -> Float[Tensor, "read vocab"]:
        """Logits of the first drafted token after each row from `first` to the last but one."""
        ids = ids[: self.target.max_context]
        if first < 1 or len(ids) < first + 2:
            return torch.empty(0, self.target.vocab_size)
        if isinstance(self.head, Eagle3Head):
            _, features = read_text(self.target, ids, self.head.config.feature_layers)
            drafted = head_logits(self.target, self.head, ids, features)
        else:
            _, features = read_text(self.target, ids, (self.target.num_layers,))
            hidden = self.target.final_norm(features[:, 0]).float()
            drafted = self.head(hidden, self.target.head, 1)[0]
        return drafted[first - 1 : -1].float()


def reference_head(folder: Path, target: LanguageModel) -> ReferenceHead:
    """Load the head in a folder in fp32 for evaluation without caches."""
    if is_eagle3(read_object(folder / "config.json")):
        head = examine(folder, target).head
        return ReferenceHead(head.to(target.device).requires_grad_(False), target)
    heads = read_medusa(folder, vocab_size=target.vocab_size)
    return ReferenceHead(heads.to(target.device).requires_grad_(False), target)


class Transform:
    """Converts tokens to numbers that are uniform if the tokens follow their distributions.

    Tokens may come in any order that was fixed before the token was drawn; the order decides which
    errors of a distribution show.
    """

    def __init__(self, seed: int) -> None:
        self._key = request_key(~seed, 0)
        self._num_drawn = 0

    def values(
        self,
        probs: Float[Tensor, "rows vocab"],
        tokens: Int64[Tensor, " rows"],
        order: Float[Tensor, "rows vocab"],
    ) -> list[float]:
        keys = [position_key(self._key, self._num_drawn + row) for row in range(len(tokens))]
        self._num_drawn += len(tokens)
        shares = uniform(torch.tensor(keys, dtype=torch.int64, device=probs.device))
        probs = probs.double()
        own = order.gather(-1, tokens[:, None])
        before = (probs * (order < own)).sum(-1)
        level = (probs * (order == own)).sum(-1)
        numbers = (before + shares * level) / probs.sum(-1)
        return [min(1.0, max(0.0, value)) for value in numbers.tolist() if value == value]


NEAR = 64
"""Prompt tokens left to a draft that is to do without the rest."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """Logits of a replayed request; row i predicts output token i.

    Attributes:
        draft_logits: the draft's, over the target's ids; of as many rows as the draft can read.
        draft_probs: the draft's distribution under the parameters it drafts with; as many rows.
        near_probs: the same where the draft sees the output and the last `NEAR` tokens of the
            prompt; None where the prompt is not at least twice as long.
    """

    target_logits: Float[Tensor, "tokens vocab"]
    target_probs: Float[Tensor, "tokens vocab"]
    draft_logits: Float[Tensor, "read vocab"]
    draft_probs: Float[Tensor, "read vocab"]
    near_probs: Float[Tensor, "read vocab"] | None

    @property
    def num_read(self) -> int:
        return len(self.draft_probs)


@torch.inference_mode()
def replay(
    request: TapedRequest,
    target: LanguageModel,
    draft: LanguageModel | ReferenceHead | None,
    eos_token_ids: frozenset[int],
) -> Replay:
    """Feed prompt and output to new caches, in passes without drafts."""
    ids, num_prompt = request.ids, request.num_prompt
    if target.store.feature_layers:
        target.store.keep_features(())  # an engine over this target asks for them again
    rows = _histories_of(request, target.vocab_size, eos_token_ids)
    target_logits = torch.cat([*logits_of(target, ids, num_prompt - 1)]).float()
    target_probs = probs_of_rows(target_logits, request.params, rows)
    draft_logits, draft_probs, near_probs = target_logits[:0], target_probs[:0], None
    if draft is not None:
        asked, width = draft_params(request.params), target.vocab_size

        def read(cut: int) -> Tensor:
            first = num_prompt - 1 - cut
            if isinstance(draft, ReferenceHead):
                logits = draft.logits(ids[cut:], first)
            else:
                logits = readable(draft, ids[cut:], first)
            return fit_vocabulary(logits.to(target_logits.device), width)

        draft_logits = read(0)
        if len(draft_logits):
            draft_probs = probs_of_rows(draft_logits, asked, rows[: len(draft_logits)])
        if len(draft_logits) and num_prompt >= 2 * NEAR:
            near_probs = probs_of_rows(read(num_prompt - NEAR)[: len(draft_logits)], asked, rows)
    return Replay(
        target_logits=target_logits,
        target_probs=target_probs,
        draft_logits=draft_logits,
        draft_probs=draft_probs,
        near_probs=near_probs,
    )


def readable(model: LanguageModel, ids: Sequence[int], first: int) -> Float[Tensor, "read vocab"]:
    """Return the logits of rows `first` to the last but one, within the model's context."""
    read = ids[: min(num_known(model, ids) + 1, model.max_context)]
    found = [*logits_of(model, read, first)] if len(read) > first + 1 else []
    return torch.cat(found).float() if found else torch.empty(0, model.vocab_size)


def _histories_of(
    request: TapedRequest, vocab_size: int, eos_token_ids: frozenset[int]
) -> list[RowHistory]:
    """Return the state of the logits processors before each output token; empty if unused."""
    params = request.params
    if not params.needs_history:
        return []
    history = History.of(
        params, request.prompt_ids, vocab_size=vocab_size, eos_token_ids=eos_token_ids
    )
    return histories_before(history, request.token_ids)
