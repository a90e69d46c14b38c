"""Describes a diagnosis in text: paragraphs and lists for the terminal and the HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forerun.diagnose.attribution import Attribution
from forerun.diagnose.diagnosis import Change, Diagnosis, RankedCause
from forerun.diagnose.evidence import FACTS, Evidence, Fact
from forerun.terminal_text import printable

MAX_EVIDENCE = 5
MAX_CHANGES = 4
MAX_NOTES = 8
MIN_GAIN = 1.02
"""A change with a smaller predicted gain over the present speed is not listed."""
NAMED = 0.5
"""Score from which on the verdict names one cause: benchmarks/real-cases says how often the first
cause of held-out complaints is right above and below."""
CLOSE = 0.5
"""Causes with more of the likeliest one's score than this are not told apart by it."""
OF_FAMILY = {
    "cost": "A step with drafts costs too much. Which part of it does, the evidence does not show.",
    "alignment": "Too few draft tokens are accepted. Why is open: several causes fit alike.",
}
"""The verdict where several causes of one family fit alike."""
WATERFALL = "Time per token, in plain steps"
"""Heading of the section that a page shows as a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading and lines under it."""

    heading: str
    lines: tuple[str, ...]


MIN_OFF_SHARE = 0.1
"""Share of plain steps from which on the verdict names it. Below, they are mostly the steps with
which a controller measures plain decoding, and the last step of each request."""


def headline(diagnosis: Diagnosis, *, states_speedup: bool = True) -> str:
    """Return the verdict in one sentence, and one more if a controller switched drafting off."""
    off = diagnosis.evidence.number("off_share") or 0.0
    verdict = _verdict_words(diagnosis, states_speedup)
    if off < MIN_OFF_SHARE:
        return verdict
    return f"{verdict} The controller planned plain decoding for {off:.0%} of the steps."


def _verdict_words(diagnosis: Diagnosis, states_speedup: bool) -> str:
    """Return the verdict in one sentence."""
    speedup = diagnosis.evidence.number("speedup")
    is_stated = states_speedup and speedup is not None
    rate = f" Decoding runs at {speedup:.2f}x the plain rate." if is_stated else ""
    if diagnosis.verdict == "insufficient evidence":
        return f"Insufficient evidence.{rate} What is known supports no cause clearly."
    if diagnosis.verdict == "healthy":
        if speedup is None:
            return "Healthy as far as is known. Whether it pays takes the rate without speculation."
        return f"Healthy.{rate} Nothing that was measured is wrong."
    return f"Problem: {_problem_words(diagnosis)}{rate}"


def _problem_words(diagnosis: Diagnosis) -> str:
    """Return what the cause is, or which causes it may be if no score is high enough to say."""
    likeliest, *others = [ranked.scored for ranked in diagnosis.causes]
    if likeliest.score >= NAMED:
        return likeliest.cause.what
    alike = [likeliest, *(item for item in others if item.score > CLOSE * likeliest.score)]
    family = likeliest.cause.family
    if len(alike) > 1 and family in OF_FAMILY and all(i.cause.family == family for i in alike):
        return OF_FAMILY[family]
    names = " or ".join(item.cause.label for item in alike[:2])
    return f"The evidence does not tell its causes apart. {names} fits best."


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Return all sections after the headline, with unsafe terminal characters escaped."""
    for section in _raw_sections(diagnosis):
        yield Section(
            heading=printable(section.heading), lines=tuple(map(printable, section.lines))
        )


def _raw_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Return the sections before unsafe terminal characters are escaped."""
    if changes := changes_of(diagnosis):
        yield Section(heading="What to change", lines=(change_line(changes[0]),))
    if diagnosis.next_test is not None and diagnosis.verdict != "healthy":
        test = diagnosis.next_test
        line = f"{test.how} (about {test.minutes:g} min)"
        yield Section(heading=f"Next test: {test.name}", lines=(line,))
    for number, ranked in enumerate(diagnosis.causes, start=1):
        scored = ranked.scored
        heading = f"{number}. {scored.cause.label} (score {scored.score:.2f})"
        yield Section(heading=heading, lines=tuple(_cause_words(ranked)))
    if len(changes) > 1:
        lines = tuple(change_line(change) for change in changes[1:])
        yield Section(heading="Other changes", lines=lines)
    found = diagnosis.attribution
    if found is not None:
        yield Section(heading="What happens in a step", lines=tuple(_step_words(found)))
        yield Section(heading="Why", lines=tuple(_interplay(found, diagnosis.evidence)))
        yield Section(heading=WATERFALL, lines=tuple(waterfall(found)))
        if found.counterfactuals:
            yield Section(heading="If one thing were ideal", lines=tuple(what_if(found)))
    elif diagnosis.evidence.facts:
        yield Section(
            heading="What happens in a step",
            lines=("tau or K is not known, so the time per token cannot be split.",),
        )
    yield Section(heading="Evidence", lines=tuple(_evidence_words(diagnosis.evidence)))


def _step_words(found: Attribution) -> Iterator[str]:
    """Explain the roles of draft and target, with this run's figures."""
    k, tau = found.num_speculative_tokens, found.acceptance_length
    c = "" if found.draft_cost is None else f", each for {found.draft_cost:.3f} of a plain step"
    yield f"The draft proposes {k} tokens, one after the other{c}."
    v = "" if found.verify_cost is None else f", for {found.verify_cost:.2f} plain steps"
    yield f"The target checks all of them in one pass over {k + 1} rows{v}."
    yield (
        f"The step keeps the tokens before the first rejection and adds one of the target's own: "
        f"tau = {tau:.2f} tokens per step, of at most {k + 1}."
    )
    if found.cycle_cost is None:
        yield "What a step costs in plain steps is not known: give the rate without speculation."
        return
    gain = found.speedup or 0.0
    verb = "faster" if gain >= 1.0 else "slower"
    yield (
        f"A step costs kappa = {found.cycle_cost:.2f} plain steps, so decoding runs at "
        f"tau / kappa = {gain:.2f} times the plain rate: {abs(gain - 1.0):.0%} {verb}."
    )


