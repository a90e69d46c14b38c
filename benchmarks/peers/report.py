"""The comparison as files: JSON with every sample, a page with tables, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cells import OURS, Cell, Figures, Series, figures
from protocol import PLAIN, SPECULATIVE

from forerun.theory.intervals import Interval

__all__ = ["write"]

COLOURS = ("#1a7f64", "#6e7781", "#cf5b2e", "#4361a8", "#9a6bb0")
Found = Mapping[tuple[str, Cell], Series]


def write(folder: Path, found: Found, facts: Mapping[str, Any]) -> None:
    """Write what there is; called after every size, so that an interrupted run leaves its files.

    Args:
        folder: where to.
        found: samples by peer and cell.
        facts: command, machine, versions and settings.
    """
    table = {key: figures(*key, found) for key in found}
    content = {"facts": facts, "cells": [as_json(key, found[key], table[key]) for key in found]}
    (folder / "peers.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(page(table, facts), encoding="utf-8")
    draw(table, [folder / "peers.svg", folder / "peers.png"])


def as_json(key: tuple[str, Cell], series: Series, found: Figures) -> dict[str, Any]:
    """One peer in one cell."""
    peer, cell = key
    seconds = {sample.round: sample.seconds for sample in series.samples.values()}
    return {"peer": peer} | asdict(cell) | asdict(found) | {"seconds": seconds}


def page(table: Mapping[tuple[str, Cell], Figures], facts: Mapping[str, Any]) -> str:
    """The tables and where they come from."""
    lines = [f"# Peers on the same weights, {facts['provenance']['date'][:10]}", ""]
    lines += [f"    {facts['command']}", "", facts["method"], ""]
    for size in dict.fromkeys(cell.size for _, cell in table):
        lines += [f"## {size}", "", *size_table(size, table), ""]
    lines += ["![tokens per second](peers.svg)", "", "## Where and with what", ""]
    provenance = facts["provenance"]
    lines += [
        f"- {provenance['cpu']}, {provenance['num_cores']} cores, {provenance['machine']}, "
        f"{provenance['date']}, commit {provenance['commit']}",
        f"- processor seconds all stopped workers used together: {facts['idle_s']:.2f}",
    ]
    for name, description in facts["workers"].items():
        versions = ", ".join(f"{k} {v}" for k, v in description["versions"].items())
        lines.append(f"- {name}: {description['settings']}; {versions}")
    return "\n".join(lines) + "\n"


def size_table(size: str, table: Mapping[tuple[str, Cell], Figures]) -> list[str]:
    """One line per peer, two columns per cell."""
    cells = sorted({cell for _, cell in table if cell.size == size}, key=lambda c: (c.batch, c.arm))
    peers = list(dict.fromkeys(peer for peer, cell in table if cell.size == size))
    heads = [f"{cell.arm}, batch {cell.batch} | ours/peer | same tokens" for cell in cells]
    lines = ["| tokens/s (95%) | " + " | ".join(heads) + " |"]
    lines.append("|---|" + "---|---|---|" * len(cells))
    for peer in peers:
        entries = [entry(table.get((peer, cell))) for cell in cells]
        lines.append(f"| {peer} | " + " | ".join(entries) + " |")
    return lines


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


def draw(table: Mapping[tuple[str, Cell], Figures], paths: list[Path]) -> None:
    """Bars by cell, one panel per size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(cell.size for _, cell in table))
    peers = list(dict.fromkeys(peer for peer, _ in table))
    if not sizes:
        return
    figure = Figure(figsize=(4.8 * len(sizes), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        batches = sorted({cell.batch for _, cell in table if cell.size == size})
        columns = [(arm, batch) for batch in batches for arm in (PLAIN, SPECULATIVE)]
        for index, peer in enumerate(peers):
            for place, (arm, batch) in enumerate(columns):
                found = table.get((peer, Cell(size=size, arm=arm, batch=batch)))
                if found is None or found.tokens_per_s is None:
                    continue
                speed = found.tokens_per_s
                x = place + (index - (len(peers) - 1) / 2) * 0.8 / len(peers)
                reach = [[speed.estimate - speed.low], [speed.high - speed.estimate]]
                colour = COLOURS[index % len(COLOURS)]
                label = peer if place == 0 else None
                axes.bar(x, speed.estimate, 0.8 / len(peers), color=colour, label=label)
                axes.errorbar(x, speed.estimate, yerr=reach, color="black", linewidth=1)
        axes.set_xticks(
            range(len(columns)), [f"{arm}\nbatch {b}" for arm, b in columns], fontsize=8
        )
        axes.set_title(f"{size}: tokens/s, prefill included", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8, title=f"ours: {OURS}", title_fontsize=8)
    for path in paths:
        figure.savefig(path, dpi=160)
