"""The story in one table and one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from forerun.theory.intervals import Interval

CHAPTERS = {
    "off-the-shelf": ("the target, a draft from the shelf", "distilled", "before"),
    "distilled": ("the same draft, distilled", "distilled", "after"),
    "stale": ("the target updated, the draft not", "refreshed", "before"),
    "refreshed": ("the draft refreshed", "refreshed", "after"),
}
"""Comparison by name: what it shows, the alignment that judged its draft, and as which of two."""
COLOURS = ("#6e7781", "#1a7f64", "#cf5b2e", "#4361a8")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One chapter.

    Attributes:
        name: of the comparison.
        text: what it shows.
        alpha: acceptance probability at T=1, on held-out prompts; None where nothing was trained.
        tau: tokens per step at K=5, by temperature.
        speedup: measured against plain decoding at the best K, by temperature.
        best_k: that K.
        predicted: tau over kappa of the cost table, at that K.
        tokens_per_s: of plain decoding, by temperature.
    """

    name: str
    text: str
    alpha: Interval | None
    tau: dict[str, Interval]
    speedup: dict[str, Interval]
    best_k: dict[str, int]
    predicted: dict[str, Interval | None]
    tokens_per_s: dict[str, Interval]

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def story_of(out: Path) -> list[Row]:
    """Rows from the reports and comparisons of a recipe."""
    return [row_of(out, name, *chapter) for name, chapter in CHAPTERS.items()]


def row_of(out: Path, name: str, text: str, alignment: str, which: str) -> Row:
    path, judged = out / alignment / "report.json", {}
    if path.exists():
        report = json.loads(path.read_text())
        judged = {pair[which]["temperature"]: pair[which]["overall"] for pair in report["judged"]}
    cells = json.loads((out / f"bench-{name}.json").read_text())["cells"]
    best = {f"{cell['temperature']:g}": best_of(cell) for cell in cells}
    return Row(
        name=name,
        text=text,
        alpha=Interval(**judged[1.0]["acceptance_probability"]) if judged else None,
        tau={f"{t:g}": Interval(**o["acceptance_length"]) for t, o in sorted(judged.items())},
        speedup={t: interval(row, "decode_speedup") for t, row in best.items()},
        best_k={t: row["k"] for t, row in best.items()},
        predicted={
            t: predicted(cell, best) for cell in cells for t in [f"{cell['temperature']:g}"]
        },
        tokens_per_s={
            f"{cell['temperature']:g}": interval(cell["rows"][0], "decode_tokens_per_s")
            for cell in cells
        },
    )


def best_of(cell: dict[str, Any]) -> dict[str, Any]:
    """The best K, chosen on half the blocks and scored on the others."""
    found: dict[str, Any] = cell["best_of_several"]["scored"]
    return found


def predicted(cell: dict[str, Any], best: dict[str, dict[str, Any]]) -> Interval | None:
    """What the cost table says of that K."""
    k = best[f"{cell['temperature']:g}"]["k"]
    row = next(row for row in cell["rows"] if row["k"] == k)
    values = row.get("predicted")
    return None if values is None else Interval(**values["decode_speedup"])


def interval(row: dict[str, Any], figure: str) -> Interval:
    low, high = row[f"{figure}_ci"]
    return Interval(estimate=row[figure], low=low, high=high)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| | alpha, T=1 | tau at K=5, T=1 | tau at K=5, T=0 | decoding, T=1 | decoding, T=0 |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        figures = [row.alpha, row.tau.get("1"), row.tau.get("0")]
        cells = ["–" if figure is None else shown(figure) for figure in figures]
        cells += [f"{shown(row.speedup[t])}x at K={row.best_k[t]}" for t in ("1", "0")]
        lines.append(f"| {row.text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(figure: Interval) -> str:
    return f"{figure.estimate:.2f} ({figure.low:.2f}–{figure.high:.2f})"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Measured speedups as bars with intervals, the acceptance probability above each."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.4, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, temperature in zip(panels, ("1", "0"), strict=True):
        for place, (row, colour) in enumerate(zip(rows, COLOURS, strict=True)):
            speedup = row.speedup[temperature]
            axes.bar(place, speedup.estimate, color=colour, width=0.7)
            ends = [[speedup.estimate - speedup.low], [speedup.high - speedup.estimate]]
            axes.errorbar(place, speedup.estimate, yerr=ends, color="#24292f", capsize=3)
            if temperature in row.tau:
                label = f"$\\tau$ {row.tau[temperature].estimate:.2f}"
                axes.text(place, 0.04, label, ha="center", fontsize=8, color="white")
        axes.axhline(1.0, color="#24292f", linewidth=0.8, linestyle="--")
        axes.set_xticks(range(len(rows)), [row.name.replace("off-the", "off the") for row in rows])
        axes.tick_params(axis="x", labelsize=8)
        axes.set_title(f"T={temperature}", fontsize=10, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("decoding, plain = 1 (95%)")
    figure.savefig(path)
