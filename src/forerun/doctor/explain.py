"""Explains a trace: what its own figures teach, and what became of every drafted token.

All figures follow from the records alone. What a smaller K would have emitted is exact for chains:
a step that accepted n of K tokens would have accepted min(n, k) of k. Its time is estimated.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Literal

from forerun.doctor.readers.trace_totals import TraceTotals, read_totals
from forerun.errors import InvalidTrace
from forerun.terminal_text import printable, write_count
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.cost import CostLine
from forerun.theory.figures import Seconds, merge_seconds
from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import Item

Outcome = Literal["accepted", "rejected", "not reached"]
MOST_NAMED = 8
"""Requests that a message names of those in a trace."""
MIN_PASSES = 3
"""Least passes of one number of rows whose mean is used."""
MOST_NODES = 1.25
"""Most drafted tokens per depth: with more of them most drafts are trees, whose rows say less."""
BATCHES = (1, 2, 4, 8)
BAR_WIDTH = 24
LENIENT = Path(__file__).parent / "tables" / "lenient.jsonl"
"""Trace of a verifier that keeps a share of what it should reject, planted in forerun's engine."""
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuizQuestion:
    """A question on a section, whose answer its lines give; the figures are those of the trace."""

    text: str
    options: tuple[str, ...]
    answer: int

    @property
    def right(self) -> str:
        """The option that is the answer."""
        return self.options[self.answer]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What a trace teaches on one subject, in lines for a terminal."""

    heading: str
    lines: tuple[str, ...]
    question: QuizQuestion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Times of a trace's steps, at its most frequent batch and at other K.

    Attributes:
        rows: rows of all requests together of the passes that were measured, without prompts.
        line: times of passes by these rows, and of draft and rest of a step.
        cycle_s: mean time of a step that drafted.
        survival: shares of drafts accepted through each position that half of the steps drafted.
    """

    batch: int
    rows: tuple[int, ...]
    line: CostLine
    cycle_s: float
    survival: tuple[float, ...]

    @property
    def kappa(self) -> float:
        """Time of a step that drafted, in plain steps."""
        return self.cycle_s / self.line.plain_s

    def estimate_step(self, k: int, batch: int, draft: float = 1.0) -> tuple[float, float]:
        """Return the least and the most time of a step at K, with a draft of another cost.

        They differ beyond the measured rows, where a pass may take no longer or grow with its rows.
        """
        line, num_rows = self.line, batch * (k + 1)
        rest_s = line.plain_s - line.verify(self.batch).s
        if k:
            rest_s = k * draft * line.draft_s + line.overhead(k).s
        least, most = (line.verify(n).s for n in (min(num_rows, line.rows[-1]), num_rows))
        return least + rest_s, most + rest_s


def average_passes(totals: TraceTotals) -> dict[int, float]:
    """Return the mean time of the target's passes by their rows, where there are several."""
    passes: defaultdict[int, Seconds] = defaultdict(Seconds)
    for (size, rows, _), times in totals.far.items():
        passes[size * rows].include(times)
    return {
        rows: times.verify_s / times.num_cycles
        for rows, times in sorted(passes.items())
        if times.num_cycles >= MIN_PASSES
    }


def fit_costs(totals: TraceTotals) -> StepCosts | None:
    """Return the costs of steps; None without plain steps, or where most drafts are trees."""
    counts, drafting = totals.acceptance, totals.cycles.by_size("drafting")
    passes = average_passes(totals)
    depth = sum(depth * n for (depth, _), n in counts.steps.items())
    if not drafting or len(passes) < 2 or counts.num_drafted > MOST_NODES * depth:
        return None
    batch = max(drafting, key=lambda size: drafting[size].num_cycles)
    if not min(passes) <= batch < max(passes):
        return None
    times = merge_seconds(drafting.values())
    other_s, used = times.other_s / times.num_cycles, drafting[batch]
    measured = {1: passes[min(passes)]} | passes
    line = CostLine(
        rows=tuple(measured),
        verify_s=tuple(measured.values()),
        plain_s=1.0,
        draft_s=times.draft_s / times.num_cycles / (depth / counts.num_steps),
        overhead_s=(other_s,),
    )
    plain_s = totals.cycles.plain_step_s.get(batch, line.verify(batch).s + other_s)
    return StepCosts(
        batch=batch,
        rows=tuple(passes),
        line=replace(line, plain_s=plain_s),
        cycle_s=used.total_s / used.num_cycles,
        survival=find_survival(totals.acceptance),
    )


