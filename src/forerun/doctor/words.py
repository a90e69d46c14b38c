"""Describes a diagnosis: text for the terminal, and the HTML page with its charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from forerun.doctor.attribution import Attribution, Part, survival_of
from forerun.doctor.diagnosis import (
    CONCLUSIVE,
    NAMED,
    Change,
    Diagnosis,
    RankedCause,
    ScoredCause,
    family_score,
    list_basis,
)
from forerun.doctor.evidence import FACTS, Evidence, Fact, alike
from forerun.terminal_text import printable, write_count
from forerun.theory.speedup import constant_survival

MAX_EVIDENCE = 5
MAX_CHANGES = 4
MAX_NOTES = 8
MIN_GAIN = 1.02
"""A change with a smaller predicted gain over the present speed is not listed."""
DECISIVE = 3.0
"""Weight of an observation that names a cause alone."""
CLOSE = 0.5
"""Causes with more of the likeliest one's score than this are not told apart by it."""
LEAST_SHOWN = (0.02, 0.2)
"""Score from which on a cause is shown beside another one, and beside health."""
OF_FAMILY = {
    "cost": "A step with drafts costs too much. Which part of it does, the evidence does not show.",
    "alignment": "Too few draft tokens are accepted. Why is open: several causes fit alike.",
}
"""The verdict where several causes of one family fit alike."""
MAX_PARTS, MAX_PART = 3, 120
"""Parts of the input that were not understood: named at most, and characters of each."""
WATERFALL = "Time per token, in plain steps"
"""Heading of the section that a page shows as a chart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    heading: str
    lines: tuple[str, ...]


MIN_OFF_SHARE = 0.1
"""Share of plain steps from which on the verdict names it. Below, they are mostly the steps with
which a controller measures plain decoding, and the last step of each request."""


def headline(diagnosis: Diagnosis, *, states_speedup: bool = True) -> str:
    """Return the verdict in one sentence, and others on the text and on drafting switched off."""
    off = diagnosis.evidence.number("off_share") or 0.0
    verdict = f"{_verdict_words(diagnosis, states_speedup)} {diagnosis.remark}".rstrip()
    if off < MIN_OFF_SHARE:
        return verdict
    return f"{verdict} The controller planned plain decoding for {off:.0%} of the steps."


def _verdict_words(diagnosis: Diagnosis, states_speedup: bool) -> str:
    speedup = diagnosis.evidence.number("speedup") if states_speedup else None
    rate = "" if speedup is None else f" Decoding runs at {speedup:.2f}x the plain rate."
    if diagnosis.verdict == "inconclusive":
        return f"Inconclusive: {_open_words(diagnosis, states_speedup)}{rate}"
    changed = "".join(f" {printable(c[:1].upper() + c[1:])}." for c in diagnosis.evidence.changes)
    if diagnosis.verdict == "problem":
        return f"Problem: {_problem_words(diagnosis)}{changed}{rate}"
    figures = ", ".join(list_basis(diagnosis.evidence))
    known = "" if "speedup" in diagnosis.evidence else " as far as is known"
    rate = rate or " To know whether it pays, give the rate without drafts." * states_speedup
    return f"Healthy{known}: no fault in {figures}.{rate}"


def _open_words(diagnosis: Diagnosis, has_sections: bool) -> str:
    """Return why there is no verdict, and what would give one; a page shows no test below."""
    if diagnosis.evidence.conflicts:
        conflict = diagnosis.evidence.conflicts[0]
        return f"the evidence contradicts itself: {conflict}{'' if conflict[-1] == '?' else '.'}"
    unread = [part for reading in diagnosis.evidence.readings for part in reading.unread]
    if unread:
        parts = "; ".join(f'"{printable(part[:MAX_PART])}"' for part in unread[:MAX_PARTS])
        why = f"not understood: {parts}."
    elif doubts := diagnosis.evidence.doubts:
        why = f"it is unusual that {doubts[0]}."
    elif diagnosis.causes and diagnosis.causes[0].scored.cause.label != "healthy":
        first = diagnosis.causes[0].scored
        why = f"{first.cause.label} is likeliest, with a score of {first.score:.2f}, and not shown."
    else:
        why = "too little is known for a verdict."
    test = diagnosis.next_test
    if test is None:
        return why
    return f"{why} What would decide it: {test.name} ({'below' if has_sections else test.how})."


def _problem_words(diagnosis: Diagnosis) -> str:
    """Return what the cause is, or what is seen if no score is high enough to name a cause."""
    causes = [ranked.scored for ranked in diagnosis.causes]
    seen = next((name for name in CONCLUSIVE if diagnosis.evidence.flag(name)), "")
    # A cause that only what is seen speaks for says less than that.
    if causes and causes[0].score >= NAMED and not (seen and _repeats_observation(causes[0])):
        return causes[0].cause.what
    if causes and (not seen or family_score(causes) >= NAMED):
        return OF_FAMILY[causes[0].cause.family]
    why = CONCLUSIVE[seen].format(diagnosis.evidence.facts[seen].source)
    alike = [item.cause.label for item in causes if item.score > CLOSE * causes[0].score]
    return f"{why} Why is open{': ' * bool(alike)}{' or '.join(alike[:2])}."


def _repeats_observation(item: ScoredCause) -> bool:
    """Whether a cause rests on one observation alone, which does not decide for it."""
    first, *others = item.evidence_for
    return not others and first.weight < DECISIVE


def sections(diagnosis: Diagnosis) -> Iterator[Section]:
    """Return all sections after the headline, with unsafe terminal characters escaped."""
    for section in _raw_sections(diagnosis):
        yield Section(
            heading=printable(section.heading), lines=tuple(map(printable, section.lines))
        )


def _raw_sections(diagnosis: Diagnosis) -> Iterator[Section]:
    if changes := changes_of(diagnosis):
        yield Section(heading="What to change", lines=(change_line(changes[0]),))
    if diagnosis.next_test is not None and diagnosis.verdict != "healthy":
        test = diagnosis.next_test
        line = f"{test.how} (about {test.minutes:g} min)"
        yield Section(heading=f"Next test: {test.name}", lines=(line,))
    for number, ranked in enumerate(diagnosis.causes, start=1):
        scored = ranked.scored
        if number > 1 and scored.score < LEAST_SHOWN[diagnosis.verdict == "healthy"]:
            break
        heading = f"{number}. {scored.cause.label} (score {scored.score:.2f})"
        yield Section(heading=heading, lines=tuple(_cause_words(ranked)))
    if len(changes) > 1:
        lines = tuple(change_line(change) for change in changes[1:])
        yield Section(heading="Other changes", lines=lines)
    found = diagnosis.attribution
    if found is not None:
        yield Section(
            heading="What happens in a step", lines=tuple(_step_words(found, diagnosis.evidence))
        )
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


def _step_words(found: Attribution, evidence: Evidence) -> Iterator[str]:
    """Explain the roles of draft and target, with this run's figures."""
    k, tau = found.num_speculative_tokens, found.acceptance_length
    c = "" if found.draft_cost is None else f", each for {found.draft_cost:.3f} of a plain step"
    least, mean, most = _drafted_range(evidence, k)
    nodes = evidence.number("tree_nodes")
    if nodes is not None:
        deep = f"{k}" if least == most else f"{mean:.1f} on average, from {least} to {most}"
        yield f"The draft proposes trees of {nodes:.1f} nodes on average; their depth is {deep}{c}."
        yield f"Below, every step counts as one of K = {k}, the depth of most."
    elif least == most:
        order = ", one after the other" * (k > 1)
        yield f"The draft proposes {write_count(k, 'token')}{order}{c}."
    else:
        yield f"The draft proposes {mean:.1f} tokens on average, from {least} to {most}{c}."
        yield f"Below, every step counts as one of K = {k}."
    rows = f"{k + 1}" if nodes is None else f"{nodes + 1:.1f}"
    v = "" if found.verify_cost is None else f", for {found.verify_cost:.2f} plain steps"
    yield f"The target checks what was drafted in one pass over {rows} rows{v}."
    yield (
        f"The step keeps the tokens before the first rejection and adds one of the target's own: "
        f"tau = {tau:.2f} tokens per step, of at most {k + 1}."
    )
    if found.cycle_cost is None:
        cycle_s = evidence.number("cycle_s")
        known = "" if cycle_s is None else f"A step takes {1e3 * cycle_s:.3g} ms. "
        yield f"{known}What a step costs in plain steps is not known: give the rate without drafts."
        return
    gain = found.speedup or 0.0
    verb = "faster" if gain >= 1.0 else "slower"
    yield (
        f"A step with a draft costs kappa = {found.cycle_cost:.2f} plain steps, so such steps "
        f"decode at tau / kappa = {gain:.2f} times the plain rate: {abs(gain - 1.0):.0%} {verb}."
    )
    whole = evidence.number("speedup") or gain
    if not alike(whole, gain):
        yield f"With the steps that drafted nothing, decoding runs at {whole:.2f} times that rate."


