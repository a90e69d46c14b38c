"""The page of a run of tune: self-contained HTML, one picture and one table per load."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from forerun.terminal_text import printable
from forerun.tune.report import LoadResult, TuneReport
from forerun.tune.wording import HEADINGS, LEGEND, list_advice, list_cells, list_given_up

_TEMPLATE = Path(__file__).with_name("page.html.j2")
_WIDEST = 2.0
"""An interval is drawn up to so many times its estimate."""


def draw_speedups(result: LoadResult) -> dict[str, object]:
    """Return the bars of all arms measured at a load, and where speedup 1 is.

    Places are shares of the picture's width.
    """
    shown = [(arm, arm.speedup) for arm in result.arms if arm.speedup is not None]
    ends = [min(s.high, _WIDEST * s.estimate) for _, s in shown]
    most = max([1.2, *ends])
    bars = [
        {
            "arm": arm.arm,
            "label": speedup.show() if math.isfinite(speedup.high) else f"{speedup.estimate:.2f}",
            "speedup": speedup.estimate / most,
            "low": speedup.low / most,
            "high": end / most,
            "is_left": arm.reason is None,
        }
        for (arm, speedup), end in zip(shown, ends, strict=True)
    ]
    return {"bars": bars, "one": 1.0 / most}


def render_page(report: TuneReport, changes: Sequence[str] = ()) -> str:
    """Return the page of a run as HTML; `changes` are the sentences of `compare.compare_runs`."""
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        finalize=lambda value: printable(value, keep="\n") if type(value) is str else value,
    )
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        report=report,
        lists=(("Since the earlier run", changes), ("Prompts left out", report.left_out)),
        advice=list(list_advice(report)),
        headings=HEADINGS,
        legend=LEGEND,
        loads=[
            {
                "label": result.load.label,
                "picture": draw_speedups(result),
                "rows": [list_cells(report, arm) for arm in result.arms if arm.num_blocks],
                "given_up": list_given_up(result),
            }
            for result in report.loads
        ],
        commands=[
            (arm.name, arm.shown_command, report.start_s.get(arm.name)) for arm in report.arms
        ],
        versions=", ".join(f"{name} {version}" for name, version in report.versions.items()),
    )