def find_survival(counts: AcceptanceCounts) -> tuple[float, ...]:
    """Return the shares accepted through each position that half of the steps drafted."""
    num_deep = sum(2 * n >= counts.num_steps for n in counts.drafted_per_position)
    return counts.survival[:num_deep]


def write_lessons(totals: TraceTotals) -> Iterator[Lesson]:
    """Yield what the steps teach; a section whose figures are not in the trace is left out."""
    counts, costs = totals.acceptance, fit_costs(totals)
    if not counts.num_drafted:
        return
    if costs is not None:
        yield _explain_passes(costs)
    yield _explain_positions(counts)
    if costs is not None:
        yield _explain_rejections(counts, costs)
        yield _explain_alternatives(counts, costs)
    yield _explain_calibration(totals)


def _explain_passes(costs: StepCosts) -> Lesson:
    one, most = costs.batch, costs.rows[-1]
    one_s, most_s = costs.line.verify(one).s, costs.line.verify(most).s
    lines = [f"{'rows':>6} {'ms':>8} {'of ' + str(one):>6}"]
    for n in costs.rows:
        seconds = costs.line.verify(n).s
        bar = "█" * max(1, round(BAR_WIDTH * seconds / most_s))
        lines.append(f"{n:>6} {1e3 * seconds:>8.2f} {seconds / one_s:>6.2f} {bar}")
    ratio = most_s / one_s
    lines += [
        "",
        f"A pass of {most} rows does {most / one:.3g} times the arithmetic of {one} and takes "
        f"{ratio:.2f} times as long. Every pass reads all weights of the target from memory; with "
        "few rows it waits for them, whatever the rows compute: decoding is memory-bound. A "
        "drafted token is one more row of a pass that reads the weights anyway.",
    ]
    if ratio > (1.0 + most / one) / 2:
        lines.append("Here rows are not free: the arithmetic, or a cache, limits this target.")
    wrong = most / one, (ratio + most / one) / 2
    return Lesson(
        heading="Why one pass checks several tokens",
        lines=tuple(lines),
        question=_ask(
            f"A pass of {write_count(one, 'row')} took {_ms(one_s)}. How long did one of {most} "
            "take?",
            _ms(most_s),
            [_ms(factor * one_s) for factor in wrong],
        ),
    )


def _explain_positions(counts: AcceptanceCounts) -> Lesson:
    tau, k = counts.acceptance_length or 1.0, len(find_survival(counts))
    lines = [f"{'position':>8} {'reached':>8} {'kept':>6} {'of all':>7}"]
    figures = zip(
        counts.reached_per_position, counts.conditional_acceptance, counts.survival, strict=True
    )
    for place, (reached, kept, survival) in enumerate(figures, start=1):
        bar = "█" * round(BAR_WIDTH * survival)
        lines.append(f"{place:>8} {reached:>8} {kept:>6.0%} {survival:>7.0%} {bar}")
    falls = [1.0 - kept for kept in counts.conditional_acceptance[:k]]
    cliff = falls.index(max(falls)) + 1
    lines += [
        "",
        f"A step emits {tau:.2f} tokens (tau): 1 of the target, and as many as the shares of all "
        f"add up to. A token counts only where all before it were kept. The cliff is at position "
        f"{cliff}: of the drafts that get there, {1.0 - max(falls):.0%} survive it. With a longer "
        f"draft {counts.survival[cliff - 1]:.0%} of the steps, or fewer, gain, and all pay for it.",
    ]
    product = list(accumulate(counts.conditional_acceptance, mul))[k - 1]
    return Lesson(
        heading="How far drafts are kept",
        lines=tuple(lines),
        question=_ask(
            f"Of the drafts, {counts.survival[0]:.0%} keep token 1. How many keep token {k}?",
            f"{product:.0%}",
            [f"{counts.survival[0]:.0%}", f"{counts.survival[0] / k:.0%}"],
        )
        if k > 1
        else None,
    )