def _interplay(found: Attribution, evidence: Evidence) -> Iterator[str]:
    """Explain why verification in one parallel pass does not guarantee a speedup."""
    k, tau = found.num_speculative_tokens, found.acceptance_length
    first, kept = evidence.number("alpha_1"), tau - 1.0
    drafted = _drafted_range(evidence, k)[1]
    share = "" if first is None else f" Position 1 is accepted in {first:.0%} of the steps;"
    if "tree_nodes" in evidence:
        yield (
            f"A tree holds several tokens for a position, of which one is kept at most: most "
            f"rows are unused by design.{share} of a depth of {drafted:.3g} {kept:.2f} are kept."
        )
    else:
        yield (
            f"Rows are verified in parallel, but accepted in order: tokens behind a rejection were "
            f"computed for nothing.{share} of {drafted:.3g} drafted {kept:.2f} are kept."
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


def _drafted_range(evidence: Evidence, k: int) -> tuple[int, float, int]:
    """Return the least, mean and most tokens that steps drafted; K each where only K is known."""
    drafted, mean = evidence.numbers("drafted_per_position"), evidence.number("mean_drafted")
    if not drafted or mean is None or not drafted[0]:
        return k, float(k), k
    return sum(count >= drafted[0] for count in drafted), mean, len(drafted)


MAX_POSITIONS = 4
MAX_POSITION_BARS = 8
"""Positions at which rejections are told apart: in the terminal and on the page."""


def _parts_shown(found: Attribution, most: int) -> list[Part]:
    """Return the parts of the time per token, with rejections at late positions as one."""
    late = [part for part in found.parts if part.kind == "rejection"][most:]
    if not late:
        return list(found.parts)
    name = f"rejected at positions {most + 1} to {most + len(late)}"
    together = Part(name=name, kind="rejection", cost=sum(part.cost for part in late))
    shown = [part for part in found.parts if part not in late]
    shown.insert(1 + most, together)
    return shown


def waterfall(found: Attribution) -> Iterator[str]:
    """List the parts of the time per token, late positions merged, and their sum."""
    for part in _parts_shown(found, MAX_POSITIONS):
        yield f"{part.cost:7.3f}  {part.name}"
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
    if ranked.next_test is not None and ranked.scored.cause.label != "healthy":
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
        at_k = "" if k is None else f", at K = {k}"
        gain = (
            f" Predicted: {speedup}{predicted.gain:.2f} times the present speed of steps with a "
            f"draft{at_k} ({predicted.basis})."
        )
    return f"{change.remedy.change}.{gain} Price: {change.remedy.price}."


def _evidence_words(evidence: Evidence) -> Iterator[str]:
    """List the sources that were read, and facts on which they disagree."""
    for reading in evidence.readings:
        kinds = ", ".join(sorted(reading.kinds)) or "nothing that is known"
        unknown = f", {reading.num_unknown} not understood" if reading.num_unknown else ""
        yield f"{reading.source}: {kinds}; {write_count(reading.num_lines, 'line')}{unknown}"
        yield from (f"{reading.source}: {note}" for note in reading.notes)
        yield from (f'{reading.source}: not understood: "{part}"' for part in reading.unread)
    yield from (
        f"{check.name}: {check.words}, p = {check.p_value:.2g}"
        for check in sorted(evidence.checks.values(), key=lambda check: check.p_value)[:MAX_NOTES]
    )
    for fact in evidence.supposed.values():
        if fact.name not in evidence and FACTS[fact.name].type == "flag":
            flag = "--observed {}" if fact.value is True else "--fact {}=no"
            yield f"{fact.doubt} If so, add {flag.format(fact.name)}."
    yield from (f"unusual: {doubt}" for doubt in evidence.doubts)
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


class Bar(NamedTuple):
    """One horizontal bar; start and length are shares of the width."""

    label: str
    value: str
    kind: str
    length: float
    start: float = 0.0


class Curve(NamedTuple):
    """A line through points given as shares of the chart's width and height."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]


class Chart(NamedTuple):
    """Bars, or curves between two ends of an axis."""

    title: str
    caption: str
    bars: Sequence[Bar] = ()
    curves: Sequence[Curve] = ()
    low: str = ""
    high: str = ""


MAX_BARS = 24


def _charts_of(diagnosis: Diagnosis) -> Iterator[Chart]:
    found, evidence = diagnosis.attribution, diagnosis.evidence
    if found is not None:
        yield _waterfall_bars(found)
    if tags := evidence.series.get("tag"):
        title, caption = "Acceptance by tag", "acceptance at position 1, and drafting steps"
        bars = [Bar(str(tag), f"{rate:.2f} of {n:.0f}", "tag", rate) for tag, rate, n in tags]
        yield Chart(title, caption, bars)
    if ks := evidence.series.get("K"):
        common = sorted(ks, key=lambda point: -point[1])[:MAX_BARS]
        counts = sorted((float(k), n) for k, n, _ in common)
        most = max(n for _, n in counts) or 1.0
        bars = [Bar(f"K = {k:g}", f"{n:.0f}", "k", n / most) for k, n in counts]
        yield Chart("K", "drafting steps by the K they were allowed", bars)
    if found is not None:
        yield _survival(found, evidence)
    if len(points := evidence.series.get("time", ())) > 1:
        times = [float(at) for at, _, _ in points]
        width = (times[-1] - times[0]) or 1.0
        line = tuple(((float(at) - times[0]) / width, value) for at, value, _ in points)
        title, caption = "Acceptance over time", "acceptance at position 1"
        curve = Curve("position 1", "measured", line)
        yield Chart(title, caption, (), (curve,), "start", f"{times[-1]:.0f} s")


def _waterfall_bars(found: Attribution) -> Chart:
    places, at = [], 0.0
    for part in _parts_shown(found, MAX_POSITION_BARS):
        places.append((part, min(at, at + part.cost), abs(part.cost)))
        at += part.cost
    width = max(start + length for _, start, length in places) or 1.0
    bars = [
        Bar(part.name, f"{part.cost:+.3f}", part.kind, length / width, start / width)
        for part, start, length in places
    ]
    bars.append(Bar("together", f"{at:.3f}", "total", at / width))
    caption = "plain decode steps per emitted token, from the ideal to what is paid"
    return Chart("Time per token", caption, bars)


def _survival(found: Attribution, evidence: Evidence) -> Chart:
    """Return the chart of measured survival by position beside constant acceptance of equal tau."""
    k = found.num_speculative_tokens
    rates = evidence.numbers("acceptance_rate_per_position")[:k]
    measured = rates or survival_of(evidence, k, found.acceptance_length)
    curves = [Curve("accepted through it", "measured", _spread(measured))]
    if (alpha := evidence.number("alpha")) is not None:
        fit = constant_survival(alpha, k)
        curves.append(Curve(f"constant {alpha:.2f}", "fit", _spread(fit)))
    caption = "share of drafts accepted through each position, and the geometric fit"
    title = "Survival by position"
    return Chart(title, caption, (), curves, "position 1", f"position {k}")


def _spread(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
    last = max(1, len(values) - 1)
    return tuple((index / last, value) for index, value in enumerate(values))


FIRST = ("What to change",)
AFTER = ("Other changes", "What happens in a step", "Why", "If one thing were ideal", "Evidence")
"""Sections after the charts; the waterfall is a chart."""
COLOURS = {
    "ideal": "ideal",
    "rejection": "rejected tokens",
    "draft": "drafting",
    "verify": "target pass",
    "overhead": "everything else in a step",
    "unsplit": "drafting, pass and overhead together",
    "total": "sum",
}
"""Legend of the waterfall's colours."""
TEMPLATE = Path(__file__).with_name("page.html.j2")


def _safe(value: object) -> object:
    """Escape characters that reorder text or control a terminal the page is printed to."""
    return printable(value, keep="\n") if type(value) is str else value


def page_of(diagnosis: Diagnosis) -> str:
    """Render the report page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_safe
    )
    every = list(sections(diagnosis))
    facts = [
        (fact.name, figure_words(fact), fact.definition)
        for fact in sorted(diagnosis.evidence, key=lambda fact: fact.name)
    ]
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        headline=headline(diagnosis),
        verdict=diagnosis.verdict,
        changes=[s for s in every if s.heading in FIRST or s.heading.startswith("Next test")],
        causes=[s for s in every if s.heading[0].isdigit()],
        sections=[s for s in every if s.heading in AFTER],
        charts=list(_charts_of(diagnosis)),
        colours=COLOURS,
        facts=facts,
    )
