"""What the cycles of a trace accepted, and what changes came to beside what was predicted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.theory.intervals import Interval
from forerun.theory.record import StepRecord
from forerun.trace.files import read_trace

NAMES = {"off": "plain", "as_before": "as_before", "best_k": "best_k"}
"""Arm by the effect of a change."""
COLOURS = {"before": "#1a7f64", "after": "#cf5b2e"}


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Drafting cycles of a trace.

    Attributes:
        accepted: how many of them accepted so many tokens.
        k: tokens drafted in most of them.
        rows: rows of the target's pass in most of them.
        pass_s: mean time of that pass.
        plain_s: mean time of a plain pass.
    """

    accepted: Mapping[int, int]
    k: int
    rows: int
    pass_s: float
    plain_s: float

    def share(self, *numbers: int) -> float:
        return sum(self.accepted.get(n, 0) for n in numbers) / sum(self.accepted.values())

    def line(self) -> str:
        """In one sentence."""
        return (
            f"K={self.k}: {self.share(0, 1):.0%} of the cycles accept 0 or 1 token "
            f"({self.share(0):.0%} none); one pass verifies {self.rows} rows in "
            f"{1000 * self.pass_s:.2f} ms, {self.pass_s / self.plain_s:.2f} plain passes."
        )


def cycles_of(trace: Path) -> Cycles:
    """Cycles that only decode; a pass that reads a prompt as well is no measure of a step."""
    steps = [r for r in read_trace(trace) if isinstance(r, StepRecord) and not r.num_prefill_rows]
    drafting = [step for step in steps if step.num_drafted]
    plain = [step.verify_s for step in steps if not step.num_drafted]
    rows = most([step.batch_rows for step in drafting])
    whole = [step.verify_s for step in drafting if step.batch_rows == rows]
    return Cycles(
        accepted=Counter(step.num_accepted for step in drafting),
        k=most([step.k_budget for step in drafting]),
        rows=rows,
        pass_s=sum(whole) / len(whole),
        plain_s=sum(plain) / len(plain),
    )


def most(values: Sequence[int]) -> int:
    return Counter(values).most_common(1)[0][0]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A change: what was predicted of it and what was measured, against plain decoding.

    Attributes:
        name: of its arm.
        change: in the words of the diagnosis; of the incident, none.
        price: what it costs.
        k: K of the arm; 0 is plain.
        predicted: speedup.
        measured: speedup, with 95%.
    """

    name: str
    change: str
    price: str
    k: int
    predicted: float
    measured: Interval


def outcomes(found: Mapping[str, Any], measured: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """The incident, then every change that was measured."""
    by_name = {row["name"].split(" K=")[0]: row for row in measured}
    now = found["attribution"]["speedup"]
    rows = [("incident", "as it is", "", now)]
    for change in found["causes"][0]["remedies"]:
        name = NAMES.get(change["effect"])
        if name in by_name:
            rows.append((name, change["change"], change["price"], change["predicted"]["speedup"]))
    return [
        Outcome(
            name=name,
            change=change,
            price=price,
            k=by_name[name]["k"],
            predicted=predicted,
            measured=interval(by_name[name]),
        )
        for name, change, price, predicted in rows
    ]


def interval(row: Mapping[str, Any]) -> Interval:
    low, high = row["decode_speedup_ci"]
    return Interval(estimate=row["decode_speedup"], low=low, high=high)


def table(rows: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = [
        "| change | K | predicted | measured (95%) | gain predicted | measured | price |",
        "|---|---|---|---|---|---|---|",
    ]
    now = rows[0]
    for row in rows:
        measured = row.measured
        gains = row.predicted / now.predicted, measured.estimate / now.measured.estimate
        lines.append(
            f"| {row.change} | {row.k or 'off'} | {row.predicted:.2f}x | {measured.estimate:.2f}x "
            f"({measured.low:.2f}–{measured.high:.2f}) | {gains[0]:.1f}x | {gains[1]:.1f}x "
            f"| {row.price} |"
        )
    return "\n".join(lines) + "\n"


def draw(watched: Mapping[str, Cycles], rows: Sequence[Outcome], path: Path) -> None:
    """What cycles accept before and after; what was predicted and what was measured."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    accepted, speeds = figure.subplots(1, 2, width_ratios=(3, 4))
    for place, (name, cycles) in enumerate(watched.items()):
        depths = range(max(c.k for c in watched.values()) + 1)
        shares = [cycles.share(depth) for depth in depths]
        places = [depth + 0.4 * place - 0.2 for depth in depths]
        label = f"{name}, K={cycles.k}"
        accepted.bar(places, shares, width=0.4, color=COLOURS[name], label=label)
    accepted.set_title("accepted per cycle, share of cycles", fontsize=10, loc="left")
    accepted.legend(frameon=False, fontsize=8)
    for place, row in enumerate(rows):
        found = row.measured
        ends = [[found.estimate - found.low], [found.high - found.estimate]]
        speeds.bar(place - 0.2, row.predicted, width=0.4, color="#9aa4ad")
        speeds.bar(place + 0.2, found.estimate, width=0.4, color="#4361a8")
        speeds.errorbar(place + 0.2, found.estimate, yerr=ends, color="#24292f", capsize=3)
    names = [f"{row.name.replace('_', ' ')}\nK={row.k}" for row in rows]
    speeds.set_xticks(range(len(rows)), names, fontsize=8)
    speeds.axhline(1.0, color="#24292f", linewidth=0.8, linestyle="--")
    title = "decoding, plain = 1: predicted (grey), measured (blue, 95%)"
    speeds.set_title(title, fontsize=10, loc="left")
    for axes in (accepted, speeds):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