def _explain_rejections(counts: AcceptanceCounts, costs: StepCosts) -> Lesson:
    k, kappa, steps = len(costs.survival), costs.kappa, counts.num_steps
    step_s, plain_s = costs.cycle_s, costs.line.plain_s
    few = {n: sum(c for (_, a), c in counts.steps.items() if a == n) for n in (0, 1)}
    lines = [
        f"{few[0] / steps:.0%} of the steps that drafted kept nothing, "
        f"{few[1] / steps:.0%} one token. A step that drafts takes {_ms(step_s)}, {kappa:.2f} "
        "plain steps (kappa), however many are kept. All rows are verified at once, but "
        "accepted in order: what stands behind the first rejection is thrown away.",
        f"Were every step to keep nothing, a token would take {_ms(step_s)} in place of "
        f"{_ms(plain_s)}: {1.0 / kappa:.2f} times the plain rate. With 1 token kept it is "
        f"{2.0 / kappa:.2f} times. This is the usual incident: K was raised, or the traffic or the "
        "target changed, 0 to 1 tokens are kept, latency rises, and the accelerator looks busy. "
        "Speedup is tau / kappa: below a tau of "
        f"{kappa:.2f} speculation slows this server down.",
    ]
    return Lesson(
        heading="What a draft that is not kept costs",
        lines=tuple(lines),
        question=_ask(
            f"Every draft at K = {k} is rejected at its first token. How fast is decoding?",
            f"{1.0 / kappa:.2f} times plain",
            ["1.00 times plain", f"{1.0 / (k + 1):.2f} times plain"],
        ),
    )


def _explain_alternatives(counts: AcceptanceCounts, costs: StepCosts) -> Lesson:
    table: dict[int, tuple[float, float, float]] = {}
    for k in range(len(costs.survival) + 1):
        tokens, step_s = 1.0 + sum(costs.survival[:k]), costs.estimate_step(k, costs.batch)[0]
        table[k] = tokens, step_s, step_s / tokens
    best = min(table, key=lambda k: table[k][2])
    exact = min((depth for depth, _ in counts.steps), default=0)
    how = "" if exact >= len(costs.survival) else f" up to K = {exact}, estimated beyond"
    lines = [f"Another K, all else equal (times are estimated; tokens are exact{how}):"]
    for k, (tokens, step_s, token_s) in table.items():
        mark = "  <- best" if k == best else ""
        each = f"{_ms(step_s)} per step, {_ms(token_s)} per token"
        lines.append(f"  K = {k}: {tokens:.2f} tokens per step, {each}{mark}")
    k = best or len(costs.survival)
    most = costs.rows[-1]
    lines.append(f"Another batch at K = {k}; passes of up to {most} rows were measured:")
    for batch in BATCHES:
        tokens, (low, high) = table[k][0], costs.estimate_step(k, batch)
        plain_low, plain_high = costs.estimate_step(0, batch)
        ends = sorted({f"{tokens * plain_low / high:.2f}", f"{tokens * plain_high / low:.2f}"})
        rows = f"{write_count(batch, 'request')}: {batch * (k + 1)} rows"
        lines.append(f"  {rows}, {' to '.join(ends)} times plain")
    plain_s, (tokens, step_s, _) = table[0][1], table[k]
    kept = counts.conditional_acceptance[:k]
    better = 1.0 + sum(accumulate((1.0 - (1.0 - share) / 2 for share in kept), mul))
    worse = 1.0 + sum(accumulate((share / 2 for share in kept), mul))
    half_s = costs.estimate_step(k, costs.batch, draft=0.5)[0]
    lines += [
        f"Another draft at K = {k}; this one gives {tokens * plain_s / step_s:.2f} times plain:",
        f"  half the cost: {tokens * plain_s / half_s:.2f}",
        f"  half as many rejections at every position: {better * plain_s / step_s:.2f}",
        f"  kept half as often at every position: {worse * plain_s / step_s:.2f}",
    ]
    others = [n for n in (len(costs.survival), 1, 0, 2) if n != best]
    return Lesson(
        heading="What would have happened otherwise",
        lines=tuple(lines),
        question=_ask(
            "With which K would this trace have been fastest (0: no drafts)?",
            f"K = {best}",
            [f"K = {n}" for n in others[:2]],
        ),
    )


