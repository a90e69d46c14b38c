"""The comparison as files: JSON of every run, and one page and picture of all runs in a folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cells import OURS, Cell, Figures, Series, figures
from harness import Harness
from protocol import PLAIN, SPECULATIVE

from forerun.theory.intervals import Interval

__all__ = ["write"]

COLOURS = ("#1a7f64", "#6e7781", "#cf5b2e", "#4361a8", "#9a6bb0", "#c9a227", "#57b894")
Run = Mapping[str, Any]
Table = Mapping[tuple[str, Cell], Figures]


def write(
    folder: Path,
    name: str,
    harness: Harness,
    facts: Mapping[str, Any],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Write a run, then the page and the picture of all runs in the folder.

    Args:
        folder: where to.
        name: of the run; a run of the same name is replaced.
        harness: samples and choices of K.
        facts: command, machine, versions and settings.
        decode: token ids to text, for a sample of every peer's output.
    """
    found = harness.found
    content = {
        "name": name,
        "facts": facts,
        "choices": [asdict(choice) for choice in harness.choices],
        "cells": [as_json(key, found, decode) for key in found],
    }
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    runs = [json.loads(path.read_text("utf-8")) for path in folder.glob("*.json")]
    runs.sort(key=lambda run: run["facts"]["provenance"]["date"])
    (folder / "README.md").write_text(page(runs), encoding="utf-8")
    draw({run["name"]: table_of(run) for run in runs}, folder / "peers.svg")


