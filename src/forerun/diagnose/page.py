"""Renders a diagnosis as one HTML page without scripts and external files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from forerun.diagnose.attribution import Attribution, Part, survival_of
from forerun.diagnose.diagnosis import Diagnosis
from forerun.diagnose.evidence import Evidence
from forerun.diagnose.words import figure_words, headline, sections
from forerun.terminal_text import printable
from forerun.theory.speedup import constant_survival


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
        bars.append(waterfall(found))
        curves.append(survival(found, diagnosis.evidence))
    if len(series.get("time", ())) > 1:
        curves.append(over_time(diagnosis.evidence))
    if series.get("tag"):
        bars.append(by_tag(diagnosis.evidence))
    if series.get("K"):
        bars.append(_k_histogram(diagnosis.evidence))
    return tuple(bars), tuple(curves)


def waterfall(found: Attribution) -> Bars:
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


MAX_POSITIONS = 8
"""Positions of the waterfall with a bar of their own."""
MAX_BARS = 24


def _parts_shown(found: Attribution) -> list[Part]:
    """Return the bars of the waterfall, with the rejections at late positions merged."""
    rejections = [part for part in found.parts if part.kind == "rejection"]
    late = rejections[MAX_POSITIONS:]
    if not late:
        return list(found.parts)
    name = f"rejected at positions {MAX_POSITIONS + 1} to {len(rejections)}"
    together = Part(name=name, kind="rejection", cost=sum(part.cost for part in late))
    shown = [part for part in found.parts if part not in late]
    shown.insert(1 + MAX_POSITIONS, together)
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