def _explain_calibration(totals: TraceTotals) -> Lesson:
    other = read_totals(LENIENT)
    lines = [f"{'':>22} {'accepted':>9} {'expected':>9} {'tau':>6} {'z':>6}"]
    for name, each in (("this trace", totals), ("a lenient verifier", other)):
        accepted, expected = each.acceptance.num_accepted, each.expected_accepted
        tau = each.acceptance.acceptance_length or 1.0
        z = (accepted - expected) / math.sqrt(each.squares) if each.squares else 0.0
        lines.append(f"{name:>22} {accepted:>9} {expected:>9.1f} {tau:>6.2f} {z:>6.1f}")
    lines += [
        "",
        "An exact verifier keeps a token with a probability that p and q decide, so that the text "
        "has the target's own distribution; the trace sums these probabilities as expected. A "
        "verifier that keeps more than expected is faster and looks better on every dashboard, but "
        "its text is no longer the target's. The second row is a recorded trace of such a fault, "
        "planted. z is the difference in standard deviations; between -3 and 3 these steps show no "
        "fault, and a small one takes more steps to see. Steps at temperature 0 say little. "
        "To test a server without a trace: `forerun audit`.",
    ]
    right, mine = (
        f"{each.acceptance.num_accepted} accepted, {each.expected_accepted:.0f} expected"
        for each in (other, totals)
    )
    return Lesson(
        heading="Whether the text is still the target's",
        lines=tuple(lines),
        question=_ask(
            "Two runs. Which verifier changes the text?",
            right,
            [mine, "neither: a high acceptance is good"],
        ),
    )


def _ask(text: str, right: str, wrong: Sequence[str]) -> QuizQuestion | None:
    """Return a question, its options in the order of their texts; None if two are the same."""
    options = sorted({right, *wrong}, key=lambda option: (len(option), option))
    if len(options) <= len(wrong):
        return None
    return QuizQuestion(text=text, options=tuple(options), answer=options.index(right))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRequest:
    """Records of one request, and the first header of the trace."""

    request_id: str
    steps: tuple[StepRecord, ...]
    header: TraceHeader | None = None

    @property
    def drafting(self) -> tuple[StepRecord, ...]:
        return tuple(step for step in self.steps if step.num_drafted)


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
    header: TraceHeader | None = None
    steps: list[StepRecord] = []
    known: dict[str, None] = {}  # the first few, for the message
    for item in items:
        if isinstance(item, TraceHeader):
            header = header or item
        if not isinstance(item, StepRecord | RequestRecord):
            continue
        if len(known) < MOST_NAMED:
            known[printable(item.request_id, max_length=80)] = None
        request_id = request_id or item.request_id
        if item.request_id == request_id and isinstance(item, StepRecord):
            steps.append(item)
    if not steps:
        there = ", ".join(known) or "none"
        wanted = "any request" if request_id is None else f"request {request_id!r:.80}"
        raise InvalidTrace(f"the trace has no steps of {wanted}; there are: {there}")
    steps.sort(key=lambda step: (step.cycle_id, step.step))
    return ExplainedRequest(request_id=str(request_id), steps=tuple(steps), header=header)


