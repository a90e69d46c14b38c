"""Draw the picture of docs/understand.md from committed figures.

python -m benchmarks.understand
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.pictures import BASELINE, COLOURS, picture

from forerun.measure.profile import load_profile

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "align" / "results"
PICTURE = ROOT / "docs" / "images" / "understand.svg"
PROFILES = {"292M, in memory": "292m", "40M": "code-40m"}


def main() -> None:
    """Passes by rows, acceptance by position, and tau, kappa and speedup by K."""
    with picture([PICTURE], width=10, height=3) as figure:
        passes, positions, lengths = figure.subplots(1, 3)
        draw_passes(passes)
        draw_positions(positions)
        draw_lengths(lengths)


def draw_passes(axes: Any) -> None:
    axes.plot([1, 16], [1, 16], color=BASELINE, linestyle=":", label="row by row")
    for (label, name), colour in zip(PROFILES.items(), COLOURS, strict=False):
        costs = load_profile(ROOT / "benchmarks" / "profiles" / f"{name}.json").greedy
        times = [costs.verify_step_s(n) / costs.verify_step_s(1) for n in range(1, 17)]
        axes.plot(range(1, 17), times, color=colour, label=label)
    axes.set(title="time of a pass, in passes of one row", xlabel="rows", ylim=(0, 5))
    axes.set_xticks(range(0, 17, 4))
    axes.legend()


def read_rows(name: str) -> dict[int, dict[str, Any]]:
    """Return the greedy figures of the head by K."""
    cells = json.loads((RESULTS / f"real-model-head-{name}.json").read_text())["cells"]
    (cell,) = (cell for cell in cells if cell["temperature"] == 0)
    return {int(row["name"].rpartition("=")[2]): row for row in cell["rows"] if "K=" in row["name"]}


def draw_positions(axes: Any) -> None:
    for (label, name), colour in zip(
        {"GSM8K": "gsm", "chats": "chats"}.items(), COLOURS, strict=False
    ):
        rates = read_rows(name)[4]["acceptance_rate_per_position"]
        axes.plot(range(1, 5), rates, color=colour, marker="o", label=label)
    axes.set(title="drafts kept through a position", xlabel="position", ylim=(0, 1))
    axes.set_xticks(range(1, 5))
    axes.legend()


def draw_lengths(axes: Any) -> None:
    rows = read_rows("gsm")
    for key, label, colour in (
        ("acceptance_length", "tau", COLOURS[1]),
        ("cycle_cost", "kappa", BASELINE),
        ("speedup", "speedup of the whole run", COLOURS[0]),
    ):
        axes.plot(
            [*rows], [row[key] for row in rows.values()], color=colour, marker="o", label=label
        )
    axes.set(title="GSM8K, T=0, by K", xlabel="K", ylim=(0, 3))
    axes.set_xticks([*rows])
    axes.legend(loc="lower right")


if __name__ == "__main__":
    main()
