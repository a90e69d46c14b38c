"""Explains a request of a trace: its cycles, what became of every drafted token, the best K.

All figures follow from the records alone. What a smaller K would have emitted is exact for chains:
a step that accepted n of K tokens would have accepted min(n, k) of k. Its time is estimated.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median
from typing import Literal

from forerun.errors import InvalidTrace
from forerun.terminal_text import printable
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import Item

Outcome = Literal["accepted", "rejected", "not reached"]
MOST_NAMED = 8
"""Requests that a message names of those in a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HindsightK:
    """Estimated tokens and seconds per step of a request with another fixed K.

    Attributes:
        num_speculative_tokens: that K; 0 is plain decoding.
        tokens_per_step: computed from the counts of accepted tokens.
        step_s: sum of the drafting time, in proportion to K, the median time of passes with as many
            rows (of all passes if there are none), and the mean time of the rest.
    """

    num_speculative_tokens: int
    tokens_per_step: float
    step_s: float

    @property
    def s_per_token(self) -> float:
        return self.step_s / self.tokens_per_step


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRequest:
    """Records of one request, with the figures that follow from them."""

    request_id: str
    request: RequestRecord | None
    steps: tuple[StepRecord, ...]

    @property
    def drafting(self) -> tuple[StepRecord, ...]:
        return tuple(step for step in self.steps if step.num_drafted)

    @property
    def counts(self) -> AcceptanceCounts:
        return AcceptanceCounts.from_records(self.drafting)

    @property
    def shares(self) -> dict[str, float]:
        """Seconds of drafting that was accepted and that was not, of passes, and of the rest."""
        rejected_s = sum(
            step.draft_s * (1.0 - step.num_accepted / step.num_drafted) for step in self.drafting
        )
        return {
            "drafting tokens that were accepted": sum(s.draft_s for s in self.steps) - rejected_s,
            "drafting tokens that were not": rejected_s,
            "target passes": sum(step.verify_s for step in self.steps),
            "everything else in a step": sum(step.other_s for step in self.steps),
        }

    @property
    def least_drafted(self) -> int:
        """Fewest tokens that a drafting step drafted; up to this K `hindsight` is exact."""
        return min((step.num_drafted for step in self.drafting), default=0)

    def hindsight(self) -> list[HindsightK]:
        """Return the estimates for every fixed K that half of the steps drafted; none for trees.

        Tokens per step are exact up to `least_drafted`. Beyond it they are estimated from the steps
        that drafted as many tokens.
        """
        steps = self.drafting
        if not steps or any(step.depth_drafted != step.num_drafted for step in steps):
            return []
        rows: dict[int, list[float]] = defaultdict(list)
        for step in self.steps:
            rows[step.batch_rows].append(step.verify_s)
        others = median(step.batch_rows - step.num_drafted - 1 for step in steps)
        every_s = median(step.verify_s for step in steps)
        per_token_s = sum(s.draft_s for s in steps) / sum(s.num_drafted for s in steps)
        other_s = sum(step.other_s for step in steps) / len(steps)
        counts, found = self.counts, []
        most = sum(2 * n >= len(steps) for n in counts.drafted_per_position)
        for k, tokens in enumerate(accumulate(counts.survival[:most], initial=1.0)):
            passes = rows.get(int(others) + k + 1)
            found.append(
                HindsightK(
                    num_speculative_tokens=k,
                    tokens_per_step=tokens,
                    step_s=per_token_s * k + (median(passes) if passes else every_s) + other_s,
                )
            )
        return found


def outcomes_of(step: StepRecord) -> list[Outcome]:
    """Return whether each drafted token of a chain was accepted, rejected or not reached."""
    found: list[Outcome] = []
    for place in range(step.num_drafted):
        if place < step.num_accepted:
            found.append("accepted")
        else:
            found.append("rejected" if place == step.num_accepted else "not reached")
    return found


def explain_request(items: Iterable[Item], request_id: str | None = None) -> ExplainedRequest:
    """Collect the records of one request, by default the first of the trace.

    Raises:
        InvalidTrace: the trace has no step, or no such request.
    """
    steps: list[StepRecord] = []
    known: dict[str, None] = {}  # the first few, for the message
    request: RequestRecord | None = None
    for item in items:
        if not isinstance(item, StepRecord | RequestRecord):
            continue
        if len(known) < MOST_NAMED:
            known[printable(item.request_id, max_length=80)] = None
        request_id = request_id or item.request_id
        if item.request_id == request_id:
            if isinstance(item, StepRecord):
                steps.append(item)
            else:
                request = item
    if not steps:
        there = ", ".join(known) or "none"
        wanted = "any request" if request_id is None else f"request {request_id!r:.80}"
        raise InvalidTrace(f"the trace has no steps of {wanted}; there are: {there}")
    steps.sort(key=lambda step: (step.cycle_id, step.step))
    return ExplainedRequest(request_id=str(request_id), request=request, steps=tuple(steps))


def step_in_words(step: StepRecord) -> list[str]:
    """Return what happened in one step, in order."""
    if not step.num_drafted:
        why = f" ({step.stop_reason})" if step.stop_reason else ""
        lines = [
            f"Nothing was drafted{why}: one target pass gave one token ({_ms(step.verify_s)})."
        ]
    else:
        lines = [
            f"1. {step.method} drafted {_tokens(step.num_drafted)} of at most {step.k_budget} "
            f"in {_ms(step.draft_s)}.",
            f"2. One pass of the target scored {step.batch_rows} rows in {_ms(step.verify_s)}: the "
            f"last token of the text and the drafted ones"
            + (", and rows of other requests." if step.batch_rows > step.num_drafted + 1 else "."),
            f"3. Verification kept {step.num_accepted} of them, where {step.expected_accepted:.2f} "
            "were expected.",
        ]
        if step.depth_drafted == step.num_drafted:
            for place, outcome in enumerate(outcomes_of(step), start=1):
                why = "" if outcome == "not reached" else _why(step, place - 1, outcome)
                lines.append(f"   token {place}: {outcome}{_token(step, place - 1, outcome)}{why}")
        elif step.path_ranks is not None and step.path_children is not None:
            lines += _path_in_words(step, step.path_ranks, step.path_children)
    lines.append(_last_token(step))
    lines.append(f"   {_tokens(step.num_emitted)} emitted; the rest took {_ms(step.other_s)}.")
    return lines