def step_in_words(step: StepRecord, decode: Decode | None = None) -> list[str]:
    """Return what happened in one step, in order; `decode` makes text of the emitted tokens."""
    if not step.num_drafted:
        why = f" ({step.stop_reason})" if step.stop_reason else ""
        lines = [
            f"Nothing was drafted{why}: one target pass gave one token ({_ms(step.verify_s)})."
        ]
    else:
        lines = [
            f"1. {step.method} drafted {write_count(step.num_drafted, 'token')} of at most "
            f"{step.k_budget} in {_ms(step.draft_s)}.",
            f"2. One pass of the target scored {step.batch_rows} rows in {_ms(step.verify_s)}: the "
            f"last token of the text and the drafted ones"
            + (", and rows of other requests." if step.batch_rows > step.num_drafted + 1 else "."),
            f"3. Verification kept {step.num_accepted} of them, where {step.expected_accepted:.2f} "
            "were expected.",
        ]
        if step.depth_drafted == step.num_drafted:
            for place, outcome in enumerate(outcomes_of(step), start=1):
                why = "" if outcome == "not reached" else _why(step, place - 1, outcome)
                lines.append(
                    f"   token {place}: {outcome}{_token(step, place - 1, outcome, decode)}{why}"
                )
        elif step.path_ranks is not None and step.path_children is not None:
            lines += _path_in_words(step, step.path_ranks, step.path_children, decode)
    lines.append(_last_token(step, decode))
    emitted = write_count(step.num_emitted, "token")
    lines.append(f"   {emitted} emitted; the rest took {_ms(step.other_s)}.")
    return lines


def _path_in_words(
    step: StepRecord, ranks: tuple[int, ...], children: tuple[int, ...], decode: Decode | None
) -> list[str]:
    lines = []
    for depth, (rank, num) in enumerate(zip(ranks, children, strict=False), start=1):
        token = _token(step, depth - 1, "accepted", decode)
        lines.append(f"   depth {depth}: number {rank} of {num} siblings accepted{token}")
    if len(children) > len(ranks) and children[len(ranks)]:
        lines.append(f"   depth {len(ranks) + 1}: none of {children[len(ranks)]} siblings accepted")
    missed = step.num_drafted - sum(children)
    if missed:
        lines.append(f"   {missed} other nodes: not reached, because their context was rejected")
    return lines


def _token(step: StepRecord, place: int, outcome: Outcome, decode: Decode | None) -> str:
    ids = step.token_ids
    if outcome == "accepted" and ids is not None and place < len(ids) and decode is not None:
        return f" {printable(repr(decode(ids[place : place + 1])), max_length=60)}"
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


def _last_token(step: StepRecord, decode: Decode | None) -> str:
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
    ids = step.token_ids
    text = ""
    if ids and decode is not None and source != "accepted":
        text = f": {printable(repr(decode(ids[-1:])), max_length=60)}"
    return f"   {meanings.get(source, source)}{text}."


def in_words(
    found: ExplainedRequest, steps: Sequence[StepRecord], decode: Decode | None = None
) -> list[str]:
    """Return the explanation of a request, with these of its steps in detail."""
    num_tokens = sum(step.num_emitted for step in found.steps)
    lines = [
        f"Request {found.request_id}: {write_count(num_tokens, 'token')} in "
        f"{write_count(len(found.steps), 'step')}."
    ]
    if found.drafting:
        counts = AcceptanceCounts.from_records(found.drafting)
        lines.append(
            f"{write_count(counts.num_drafted, 'token')} drafted, {counts.num_accepted} kept; "
            f"{1 + counts.num_accepted / counts.num_steps:.3f} tokens per drafting step (tau)."
        )
    for step in steps:
        lines += ["", f"Step {step.step}, after {write_count(step.context_tokens, 'token')}:"]
        lines += [f"  {line}" for line in step_in_words(step, decode)]
    return lines


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