def as_json(
    key: tuple[str, Cell],
    found: Mapping[tuple[str, Cell], Series],
    decode: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """One peer in one cell, with the beginning of what it wrote."""
    peer, cell = key
    samples = found[key].samples
    seconds = {sample.round: sample.seconds for sample in samples.values()}
    text = decode(samples[0].tokens[0][:24]) if 0 in samples else None
    rest = {"seconds": seconds, "text": text}
    return {"peer": peer} | asdict(cell) | asdict(figures(*key, found)) | rest


def table_of(run: Run) -> dict[tuple[str, Cell], Figures]:
    """The figures of a run that was written before."""
    return {
        (entry["peer"], Cell(arm=entry["arm"], batch=entry["batch"])): Figures(
            tokens_per_s=interval(entry["tokens_per_s"]),
            ours_over_peer=interval(entry["ours_over_peer"]),
            same_tokens=entry["same_tokens"],
            failure=entry["failure"],
        )
        for entry in run["cells"]
    }


def interval(ends: Mapping[str, float] | None) -> Interval | None:
    return None if ends is None else Interval(**ends)


def page(runs: Sequence[Run]) -> str:
    """The tables and where they come from."""
    dates = sorted({run["facts"]["provenance"]["date"][:10] for run in runs})
    lines = [f"# Peers on the same weights, {' and '.join(dates)}", ""]
    lines += [f"    {run['facts']['command']}" for run in runs]
    lines += ["", *dict.fromkeys(run["facts"]["method"] for run in runs), ""]
    for run in runs:
        lines += [f"## {run['name']}", "", run["facts"]["pair"].strip(), ""]
        lines += [*size_table(table_of(run)), "", *choice_table(run), ""]
    lines += ["![tokens per second](peers.svg)", "", "## Where and with what", ""]
    for run in runs:
        provenance = run["facts"]["provenance"]
        lines += [
            f"- {run['name']}: {provenance['cpu']}, {provenance['num_cores']} cores, "
            f"{provenance['machine']}, {provenance['date']}, commit {provenance['commit']}; "
            f"processor seconds all stopped workers used together: {run['facts']['idle_s']:.2f}",
        ]
        for name, description in run["facts"]["workers"].items():
            versions = ", ".join(f"{k} {v}" for k, v in description["versions"].items())
            lines.append(f"  - {name}: {description['settings']}; {versions}")
    return "\n".join(lines) + "\n"


def size_table(table: Table) -> list[str]:
    """One line per peer, three columns per cell."""
    cells = sorted({cell for _, cell in table}, key=lambda c: (c.batch, c.arm))
    heads = [f"{cell.arm}, batch {cell.batch} | ours/peer | same tokens" for cell in cells]
    lines = ["| tokens/s (95%) | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---|---|---|" * len(cells))
    for peer in dict.fromkeys(peer for peer, _ in table):
        entries = [entry(table.get((peer, cell))) for cell in cells]
        lines.append(f"| {peer} | " + " | ".join(entries) + " |")
    return lines


def choice_table(run: Run) -> list[str]:
    """The K of every peer, with the speed of each K on the prompts that chose it."""
    batches = sorted({choice["batch"] for choice in run["choices"]})
    if not batches:
        return []
    heads = " | ".join(f"batch {batch}: best K (tokens/s by K)" for batch in batches)
    lines = [f"| | {heads} |", "|---|" + "---|" * len(batches)]
    for peer in dict.fromkeys(choice["peer"] for choice in run["choices"]):
        by_batch = {choice["batch"]: choice for choice in run["choices"] if choice["peer"] == peer}
        entries = [
            f"{by_batch[batch]['best']} ({speeds(by_batch[batch])})" if batch in by_batch else "–"
            for batch in batches
        ]
        lines.append(f"| {peer} | {' | '.join(entries)} |")
    return lines


def speeds(choice: Mapping[str, Any]) -> str:
    return ", ".join(f"{k}: {speed:.0f}" for k, speed in choice["tokens_per_s"].items())


def entry(found: Figures | None) -> str:
    """Three columns of one peer in one cell."""
    if found is None:
        return "– | – | –"
    if found.tokens_per_s is None:
        reason = (found.failure or "too few rounds").splitlines()[0].replace("|", "/")
        return f"failed: {reason[:80]} | – | –"
    ratio = "" if found.ours_over_peer is None else text(found.ours_over_peer, ".2f")
    same = "" if found.same_tokens is None else f"{found.same_tokens:.2f}"
    note = "" if found.failure is None else " (then failed)"
    return f"{text(found.tokens_per_s, '.0f')}{note} | {ratio} | {same}"


def text(interval: Interval, spec: str) -> str:
    """An estimate and its interval."""
    low, high = format(interval.low, spec), format(interval.high, spec)
    return f"{format(interval.estimate, spec)} ({low}–{high})"


def draw(tables: Mapping[str, Table], path: Path) -> None:
    """Bars by cell, one panel per run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    peers = list(dict.fromkeys(peer for table in tables.values() for peer, _ in table))
    figure = Figure(figsize=(5.2 * len(tables), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for axes, (name, table) in zip(panels, tables.items(), strict=True):
        batches = sorted({cell.batch for _, cell in table})
        columns = [(arm, batch) for batch in batches for arm in (PLAIN, SPECULATIVE)]
        for index, peer in enumerate(peers):
            colour, label = COLOURS[index % len(COLOURS)], peer
            for place, (arm, batch) in enumerate(columns):
                found = table.get((peer, Cell(arm=arm, batch=batch)))
                if found is None or found.tokens_per_s is None:
                    continue
                speed = found.tokens_per_s
                x = place + (index - (len(peers) - 1) / 2) * 0.8 / len(peers)
                reach = [[speed.estimate - speed.low], [speed.high - speed.estimate]]
                axes.bar(x, speed.estimate, 0.8 / len(peers), color=colour, label=label)
                axes.errorbar(x, speed.estimate, yerr=reach, color="black", linewidth=1)
                label = None
        axes.set_xticks(
            range(len(columns)), [f"{arm}\nbatch {b}" for arm, b in columns], fontsize=8
        )
        axes.set_title(f"{name}: tokens/s, prefill included", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, title=f"ours: {OURS}", title_fontsize=8)
    figure.savefig(path)