def _path_in_words(
    step: StepRecord, ranks: tuple[int, ...], children: tuple[int, ...]
) -> list[str]:
    lines = []
    for depth, (rank, num) in enumerate(zip(ranks, children, strict=False), start=1):
        token = _token(step, depth - 1, "accepted")
        lines.append(f"   depth {depth}: number {rank} of {num} siblings accepted{token}")
    if len(children) > len(ranks) and children[len(ranks)]:
        lines.append(f"   depth {len(ranks) + 1}: none of {children[len(ranks)]} siblings accepted")
    missed = step.num_drafted - sum(children)
    if missed:
        lines.append(f"   {missed} other nodes: not reached, because their context was rejected")
    return lines


def _token(step: StepRecord, place: int, outcome: Outcome) -> str:
    ids = step.token_ids
    if outcome == "accepted" and ids is not None and place < len(ids):
        return f" (id {ids[place]})"
    if outcome == "not reached":
        return ", because its context was rejected"
    return ""


def prefix_ratios(step: StepRecord) -> list[float]:
    """Return the prefix ratio of block verification at every token: min(1, previous ratio * p / q).

    Source: 2403.10444, algorithm 2.
    """
    found, ratio = [], 1.0
    for p, q in zip(step.target_probs or (), step.draft_probs or (), strict=True):
        ratio = min(1.0, ratio * p / q) if q else 0.0
        found.append(ratio)
    return found


def _why(step: StepRecord, place: int, outcome: Outcome) -> str:
    """Return the probabilities of a token that verification reached, and what decided."""
    if step.target_probs is None:
        return ""
    p, is_kept = step.target_probs[place], outcome == "accepted"
    if step.draft_probs is None or step.rule == "walk":
        what = "most likely token" if step.rule == "greedy" else "own draw"
        return f"; p {p:.3f}: the target's {what} is {'this' if is_kept else 'another'} one"
    q = step.draft_probs[place]
    both = f"; p {p:.3f}, q {q:.3f}"
    if step.rule == "token":
        ratio = min(1.0, p / q) if q else 0.0
        return f"{both}: kept with probability min(1, p/q) = {ratio:.3f}"
    if step.rule == "block":
        return f"{both}: the prefix up to here has ratio {prefix_ratios(step)[place]:.3f}"
    return both


def _last_token(step: StepRecord) -> str:
    meanings = {
        "recovered": "the last token is recovered: the target's own, in place of the rejected one, "
        "from the same pass",
        "bonus": "the last token is a bonus: all drafted tokens were kept, and the same pass also "
        "gives the token behind them",
        "plain": "the token is the target's own",
        "accepted": "a stop cut the text at an accepted token",
    }
    # Older traces call the token of a step without a draft a bonus.
    source = step.last_token_source if step.num_drafted else "plain"
    return f"   {meanings.get(source, source)}."


def bottleneck_of(found: ExplainedRequest) -> str:
    """Return a sentence on the largest part of the time, with the change that would reduce it."""
    shares = found.shares
    total_s = sum(shares.values()) or 1.0
    name = max(shares, key=lambda part: shares[part])
    advice = {
        "drafting tokens that were accepted": "A cheaper draft would help most",
        "drafting tokens that were not": "A smaller K would help most",
        "target passes": "More accepted tokens per pass would help most",
        "everything else in a step": "Less work between the passes would help most",
    }
    return f"{name}: {shares[name] / total_s:.0%} of {total_s:.3f} s. {advice[name]}."


def in_words(found: ExplainedRequest, steps: Sequence[StepRecord]) -> list[str]:
    """Return the explanation of a request, with these of its steps in detail."""
    num_tokens = sum(step.num_emitted for step in found.steps)
    lines = [f"Request {found.request_id}: {_tokens(num_tokens)} in {len(found.steps)} steps."]
    if found.drafting:
        counts = found.counts
        lines.append(
            f"{counts.num_drafted} tokens drafted, {counts.num_accepted} kept; "
            f"{1 + counts.num_accepted / counts.num_steps:.3f} tokens per drafting step (tau)."
        )
    lines.append(f"Most time goes to {bottleneck_of(found)}")
    for step in steps:
        lines += ["", f"Step {step.step}, after {step.context_tokens} tokens:"]
        lines += [f"  {line}" for line in step_in_words(step)]
    if each := found.hindsight():
        best = min(each, key=lambda item: item.s_per_token)
        exact = found.least_drafted
        how = "" if exact >= len(each) - 1 else f" up to K = {exact}, estimated beyond"
        lines += ["", f"With another fixed K (times are estimated; tokens are exact{how}):"]
        for item in each:
            mark = "  <- best" if item is best else ""
            lines.append(
                f"  K = {item.num_speculative_tokens}: {item.tokens_per_step:.2f} tokens per step, "
                f"{_ms(item.step_s)} per step, {_ms(item.s_per_token)} per token{mark}"
            )
    return lines


def _tokens(number: int) -> str:
    return "1 token" if number == 1 else f"{number} tokens"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
