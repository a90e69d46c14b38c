"""Describes a diagnosis: text for the terminal, and the HTML page with its charts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from forerun.diagnose.attribution import Attribution, Part, survival_of
from forerun.diagnose.diagnosis import Change, Diagnosis, RankedCause
from forerun.diagnose.evidence import FACTS, Evidence, Fact
from forerun.terminal_text import printable
from forerun.theory.speedup import constant_survival

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a bar chart."""

    label: str
    value: str
    start: float
    length: float
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """Horizontal bars under a title."""

    title: str
    caption: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line through points given as fractions of the chart's width and height."""

    name: str
    kind: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Lines under a title; the vertical axis goes from 0 to 1."""

    title: str
    caption: str
    curves: tuple[Curve, ...]
    low: str
    high: str


def _charts_of(diagnosis: Diagnosis) -> tuple[tuple[Bars, ...], tuple[Curves, ...]]:
    found, series = diagnosis.attribution, diagnosis.evidence.series
    bars, curves = [], []
    if found is not None:
        bars.append(_waterfall_bars(found))
        curves.append(survival(found, diagnosis.evidence))
    if len(series.get("time", ())) > 1:
        curves.append(over_time(diagnosis.evidence))
    if series.get("tag"):
        bars.append(by_tag(diagnosis.evidence))
    if series.get("K"):
        bars.append(_k_histogram(diagnosis.evidence))
    return tuple(bars), tuple(curves)


def _waterfall_bars(found: Attribution) -> Bars:
    """Return the waterfall chart from the ideal time per token to the actual one."""
    places, at = [], 0.0
    for part in _parts_shown(found):
        places.append((part, min(at, at + part.cost), abs(part.cost)))
        at += part.cost
    width = max(start + length for _, start, length in places) or 1.0
    bars = [
        Bar(
            label=part.name,
            value=f"{part.cost:+.3f}",
            start=start / width,
            length=length / width,
            kind=part.kind,
        )
        for part, start, length in places
    ]
    bars.append(Bar(label="together", value=f"{at:.3f}", start=0, length=at / width, kind="total"))
    return Bars(
        title="Time per token",
        caption="plain decode steps per emitted token, from the ideal to what is paid",
        bars=tuple(bars),
    )


MAX_POSITION_BARS = 8
"""Positions of the waterfall with a bar of their own."""
MAX_BARS = 24


def _parts_shown(found: Attribution) -> list[Part]:
    """Return the bars of the waterfall, with the rejections at late positions merged."""
    rejections = [part for part in found.parts if part.kind == "rejection"]
    late = rejections[MAX_POSITION_BARS:]
    if not late:
        return list(found.parts)
    name = f"rejected at positions {MAX_POSITION_BARS + 1} to {len(rejections)}"
    together = Part(name=name, kind="rejection", cost=sum(part.cost for part in late))
    shown = [part for part in found.parts if part not in late]
    shown.insert(1 + MAX_POSITION_BARS, together)
    return shown


def survival(found: Attribution, evidence: Evidence) -> Curves:
    """Return the chart of measured survival by position beside constant acceptance of equal tau."""
    k = found.num_speculative_tokens
    rates = evidence.numbers("acceptance_rate_per_position")[:k]
    measured = rates or survival_of(evidence, k, found.acceptance_length)
    curves = [Curve(name="accepted through it", kind="measured", points=spread(measured))]
    if (alpha := evidence.number("alpha")) is not None:
        fit = constant_survival(alpha, k)
        curves.append(Curve(name=f"constant {alpha:.2f}", kind="fit", points=spread(fit)))
    return Curves(
        title="Survival by position",
        caption="share of drafts accepted through each position, and the geometric fit",
        curves=tuple(curves),
        low="position 1",
        high=f"position {k}",
    )


def over_time(evidence: Evidence) -> Curves:
    """Return the chart of acceptance at position 1 over time."""
    points = evidence.series["time"]
    times = [float(at) for at, _, _ in points]
    width = (times[-1] - times[0]) or 1.0
    line = tuple(
        ((t - times[0]) / width, value) for t, (_, value, _) in zip(times, points, strict=True)
    )
    return Curves(
        title="Acceptance over time",
        caption="acceptance at position 1",
        curves=(Curve(name="position 1", kind="measured", points=line),),
        low="start",
        high=f"{times[-1]:.0f} s",
    )


def by_tag(evidence: Evidence) -> Bars:
    return Bars(
        title="Acceptance by tag",
        caption="acceptance at position 1, and drafting steps",
        bars=tuple(
            Bar(label=str(tag), value=f"{rate:.2f} of {n:.0f}", start=0, length=rate, kind="tag")
            for tag, rate, n in evidence.series["tag"]
        ),
    )


def _k_histogram(evidence: Evidence) -> Bars:
    common = sorted(evidence.series["K"], key=lambda point: -point[1])[:MAX_BARS]
    counts = sorted((float(k), n) for k, n, _ in common)
    most = max(n for _, n in counts) or 1.0
    return Bars(
        title="K",
        caption="drafting steps by the K they were allowed",
        bars=tuple(
            Bar(label=f"K = {k:g}", value=f"{n:.0f}", start=0, length=n / most, kind="k")
            for k, n in counts
        ),
    )


def spread(values: Sequence[float]) -> tuple[tuple[float, float], ...]:
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
"""What the colours of the waterfall mean."""
TEMPLATE = Path(__file__).with_name("page.html.j2")


def _safe(value: object) -> object:
    """Escape characters that reorder text or control a terminal the page is printed to."""
    return printable(value, keep="\n") if type(value) is str else value


def page_of(diagnosis: Diagnosis) -> str:
    """Render the report page as HTML."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, finalize=_safe
    )
    bars, curves = _charts_of(diagnosis)
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
        bars=bars,
        curves=curves,
        colours=COLOURS,
        facts=facts,
    )
