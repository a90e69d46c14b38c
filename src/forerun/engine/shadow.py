"""A draft on trial: it drafts for the engine's requests, and nothing that it proposes is verified.

It is an observer, so that it cannot change a text. What it proposed after a step is compared with
the tokens and the distributions of the target's own passes in the steps that follow:

- A chain that is a function of the text, or is coupled to the target's noise, is accepted as far as
  it equals the text. The text depends on no draft, so this is what would have happened.
- A chain drawn from draft_probs q is accepted at a position with the probability sum(min(p, q)).
  The target's p is known as long as the chain equals the text, whose tokens are drawn from p
  independently of it. A token is accepted with min(p, q) and equal with p q: chains that go on
  count 1 / max(p, q) of each of their tokens, so that later positions are unbiased too. That is the
  rule of single tokens, which block verification only exceeds.

It drafts in two steps in a row, for all sequences together. The first draft has rows to catch up
with, and its time is not counted; the second takes what a draft would take in service.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import FAILURES, Drafter, DraftRequest, StepOutcome
from forerun.engine.drafting import check_proposals, request_of
from forerun.engine.observing import ObservedStep
from forerun.engine.scheduler import ScheduledSequence
from forerun.engine.sequence import Sequence
from forerun.models.base import Context
from forerun.models.kv_store import count_common
from forerun.sampling.config import Choice, TokenSource
from forerun.sampling.noise import Purpose, step_key
from forerun.sampling.processors import pack_params, target_probs
from forerun.sampling.proposal import Proposal, Verdict

logger = logging.getLogger("forerun.shadow")

MAX_TALLIES = 4096
"""Latest requests that are kept; a bound on memory alone."""
RECENT_STEPS = 256
"""Steps of which the depth that is drafted most is the depth of the trial."""
MEMORY = 0.98
"""Weight that the mean time of a usual step keeps after one more."""


@dataclass(slots=True, kw_only=True)
class TimedCount:
    """A number of steps, drafts or levels, and the seconds that they took."""

    number: float = 0.0
    seconds: float = 0.0

    def add(self, number: float, seconds: float) -> None:
        self.number += number
        self.seconds += seconds


@dataclass(slots=True, kw_only=True)
class RequestTally:
    """What was counted of one sequence; its share of the time of a step that others took part in.

    Attributes:
        live: tokens of usual steps without a prompt, those behind a stop included, and seconds.
        rest: usual steps by depth drafted, without the seconds of drafting.
        chains: drafts on trial by depth, those with a measured time.
        usual_levels, trial_levels: levels that the live draft drafted in usual steps, and in those
            with a draft on trial, which the kernels do not take by themselves.
        weights, accepted: sums over the chains that reached each position, and over the
            probability that it was accepted.
    """

    live: TimedCount = field(default_factory=TimedCount)
    rest: dict[int, TimedCount] = field(default_factory=dict)
    chains: dict[int, TimedCount] = field(default_factory=dict)
    usual_levels: TimedCount = field(default_factory=TimedCount)
    trial_levels: TimedCount = field(default_factory=TimedCount)
    weights: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    has_ended: bool = False

    def score(self, position: int, weight: float, probability: float) -> None:
        if position == len(self.weights):
            self.weights.append(0.0)
            self.accepted.append(0.0)
        self.weights[position] += weight
        self.accepted[position] += weight * probability


@dataclass(slots=True, kw_only=True, eq=False)
class OpenChain:
    """A proposed chain that equals the text so far.

    Attributes:
        start: number of committed tokens when it was proposed.
        probs: rows that its tokens were drawn from; None where it is accepted as far as it equals
            the text.
    """

    tokens: list[int]
    start: int
    probs: Float[Tensor, "depth vocab"] | None
    weight: float = 1.0
    num_equal: int = 0


@dataclass(slots=True, kw_only=True, eq=False)
class ShadowedSequence:
    """A sequence in the draft on trial.

    Attributes:
        context: the target's view; another one after a preemption, when all begins anew.
        num_observed: rows of the target that were reported.
        latest: the last proposal, its tokens, and the number of committed tokens before them.
    """

    sequence: Sequence
    context: Context
    request: DraftRequest
    num_observed: int = 0
    latest: tuple[Proposal, list[int], int] | None = None
    chains: list[OpenChain] = field(default_factory=list)

    def find_verdict(self) -> tuple[Proposal, Verdict] | None:
        """Return the latest proposal with the verdict that the text since then amounts to."""
        if self.latest is None:
            return None
        proposal, drafted, start = self.latest
        followed = self.sequence.ids[start:]
        num_equal = count_common(drafted, followed[:-1])
        sources = (TokenSource.ACCEPTED,) * num_equal + (TokenSource.RECOVERED,)
        return proposal, Verdict(
            path=tuple(range(num_equal)),
            tokens=tuple(followed[: num_equal + 1]),
            sources=sources,
            expected_accepted=num_equal,
        )


class ShadowDraft:
    """An observer that tries a drafter on the requests of an engine; see the module.

    The drafter reads the layers that the engine's store keeps (`Engine.check_drafter`). After an
    error of it the observer does nothing more.

    Args:
        depth: K, where no recent step drafted.
        share: of the time of steps, which the trial takes on average.

    Attributes:
        tallies: by sequence, the latest last.
        num_ended: sequences with a scored draft that have ended.
        failure: why the drafter is tried no more.
        spent: steps since the trial began, and its own seconds.
    """

    is_required = False

    def __init__(self, drafter: Drafter, vocab_size: int, depth: int, share: float) -> None:
        self.drafter = drafter
        self.tallies: dict[str, RequestTally] = {}
        self.num_ended = 0
        self.failure: str | None = None
        self.spent = TimedCount()
        self._vocab_size, self._depth, self._share = vocab_size, depth, share
        self._depths: deque[int] = deque(maxlen=RECENT_STEPS)
        self._shadowed: dict[str, ShadowedSequence] = {}
        self._allowance_s = 0.0
        self._usual_s: float | None = None
        self._num_left = 0  # steps of the present burst
        self._keeps_logits = False

    @property
    def wants_logits(self) -> bool:
        return self._keeps_logits

    @torch.inference_mode()
    def observe(self, step: ObservedStep) -> None:
        """Score what was drafted before, and draft again where the allowance is not used up."""
        if self.failure is not None or not step.records:
            return
        began_s = time.monotonic()
        try:
            self._note_times(step)
            for entry in step.emitting:
                self._score(entry)
            self._forget_ended()
            if self._num_left == 0 and self._allowance_s > 0.0:
                self._num_left = 2
            if self._num_left:
                self._num_left -= 1
                self._draft(step.emitting)
        except FAILURES as error:
            self._fail(error)
        self._keeps_logits = self._num_left > 0 or any(
            chain.probs is not None for each in self._shadowed.values() for chain in each.chains
        )
        seconds = time.monotonic() - began_s
        self._allowance_s -= seconds
        self.spent.add(1, seconds)

    def close(self) -> None:
        """Forget all sequences; call it once the observer was removed."""
        for key in [*self._shadowed]:
            self._forget(key)

    # ----------------------------------------------------------------------------------------- time

    def _note_times(self, step: ObservedStep) -> None:
        """Count the times of a step, which the trial may take a share of."""
        first, share = step.records[0], 1.0 / len(step.records)
        is_usual = not (self._keeps_logits and step.emitting[0].logits is not None)
        cycle_s, rest_s = first.cycle_s, first.cycle_s - first.draft_s
        self._allowance_s += self._share * cycle_s
        if first.num_prefill_rows:
            return
        for record, entry in zip(step.records, step.emitting, strict=True):
            tally, depth = self._find_tally(record.request_id), record.depth_drafted
            if entry.sequence.max_new + record.num_emitted <= self._depth:
                continue  # the end of the text cut the draft, as it would cut any other
            if is_usual:
                tally.live.add(record.num_accepted + 1, cycle_s * share)
                tally.rest.setdefault(depth, TimedCount()).add(1, rest_s * share)
            levels = tally.usual_levels if is_usual else tally.trial_levels
            if depth:
                self._depths.append(depth)
                levels.add(depth, first.draft_s * share)
        if is_usual:
            before_s = cycle_s if self._usual_s is None else self._usual_s
            self._usual_s = MEMORY * before_s + (1 - MEMORY) * cycle_s
        elif self._usual_s is not None:
            self._allowance_s -= max(0.0, cycle_s - self._usual_s)

    def _find_tally(self, key: str) -> RequestTally:
        tally = self.tallies.get(key)
        if tally is None:
            tally = self.tallies[key] = RequestTally()
            if len(self.tallies) > MAX_TALLIES:
                del self.tallies[next(iter(self.tallies))]
        return tally

    # ---------------------------------------------------------------------------------------- score

    def _score(self, entry: ScheduledSequence) -> None:
        """Compare the open chains of a sequence with the tokens that the step emitted."""
        key = entry.sequence.key
        shadowed, tally = self._shadowed.get(key), self._find_tally(key)
        if entry.sequence.stop is not None and not tally.has_ended:
            tally.has_ended = True
            self.num_ended += bool(tally.weights or (shadowed and shadowed.chains))
        if shadowed is None or not shadowed.chains:
            return
        probs = None
        if any(chain.probs is not None for chain in shadowed.chains):
            probs = compute_emitted_probs(entry)
        ids = entry.sequence.ids
        before = len(ids) - entry.num_emitted
        still_open = []
        for chain in shadowed.chains:
            goes_on = chain.probs is None or probs is not None
            while goes_on and chain.start + chain.num_equal < len(ids):
                row = chain.start + chain.num_equal - before
                goes_on = score_token(chain, tally, ids, None if probs is None else probs[row])
            if goes_on:
                still_open.append(chain)
        shadowed.chains = still_open

    def _forget_ended(self) -> None:
        """Forget sequences that ended or lost their place in the batch."""
        for key, each in [*self._shadowed.items()]:
            if each.sequence.stop is not None or each.sequence.context is not each.context:
                self._forget(key)

    def _forget(self, key: str) -> None:
        del self._shadowed[key]
        try:
            self.drafter.forget(key)
        except FAILURES as error:
            logger.warning("the draft on trial failed to forget request %s: %s", key, error)

    def _fail(self, error: BaseException) -> None:
        self.failure, self._num_left = f"{type(error).__name__}: {error}", 0
        logger.warning("the draft on trial failed, requests go on without it: %s", error)
        self.close()

    # ---------------------------------------------------------------------------------------- draft

    def _draft(self, entries: Seq[ScheduledSequence]) -> None:
        """Draft for every sequence that goes on."""
        going = [e for e in entries if e.sequence.stop is None and e.sequence.max_new > 1]
        depth = self._depth
        if self._depths:
            ((depth, _),) = Counter(self._depths).most_common(1)
        asked: list[ShadowedSequence] = []
        drafted: list[ScheduledSequence] = []
        is_timed = True
        for entry in going:
            each = self._find_shadowed(entry)
            before = len(entry.sequence.ids) - entry.num_emitted
            is_timed &= each.latest is not None and each.latest[2] == before
            new, most = ScheduledSequence.of(entry.sequence), entry.sequence.max_new - 1
            new.plan = Plan.chain(self.drafter.method, min(depth, most))
            is_timed &= depth <= most
            asked.append(each)
            drafted.append(new)
        if not asked:
            return
        self._report(asked)
        began_s = time.monotonic()  # other steps have the report of the live draft in their rest
        plans = [entry.plan for entry in drafted]
        answers = self.drafter.propose([each.request for each in asked], plans)
        proposals = [one if isinstance(one, Proposal) else None for one in answers]
        check_proposals(drafted, proposals, self._vocab_size)
        chains = [[] if one is None else one.tokens.tolist() for one in proposals]
        share_s = (time.monotonic() - began_s) / len(asked)
        for each, proposal, tokens in zip(asked, proposals, chains, strict=True):
            tally, start = self._find_tally(each.sequence.key), len(each.sequence.ids)
            each.latest = None if proposal is None else (proposal, tokens, start)
            if is_timed:
                tally.chains.setdefault(depth, TimedCount()).add(1, share_s)
            if proposal is None or not tokens:
                tally.score(0, 1.0, 0.0)
            else:
                is_drawn = proposal.choice is Choice.SAMPLED
                probs = proposal.draft_probs if is_drawn else None
                each.chains.append(OpenChain(tokens=tokens, start=start, probs=probs))

    def _find_shadowed(self, entry: ScheduledSequence) -> ShadowedSequence:
        """Return the state of a sequence, which draws other noise than the text unless coupled."""
        sequence = entry.sequence
        found = self._shadowed.get(sequence.key)
        if found is None:
            request = replace(request_of(sequence), context=None)
            if not request.coupled:
                request = replace(request, noise_key=derive_key(sequence.noise_key))
            found = self._shadowed[sequence.key] = ShadowedSequence(
                sequence=sequence, context=entry.context, request=request
            )
        return found

    def _report(self, asked: Seq[ShadowedSequence]) -> None:
        """Report the verdict on each latest proposal, then all further rows."""
        judged = []
        for each in asked:
            if (found := each.find_verdict()) is not None:
                judged.append(self._build_outcome(each, 1 + found[1].num_accepted, *found))
        if judged:
            self.drafter.observe(judged)
        behind = [each for each in asked if each.num_observed < each.context.num_cached]
        if behind:
            rows = (each.context.num_cached - each.num_observed for each in behind)
            self.drafter.observe(
                [self._build_outcome(*pair) for pair in zip(behind, rows, strict=True)]
            )

    def _build_outcome(
        self,
        each: ShadowedSequence,
        num_rows: int,
        proposal: Proposal | None = None,
        verdict: Verdict | None = None,
    ) -> StepOutcome:
        """Return the outcome of the next rows of a sequence."""
        start, each.num_observed = each.num_observed, each.num_observed + num_rows
        features, context = None, each.context
        if self.drafter.required_features:
            features = context.store.features(context.slot, start, each.num_observed)
        return StepOutcome(
            request=each.request,
            first_row=start,
            num_rows=num_rows,
            verdict=verdict,
            proposal=proposal,
            features=features,
        )


def score_token(
    chain: OpenChain, tally: RequestTally, ids: Seq[int], probs: Float[Tensor, " vocab"] | None
) -> bool:
    """Count the next position of a chain, and return whether it goes on.

    `probs` is the target's distribution there, from which the token of the text was drawn; it is
    needed for a drawn chain.
    """
    place = chain.num_equal
    token, drafted = ids[chain.start + place], chain.tokens[place]
    accepted = float(drafted == token)
    if chain.probs is not None:
        assert probs is not None
        draft_probs = chain.probs[place].to(probs)
        accepted = float(torch.minimum(probs, draft_probs).sum())
        chance = float(torch.maximum(probs[token], draft_probs[token]))
    tally.score(place, chain.weight, accepted)
    if drafted != token or place + 1 == len(chain.tokens):
        return False
    if chain.probs is not None:
        chain.weight /= chance
    chain.num_equal += 1
    return True


def compute_emitted_probs(entry: ScheduledSequence) -> Float[Tensor, "emitted vocab"] | None:
    """Return the distributions that the tokens of a finished step were drawn from.

    None without its logits, and where penalties or a mask, which have changed since, apply.
    """
    logits, verdict, sequence = entry.logits, entry.verdict, entry.sequence
    if logits is None or verdict is None or sequence.history is not None:
        return None
    rows = [0, *(node + 1 for node in verdict.path)][: entry.num_emitted]
    params = pack_params([sequence.params], logits.device, [0] * len(rows))
    return target_probs(logits[rows], params, [])


def derive_key(noise_key: int) -> int:
    """Return a key whose noise has nothing to do with what the text is drawn with."""
    return step_key(noise_key, 0, 1, Purpose.BONUS)
