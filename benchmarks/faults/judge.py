"""Diagnose what `collect.py` kept, from the trace alone and with the probe, and draw the confusion.

python benchmarks/faults/judge.py --seeds 5-14 --runs build/faults --out benchmarks/faults/results
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.pictures import COLOURS, picture
from collect import name_of, seeds_of
from matplotlib.patches import Rectangle
from tests.lab.catalogue import FAULTS
from tests.lab.setups import Fault

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.evidence import merge
from forerun.doctor.readers.sources import read_facts
from forerun.doctor.readers.trace import read_trace_evidence
from forerun.provenance import collect
from forerun.theory.intervals import wilson_interval

SILENT = "inconclusive"
WAYS = ("trace", "trace and probe")


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One run, diagnosed in one way."""

    fault: Fault
    seed: int
    way: str
    found: tuple[str, ...]

    @property
    def first(self) -> bool:
        return self.found[:1] == (self.fault.label,)

    @property
    def top_three(self) -> bool:
        return self.fault.label in self.found[:3]


def main() -> None:
    """Every run in both ways, then tables and pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    judged = [
        judge(fault, seed, way, options.runs)
        for fault in FAULTS.values()
        for seed in options.seeds
        for way in WAYS
        if (options.runs / f"{name_of(fault, seed)}.facts.json").exists()
    ]
    for line in table(judged):
        print(line)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write(judged, options.out, f"{options.seeds[0]}-{options.seeds[-1]}")


def judge(fault: Fault, seed: int, way: str, runs: Path) -> Judged:
    """Diagnose one run."""
    name = name_of(fault, seed)
    evidence = read_trace_evidence(runs / f"{name}.jsonl")
    document = json.loads((runs / f"{name}.facts.json").read_text())
    for fact, value in document["says"].items():
        evidence.add(fact, value, "the complaint")
    if way == WAYS[1]:
        evidence = merge(evidence, read_facts(document["probe"], "the probe"))
    diagnosis = diagnose(evidence)
    found = tuple(ranked.scored.cause.label for ranked in diagnosis.causes)
    return Judged(fault=fault, seed=seed, way=way, found=found)


# ------------------------------------------------------------------------------------------ tables


def share(flags: Iterable[bool]) -> dict[str, object]:
    """How many, of how many, and where the share lies with 95% confidence."""
    found = list(flags)
    interval = wilson_interval(sum(found), len(found)) if found else None
    ends = None if interval is None else [round(interval.low, 3), round(interval.high, 3)]
    return {"right": sum(found), "of": len(found), "interval": ends}


def summary(judged: Sequence[Judged]) -> dict[str, object]:
    """The figures that the laboratory is for."""
    result: dict[str, object] = {}
    for way in WAYS:
        faults = [j for j in judged if j.way == way and j.fault.label != "healthy"]
        healthy = [j for j in judged if j.way == way and j.fault.label == "healthy"]
        result[way] = {
            "faults, right label first": share(j.first for j in faults),
            "faults, right label among three": share(j.top_three for j in faults),
            "controls called healthy": share(j.first for j in healthy),
        }
    return result


def table(judged: Sequence[Judged]) -> list[str]:
    """One line per fault: right first, right among three, and what was found instead."""
    lines = [
        "| run | label | " + " | ".join(f"{way}: first, three" for way in WAYS) + " | instead |"
    ]
    lines.append("|---|---|" + "---|" * len(WAYS) + "---|")
    for fault in FAULTS.values():
        if not any(j.fault is fault for j in judged):
            continue
        cells = []
        for way in WAYS:
            runs = [j for j in judged if j.fault is fault and j.way == way]
            first, three = sum(j.first for j in runs), sum(j.top_three for j in runs)
            cells.append(f"{first}, {three} of {len(runs)}")
        wrong = Counter(
            (j.found or (SILENT,))[0]
            for j in judged
            if j.fault is fault and j.way == WAYS[1] and not j.first
        )
        instead = ", ".join(f"{label} {count}" for label, count in wrong.most_common())
        lines.append(f"| {fault.name} | `{fault.label}` | " + " | ".join(cells) + f" | {instead} |")
    for way, figures in summary(judged).items():
        assert isinstance(figures, dict)
        for name, found in figures.items():
            lines.append(
                f"{way}: {name}: {found['right']} of {found['of']}, 95% {found['interval']}"
            )
    return lines


def write(judged: Sequence[Judged], out: Path, seeds: str) -> None:
    """Results, table and one picture per way."""
    document = {
        "provenance": collect({}).to_dict(),
        "seeds": seeds,
        "summary": summary(judged),
        "runs": [
            {"run": j.fault.name, "label": j.fault.label, "seed": j.seed, "way": j.way}
            | {"found": j.found}
            for j in judged
        ],
    }
    (out / f"seeds-{seeds}.json").write_text(json.dumps(document, indent=1) + "\n")
    (out / f"seeds-{seeds}.md").write_text("\n".join(table(judged)) + "\n")
    for way in WAYS:
        name = f"seeds-{seeds}-{way.replace(' ', '-')}.svg"
        draw([j for j in judged if j.way == way], way, out / name)


# ----------------------------------------------------------------------------------------- picture

CELL, MARGIN = 0.3, 3.2
"""Of one count, and of the names of labels, in inches."""
RIGHT, WRONG, INK = COLOURS[1], COLOURS[0], "white"


def draw(judged: Sequence[Judged], way: str, path: Path) -> None:
    """The confusion matrix: what is there, by row; what was found first, by column."""
    counts = Counter((j.fault.label, (j.found or (SILENT,))[0]) for j in judged)
    rows = list(dict.fromkeys(j.fault.label for j in judged))
    columns = list(dict.fromkeys([*rows, *(found for _, found in counts)]))
    width, height = (MARGIN + CELL * len(names) for names in (columns, rows))
    with picture([path], width=width, height=height) as figure:
        axes = figure.subplots()
        axes.set_title(f"From {way}: label by row, found first by column", fontsize=10)
        for (label, found), count in counts.items():
            x, y = columns.index(found), rows.index(label)
            share = count / sum(counts[label, column] for column in columns)
            axes.add_patch(
                Rectangle(
                    (x - 0.48, y - 0.48),
                    *(0.96, 0.96),
                    color=RIGHT if label == found else WRONG,
                    alpha=0.35 + 0.65 * share,
                    linewidth=0,
                )
            )
            axes.text(x, y, str(count), color=INK, fontsize=8, ha="center", va="center")
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), aspect="equal")
        axes.set_xticks(range(len(columns)), columns, rotation=60, ha="left", fontsize=8)
        axes.set_yticks(range(len(rows)), rows, fontsize=8)
        axes.xaxis.tick_top()
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)


if __name__ == "__main__":
    main()