def _interplay(found: Attribution, evidence: Evidence) -> Iterator[str]:
    """Explain why verification in one parallel pass does not guarantee a speedup."""
    k, tau = found.num_speculative_tokens, found.acceptance_length
    first, kept = evidence.number("alpha_1"), tau - 1.0
    share = "" if first is None else f" Position 1 is accepted in {first:.0%} of the steps;"
    yield (
        f"Rows are verified in parallel, but accepted in order: behind a rejection, every row was "
        f"computed for nothing.{share} of {k} drafted tokens {kept:.2f} are kept."
    )
    if found.cycle_cost is None:
        return
    if tau < found.cycle_cost:
        yield (
            f"A step yields less ({tau:.2f} tokens) than it costs ({found.cycle_cost:.2f} plain "
            "steps). However parallel the pass, tokens come from consecutive acceptance only."
        )
    at_best = (k + 1) / found.cycle_cost
    yield f"With everything accepted, this cost would give {at_best:.2f}x: no draft can do more."
    if found.prefill_share is not None and found.prefill_share > 0.1:
        yield f"{found.prefill_share:.0%} of the time reads prompts, which speculation cannot help."


MAX_POSITIONS = 4


def waterfall(found: Attribution) -> Iterator[str]:
    """List the parts of the time per token, late positions merged, and their sum."""
    rejections = [part for part in found.parts if part.kind == "rejection"]
    late = rejections[MAX_POSITIONS:]
    for part in found.parts:
        if part not in late:
            yield f"{part.cost:7.3f}  {part.name}"
        elif part is late[0]:
            yield f"{sum(p.cost for p in late):7.3f}  rejected at later positions"
    what = "kappa / tau" if found.cycle_cost is not None else "1 / tau, costs not included"
    yield f"{found.step_cost_per_token:7.3f}  together: {what}"


def what_if(found: Attribution) -> Iterator[str]:
    """List the speedups that would result if one part of the cost were ideal."""
    for other in found.counterfactuals:
        yield f"{other.speedup:5.2f}x  if {other.name}"


def _cause_words(ranked: RankedCause) -> Iterator[str]:
    yield ranked.scored.cause.what
    yield ranked.scored.cause.why
    for finding in ranked.scored.evidence_for[:MAX_EVIDENCE]:
        yield f"for ({finding.weight:+.1f}): {finding.words}"
    for finding in ranked.scored.evidence_against[:MAX_EVIDENCE]:
        yield f"against ({finding.weight:+.1f}): {finding.words}"
    if ranked.next_test is not None:
        yield f"to confirm or clear it: {ranked.next_test.how}"


def changes_of(diagnosis: Diagnosis) -> list[Change]:
    """Return the remedies that help, in order of the causes; of equal ones only the first."""
    found: dict[object, Change] = {}
    for ranked in diagnosis.causes if diagnosis.verdict == "problem" else ():
        for change in ranked.changes:
            predicted, effect = change.prediction, change.remedy.effect
            if predicted is None or predicted.gain >= MIN_GAIN:
                key = effect if effect in ("best_k", "off") else change.remedy.change
                found.setdefault(key, change)
    return list(found.values())[:MAX_CHANGES]


def change_line(change: Change, *, states_speedup: bool = True) -> str:
    """Describe a remedy with its predicted gain, if speed can be predicted, and its price."""
    predicted, gain = change.prediction, ""
    if predicted is not None:
        k = predicted.num_speculative_tokens
        speedup = f"{predicted.speedup:.2f}x plain decoding, " if states_speedup else ""
        gain = (
            f" Predicted: {speedup}{predicted.gain:.2f} times the "
            f"present speed{'' if k is None else f', at K = {k}'} ({predicted.basis})."
        )
    return f"{change.remedy.change}.{gain} Price: {change.remedy.price}."


def _evidence_words(evidence: Evidence) -> Iterator[str]:
    """List the sources that were read, and facts on which they disagree."""
    for reading in evidence.readings:
        kinds = ", ".join(sorted(reading.kinds)) or "nothing that is known"
        unknown = f", {reading.num_unknown} not understood" if reading.num_unknown else ""
        yield f"{reading.source}: {kinds}; {reading.num_lines} lines{unknown}"
        yield from (f"{reading.source}: {note}" for note in reading.notes)
    yield from evidence.notes[:MAX_NOTES]
    for fact in evidence.disagreements:
        known = evidence.facts[fact.name]
        yield f"{fact.name}: {figure_words(known)} was used, {figure_words(fact)} was not"


def figure_words(fact: Fact) -> str:
    """Describe a value with its interval and source."""
    value = fact.value
    if isinstance(value, bool):
        text = "yes" if value else "no"
    elif isinstance(value, float | int):
        text = f"{value:.4g}"
        if fact.interval is not None:
            text += f" ({fact.interval.low:.3g} to {fact.interval.high:.3g})"
        text += f" {FACTS[fact.name].unit}" if FACTS[fact.name].unit else ""
    elif isinstance(value, str):
        text = value
    else:
        text = ", ".join(v if isinstance(v, str) else f"{v:.3g}" for v in value)
    return f"{text} [{fact.source}]"
