"""A diagnosis as one self-contained page: no script, nothing loaded, everything escaped."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, StrictUndefined

from forerun.diagnose.diagnosis import Diagnosis
from forerun.diagnose.report.charts import charts_of
from forerun.diagnose.words import figure_words, headline, sections

__all__ = ["page_of"]

FIRST = ("What to change",)
AFTER = ("What happens in a step", "Why", "If one thing were ideal", "Evidence")
"""Sections behind the charts; the waterfall is a chart."""
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


def page_of(diagnosis: Diagnosis) -> str:
    """The page's text."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    bars, curves = charts_of(diagnosis)
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
