"""Records the steps of an engine, and counts what they say about a diagnosis.

At temperature 0 everything has one right answer, so single tokens decide: an emitted token that is
not the target's first choice, a drafted one that is not the draft's own when it reads the same text
from an empty cache. Of sampled text, tokens and acceptance must follow the distributions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from forerun.doctor.evidence import Evidence
from forerun.doctor.readers.trace import METHODS
from forerun.drafters.dflash.network import is_dflash
from forerun.drafters.draft_sequence import fit_vocabulary
from forerun.drafters.eagle3.head import Eagle3Head, is_eagle3
from forerun.drafters.eagle3.load import read_for
from forerun.drafters.medusa import MedusaHeads, read_medusa
from forerun.engine.engine import Engine
from forerun.engine.observing import ObservedStep
from forerun.measure.judge import (
    head_logits,
    histories_before,
    logits_of,
    num_known,
    overlap,
    probs_of_rows,
    read_text,
)
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.sampling.config import Choice, SamplingParams, draft_params, resolve_verification
from forerun.sampling.history import History, RowHistory
from forerun.sampling.noise import position_key, request_key, uniform
from forerun.sampling.processors import failed_rows
from forerun.sampling.proposal import Proposal
from forerun.theory.intervals import normal_interval, uniformity_p_value
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
    """Observer that records the steps of every request with their proposals.

    Attributes:
        wants_logits: steps are then run one by one: those computed ahead have no `draft_probs`.
    """

    is_required = True

    def __init__(self, *, wants_logits: bool) -> None:
        self.wants_logits = wants_logits
        self.steps: dict[str, list[TapedStep]] = {}

    def observe(self, step: ObservedStep) -> None:
        for record, entry in zip(step.records, step.emitting, strict=True):
            proposal = entry.proposal if entry.num_drafted else None
            taped = TapedStep(record=record, proposal=proposal)
            self.steps.setdefault(record.request_id, []).append(taped)


def run_taped(
    engine: Engine, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[TapedRequest]:
    """Run requests and record their steps; sampled drafts with their distributions."""
    recorder = PassRecorder(wants_logits=any(asked.temperature > 0.0 for asked in params))
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
"""Least number of positions from which acceptance is compared."""
MIN_DROP = 0.15
"""Least difference of acceptance that is reported."""
MIN_Z = 5.0
"""Least difference in standard errors; high, because positions of one text are not independent."""


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
"""Least number of steps from which it is reported that their drafts are correct."""
MIN_WRONG = 3
"""Least number of wrong drafts that are reported; fewer may be ties that rounding decided."""
CLEAN = 0.005
"""Largest share of steps with an apparent onset of a fault in a run without one."""
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
            before = _outcome(step)
        elif before not in STARTS:
            before = "pause"
    return found


def _outcome(step: TapedStep) -> str:
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


def reference_head(folder: Path, target: LanguageModel) -> ReferenceHead | None:
    """Load the head in a folder in fp32 for evaluation without caches; None for a DFlash one."""
    settings = read_object(folder / "config.json")
    if is_eagle3(settings):
        head = read_for(folder, target)
        return ReferenceHead(head.to(target.device).requires_grad_(False), target)
    if is_dflash(settings):
        return None
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
    rows = _row_histories(request, target.vocab_size, eos_token_ids)
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


def _row_histories(
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


MIN_TOKENS = 30
"""Least number of reached positions for a fact about acceptance."""
CHANCE = 0.05
"""Largest p-value at which differing texts are attributed to the rejections before them."""
TIE = 4.0
"""Gap between two logits, in noise widths, up to which rounding may decide."""
REJECTING = ("partial", "none")
SOURCE = "greedy text replayed with fresh caches"


@dataclass(slots=True)
class GreedyTally:
    """Counts over greedy requests, compared with plain decoding and replays.

    Attributes:
        noise: by how much rounding moves the gap between two logits.
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
    two = logits.gather(-1, top)
    return two[:, 0] - two[:, 1]


MIN_VALUES = 50
"""Least number of values for a test of uniformity, which has no power with fewer."""
CERTAIN = 0.001
DOUBTFUL = 0.05
MIN_NATS = 5.0
"""Log likelihood ratio that decides between two acceptance rules."""
OTHER_DISTRIBUTION = 0.1
"""Total variation above what rounding can cause."""
TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Acceptance of one request's draft with the full prompt and with most of it removed."""

    num_prompt: int
    num_positions: int
    near: float
    far: float


@dataclass(slots=True)
class SampledTally:
    """Counts and statistics over sampled requests.

    Attributes:
        emitted: numbers of the emitted tokens, least likely ones first.
        contrasted: the same, ordered by how much likelier they are to the draft.
        drafted: numbers of the drafted tokens under the distributions recorded for them.
        residual: numbers of the tokens after a rejection, under the distribution of what was left.
        overlaps: sum of min(p, q) there, q as recorded.
        variance: of as many coin tosses with these probabilities.
        match_nats: log likelihood of acceptance by exact match over that of min(1, p / q).
        alphas: acceptance probabilities of the replayed draft, at every position it could read.
        num_without_probs: of these positions, those at which its logits are not finite.
        entropies: of the target's distribution at emitted positions, in nats.
        cut: per request with a long prompt, what its acceptance is with and without that.
        state: where recorded distributions stop being those of the replayed draft.
    """

    transform: Transform
    emitted: list[float] = field(default_factory=list)
    contrasted: list[float] = field(default_factory=list)
    drafted: list[float] = field(default_factory=list)
    residual: list[float] = field(default_factory=list)
    num_accepted: int = 0
    expected: float = 0.0
    squares: float = 0.0
    hits: AcceptedShare = field(default_factory=AcceptedShare)
    overlaps: float = 0.0
    variance: float = 0.0
    match_nats: float = 0.0
    alphas: list[float] = field(default_factory=list)
    num_without_probs: int = 0
    entropies: list[float] = field(default_factory=list)
    cut: list[Cut] = field(default_factory=list)
    num_one_hot: int = 0
    num_sampled: int = 0
    state: StateTally = field(default_factory=StateTally)
    records: list[StepRecord] = field(default_factory=list)

    def add(self, request: TapedRequest, replayed: Replay) -> None:
        self.records += [step.record for step in request.steps]
        self._add_text(request, replayed)
        wrong: dict[int, bool] = {}
        drawn: list[tuple[Tensor, Tensor]] = []
        for step in request.steps:
            if not step.num_drafted:
                continue
            self._add_count(step)
            if (found := sampled_chain(step, replayed.target_probs.device)) is None:
                continue
            probs, tokens = found
            # After a rejection a coupled draft reuses the noise of the positions beyond it, so only
            # its first token is independent.
            coupled = step.proposal is not None and step.proposal.choice is Choice.COUPLED
            once = 1 if coupled else len(tokens)
            drawn.append((probs[:once], tokens[:once]))
            start = step.record.context_tokens - request.num_prompt
            if start < replayed.num_read:
                apart = 1.0 - float(overlap(probs[0], replayed.draft_probs[start]))
                wrong[step.record.context_tokens] = apart > OTHER_DISTRIBUTION
            self._add_step(request, replayed, step, probs, tokens)
        self.state.add(request, wrong)
        if drawn:
            probs, tokens = (torch.cat(column) for column in zip(*drawn, strict=True))
            self.drafted += self.transform.values(probs, tokens, probs)

    # --- the text

    def _add_text(self, request: TapedRequest, replayed: Replay) -> None:
        target, draft = replayed.target_probs, replayed.draft_probs
        tokens = torch.tensor(request.token_ids[: len(target)], device=target.device)
        # Tokens are ordered by the text before them alone, so that a correct distribution passes.
        self.emitted += self.transform.values(target, tokens, target)
        num_read = replayed.num_read
        if num_read:
            read, said = target[:num_read], tokens[:num_read]
            self.contrasted += self.transform.values(read, said, contrast(read, draft))
            self.alphas += overlap(read, draft).tolist()
            self.num_without_probs += int(failed_rows(draft).sum())
        if replayed.near_probs is not None:
            num = len(replayed.near_probs)
            near = float(overlap(target[:num], replayed.near_probs).sum())
            far = float(overlap(target[:num], draft[:num]).sum())
            self.cut.append(
                Cut(num_prompt=request.num_prompt, num_positions=num, near=near, far=far)
            )
        self.entropies += torch.special.entr(target).sum(-1).tolist()

    # --- the steps

    def _add_count(self, step: TapedStep) -> None:
        if not step.was_cut:
            record = step.record
            self.num_accepted += record.num_accepted
            self.expected += record.expected_accepted
            self.squares += (record.num_accepted - record.expected_accepted) ** 2
        if METHODS.get(step.record.method) in ("ngram", "mtp"):
            return  # copies of text and the first choices of Medusa heads have no distribution
        one_hot = step.proposal is not None and step.proposal.draft_probs is None
        self.num_one_hot += one_hot
        self.num_sampled += not one_hot

    def _add_step(
        self,
        request: TapedRequest,
        replayed: Replay,
        step: TapedStep,
        probs: Tensor,
        tokens: Tensor,
    ) -> None:
        start, num_accepted = step.record.context_tokens - request.num_prompt, step.num_reached
        target = replayed.target_probs[start : start + len(tokens)]
        if len(target) < num_accepted or step.was_cut:
            return
        self._add_reached(step, target, probs, tokens)
        if step.record.last_token_source != "recovered":
            return
        assert step.proposal is not None
        num_accepted = step.record.num_accepted
        method = resolve_verification(request.params, step.proposal.choice)
        left = _residual_probs(method, target, probs, tokens, num_accepted)
        if left is not None:
            emitted = torch.tensor([request.token_ids[start + num_accepted]], device=left.device)
            self.residual += self.transform.values(left[None], emitted, left[None])

    def _add_reached(self, step: TapedStep, target: Tensor, probs: Tensor, tokens: Tensor) -> None:
        num = step.num_reached
        accept = (
            overlap(target[:num], probs[:num]).double().clamp(max=1.0)
        )  # equal distributions round up
        self.hits.add(num, step.record.num_accepted)
        self.overlaps += float(accept.sum())
        self.variance += float((accept * (1 - accept)).sum())
        places = torch.arange(num, device=probs.device)
        match = target[places, tokens[:num]].double().clamp(TINY, 1 - TINY)
        rule = (match / probs[places, tokens[:num]].double().clamp(min=TINY)).clamp(TINY, 1 - TINY)
        accepted = places < step.record.num_accepted
        nats = torch.where(accepted, (match / rule).log(), ((1 - match) / (1 - rule)).log())
        self.match_nats += float(nats.sum())

    # --- the facts

    def add_facts(self, evidence: Evidence) -> None:
        self._add_calibration(evidence)
        self._add_rule(evidence)
        self._add_drafted(evidence)
        self._add_replayed(evidence)

    def _add_replayed(self, evidence: Evidence) -> None:
        """Add entropy, invalid probabilities and context dependence, measured in replays."""
        if self.entropies:
            mean = sum(self.entropies) / len(self.entropies)
            evidence.add("target_entropy", mean, f"mean over {len(self.entropies)} emitted tokens")
        if self.num_without_probs:
            words = f"its replayed logits are NaN at {self.num_without_probs} of {len(self.alphas)}"
            evidence.add("draft_nan", True, words)
        self._add_context(evidence)

    def _add_context(self, evidence: Evidence) -> None:
        """Add how acceptance changes when most of the prompt is removed, on the longer prompts."""
        longest = sorted(self.cut, key=lambda cut: -cut.num_prompt)[: -(-len(self.cut) // 2)]
        num = sum(cut.num_positions for cut in longest)
        near = sum(cut.near for cut in longest)
        if num >= MIN_VALUES and near > 0.0:
            words = f"replayed acceptance at {num} tokens, with all context and with some"
            evidence.add("context_ratio", sum(cut.far for cut in longest) / near, words)

    def _add_calibration(self, evidence: Evidence) -> None:
        if self.expected <= 0.0:
            return
        ratio, error = self.num_accepted / self.expected, math.sqrt(self.squares) / self.expected
        z = (self.num_accepted - self.expected) / math.sqrt(max(self.squares, TINY))
        words = f"{self.num_accepted} accepted, {self.expected:.1f} expected, z = {z:+.1f}"
        evidence.add("expected_accepted", self.expected, words)
        evidence.add("calibration", ratio, words, normal_interval(ratio, error))

    def _add_rule(self, evidence: Evidence) -> None:
        if self.num_one_hot + self.num_sampled:
            words = f"{self.num_one_hot} of {self.num_one_hot + self.num_sampled} drafts"
            evidence.add("draft_one_hot", self.num_one_hot > self.num_sampled, words)
        if self.overlaps <= 0.0:
            return
        ratio = self.hits.num_accepted / self.overlaps
        words = f"{self.hits.num_accepted} accepted, sum(min(p, q)) = {self.overlaps:.1f}"
        error = math.sqrt(self.variance) / self.overlaps
        evidence.add("accept_rule_ratio", ratio, words, normal_interval(ratio, error))
        if abs(self.match_nats) > MIN_NATS:
            words = (
                f"log likelihood of acceptance by match over min(1, p / q): {self.match_nats:+.0f}"
            )
            evidence.add("exact_match_rule", self.match_nats > 0.0, words)

    def _add_drafted(self, evidence: Evidence) -> None:
        tests = [values for values in (self.emitted, self.contrasted) if len(values) >= MIN_VALUES]
        if tests:
            p_value = min(1.0, len(tests) * min(map(uniformity_p_value, tests)))
            words = f"{len(self.emitted)} emitted tokens, {len(tests)} orders"
            evidence.add("pit_p_value", p_value, words)
            self._add_residual(evidence, p_value)
        if len(self.drafted) >= MIN_VALUES:
            p_value = uniformity_p_value(self.drafted)
            words = f"{len(self.drafted)} drafted tokens under recorded probs, p = {p_value:.2g}"
            evidence.add("draft_probs_differ", decided(p_value), words)

    def _add_residual(self, evidence: Evidence, p_of_text: float) -> None:
        """Add whether recovered tokens follow the residual, unless the whole text is correct."""
        if len(self.residual) < MIN_VALUES:
            return
        p_value = uniformity_p_value(self.residual)
        answer = decided(p_value)
        if answer and p_of_text > DOUBTFUL:
            return
        words = f"{len(self.residual)} tokens after a rejection, p = {p_value:.2g}"
        evidence.add("residual_wrong", answer, words)


def sampled_chain(
    step: TapedStep, device: torch.device
) -> tuple[Float[Tensor, "nodes vocab"], Int64[Tensor, " nodes"]] | None:
    """Return probabilities and tokens of a sampled chain; None for any other draft."""
    proposal = step.proposal
    if proposal is None or proposal.draft_probs is None or not proposal.tree.is_chain:
        return None
    return proposal.draft_probs.float().to(device), proposal.tokens.to(device)


def decided(p_value: float) -> bool | None:
    """Whether a p-value rejects a hypothesis; None if it is inconclusive."""
    return True if p_value < CERTAIN else False if p_value >= DOUBTFUL else None


def contrast(
    target: Float[Tensor, "rows vocab"], draft: Float[Tensor, "rows vocab"]
) -> Float[Tensor, "rows vocab"]:
    return (target.clamp(min=TINY).log() - draft.clamp(min=TINY).log()).nan_to_num(0.0)


def _residual_probs(
    method: str, target: Tensor, probs: Tensor, tokens: Tensor, num_accepted: int
) -> Float[Tensor, " vocab"] | None:
    """Return the residual distribution after a rejection; None for methods without one."""
    if method == "token":
        ratio = 1.0
    elif method == "block":
        ratio = prefix_ratio(target, probs, tokens, num_accepted)
    else:
        return None
    left = (ratio * target[num_accepted] - probs[num_accepted]).clamp(min=0)
    total = left.sum()
    return left / total if float(total) > TINY else target[num_accepted]


def prefix_ratio(target: Tensor, probs: Tensor, tokens: Tensor, num_accepted: int) -> float:
    ratio = 1.0
    for place in range(num_accepted):
        token = int(tokens[place])
        ratio = min(
            1.0, ratio * float(target[place, token]) / max(float(probs[place, token]), TINY)
        )
    return ratio
