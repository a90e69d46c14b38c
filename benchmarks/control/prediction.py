"""Predicted speedup against measured, on prompts that the prediction knows nothing of.

    python benchmarks/control/prediction.py calibrate   # acceptance; nothing is timed
    python benchmarks/control/prediction.py measure     # costs and speedups, ten minutes
    python benchmarks/control/prediction.py report
    python benchmarks/control/prediction.py costs       # profiles alone, for goodput.py

Predictions are made by the functions that `forerun plan` uses, from steps traced at the largest K
on one half of the prompts and from a profile; what the draft takes to read a prompt, which it does
after the first token, is added as `forerun bench` does. Plain decoding and every K take turns on
texts of the other half. Costs are measured in several sittings, each before a part of these texts:
the machine is not the same from one quarter of an hour to the next.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from itertools import chain, cycle, islice
from statistics import median
from typing import Any

from profiles import measure_copying, measure_profiles, read_costs
from served import (
    LOOKAHEADS,
    Arm,
    Place,
    add_place,
    block_of,
    endless,
    fixed_arms,
    items_of,
    read_blocks,
    rounded,
    texts_of,
    warm_up,
)
from texts import halves

from forerun.plan.acceptance import Drafts, counted
from forerun.plan.advice import DraftCandidate, Option, option_at
from forerun.theory.cost import DraftCosts
from forerun.theory.intervals import bootstrap_ratio

CELLS: Mapping[str, tuple[str, ...]] = {
    "code, T=0": ("domain", "shelf"),
    "code, T=1": ("domain", "shelf"),
    "edits, T=0": ("suffix",),
}
ACCEPTANCE, BLOCKS = "prediction-acceptance.json", "prediction-blocks.jsonl"
MEDIAN_AIM, WORST_AIM = 0.05, 0.12
NUM_CALIBRATION = 150


def main() -> None:
    options = parser().parse_args()
    place = Place.of(options)
    if options.phase == "report":
        report(place)
    elif options.phase == "calibrate":
        calibrate(place, options.threads)
    elif options.phase == "costs":
        measure_profiles(place, options.threads, anew=True)
        measure_copying(place, options.threads, anew=True)
    else:
        (place.results / BLOCKS).unlink(missing_ok=True)
        for sitting in range(options.sittings):
            measure_profiles(place, options.threads, anew=sitting == 0)
            measure_copying(place, options.threads, anew=sitting == 0)
            measure(place, options.threads, options.seconds)


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("phase", choices=("calibrate", "costs", "measure", "report"))
    flags.add_argument(
        "--threads", type=int, default=2, help="with which plain decoding is fastest"
    )
    flags.add_argument("--sittings", type=int, default=4)
    flags.add_argument("--seconds", type=float, default=90.0, help="of blocks in every sitting")
    add_place(flags)
    return flags


def calibrate(place: Place, num_threads: int) -> None:
    """Trace every drafter at its largest K on the first half of the prompts."""
    target = place.load(num_threads)
    found: dict[str, dict[str, list[Any]]] = {}
    for cell, names in CELLS.items():
        items = list(islice(items_of(cell, target, halves(texts_of(cell))[0]), NUM_CALIBRATION))
        for name in names:
            (arm,) = fixed_arms(place, target, name, [LOOKAHEADS[-1]])
            served = [block_of([arm], item, 0)["arms"][arm.name] for item in items]
            found.setdefault(cell, {})[name] = [each["drafted"] for each in served]
            print(cell, name, len(items), flush=True)
    (place.results / ACCEPTANCE).write_text(json.dumps(found) + "\n", encoding="utf-8")


def measure(place: Place, num_threads: int, seconds: float) -> None:
    """Blocks of the cells in turns, after those that are there."""
    target, path = place.load(num_threads), place.results / BLOCKS
    plain = Arm(name="plain", engine=target)
    arms = {
        cell: [plain, *chain.from_iterable(fixed_arms(place, target, name) for name in names)]
        for cell, names in CELLS.items()
    }
    done = [block["kind"] for block in read_blocks(path)]
    queues = {
        cell: endless(cell, target, halves(texts_of(cell))[1], done.count(cell)) for cell in CELLS
    }
    for cell in CELLS:
        warm_up(arms[cell], next(items_of(cell, target, halves(texts_of(cell))[0])))
    start_s, longest_s = time.perf_counter(), 0.0
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for cell in cycle(CELLS):
            block_s = time.perf_counter()
            if block_s - start_s + longest_s > seconds:
                return
            number = done.count(cell)
            done.append(cell)
            block = block_of(arms[cell], next(queues[cell]), number, warm=True)
            for served in block["arms"].values():
                del served["records"]
            file.write(json.dumps(rounded(block)) + "\n")
            longest_s = max(longest_s, time.perf_counter() - block_s)


def report(place: Place) -> None:
    """Every arm beside its prediction."""
    rows = rows_of(place, read_blocks(place.results / BLOCKS))
    show(rows)
    found: dict[str, Any] = {
        "asked": {"median_error": MEDIAN_AIM, "worst_error": WORST_AIM},
        "provenance": place.provenance(),
        "rows": rows,
    }
    path = place.results / "prediction.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def rows_of(place: Place, blocks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every arm of these blocks."""
    calibration = json.loads((place.results / ACCEPTANCE).read_text(encoding="utf-8"))
    rows = []
    for cell, names in CELLS.items():
        own = [block["arms"] for block in blocks if block["kind"] == cell]
        context = round(mean_context(own))
        for name in names:
            acceptance = counted(
                drafts_of(request, pauses=name == "suffix") for request in calibration[cell][name]
            )
            costs = read_costs(place, name)
            table = costs.at(float(cell[-1]))
            candidate = DraftCandidate(name=name, table=table, acceptance=acceptance)
            reading = reading_of(own, costs) / table.plain_step_s(context)
            for k in LOOKAHEADS:
                option = option_at(candidate, k, batch=1, context=context)
                rows.append(row_of(cell, f"{name} K={k}", own, option, reading))
    return rows


def reading_of(own: Sequence[Mapping[str, Any]], costs: DraftCosts) -> float:
    """Seconds per decoded token that the draft reads prompts."""
    if costs.reading is None:
        return 0.0
    plain = [block["plain"] for block in own]
    read_s = sum(costs.reading.draft_more_s(p["num_prompt"]) for p in plain)
    return read_s / sum(p["num_tokens"] - 1 for p in plain)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """As a table for the page."""
    errors = [abs(row["error"]) for row in rows]
    print("| text | draft | K | predicted (95%) | measured (95%) | error | tau | kappa |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        draft, _, k = row["arm"].partition(" K=")
        print(
            f"| {row['cell']} | {draft} | {k} | {interval_of(row, 'predicted')} | "
            f"{interval_of(row, 'measured')} | {row['error']:+.1%} | "
            f"{row['predicted_tau']:.2f}, {row['tau']:.2f} | "
            f"{row['predicted_kappa']:.2f}, {row['kappa']:.2f} |"
        )
    print(
        f"median {median(errors):.1%} (asked {MEDIAN_AIM:.0%}), "
        f"worst {max(errors):.1%} (asked {WORST_AIM:.0%}), blocks "
        f"{ {row['cell']: row['num_blocks'] for row in rows} }"
    )


def interval_of(row: Mapping[str, Any], name: str) -> str:
    """Estimate and ends."""
    low, high = row[name + "_ci"]
    return f"{row[name]:.2f} ({low:.2f}–{high:.2f})"


def row_of(
    cell: str, arm: str, own: Sequence[Mapping[str, Any]], option: Option, reading: float
) -> dict[str, Any]:
    """One arm: decoding time per token of plain decoding over its own, prompts paired.

    Args:
        cell: text and temperature.
        arm: its name.
        own: blocks of the cell.
        option: what is predicted.
        reading: plain steps per decoded token that the draft reads prompts.
    """
    plain = [block["plain"] for block in own]
    arms = [block[arm] for block in own]
    speedup = bootstrap_ratio(
        [each["decode_s"] / (each["num_tokens"] - 1) for each in plain],
        [each["decode_s"] / (each["num_tokens"] - 1) for each in arms],
        seed=0,
    )
    tau = sum(a["num_tokens"] - 1 for a in arms) / sum(a["num_steps"] for a in arms)
    found = option.speedup
    predicted = [1 / (1 / value + reading) for value in (found.estimate, found.low, found.high)]
    return {
        "cell": cell,
        "arm": arm,
        "predicted": predicted[0],
        "predicted_ci": predicted[1:],
        "measured": speedup.estimate,
        "measured_ci": [speedup.low, speedup.high],
        "error": predicted[0] / speedup.estimate - 1.0,
        "predicted_tau": option.acceptance_length.estimate,
        "tau": tau,
        "predicted_kappa": option.cycle_cost.estimate,
        "kappa": tau / speedup.estimate,
        "plain_tokens_per_s": sum(p["num_tokens"] - 1 for p in plain)
        / sum(p["decode_s"] for p in plain),
        "num_blocks": len(own),
    }


def mean_context(own: Sequence[Mapping[str, Any]]) -> float:
    """Prompt and half of the output."""
    plain = [block["plain"] for block in own]
    return sum(p["num_prompt"] + p["num_tokens"] / 2 for p in plain) / len(plain)


def drafts_of(drafted: Sequence[Sequence[int]], *, pauses: bool) -> Drafts:
    """Of one traced request; a drafter that pauses has chosen its plain steps itself."""
    drafts = Drafts()
    for budget, depth, accepted, count in drafted:
        allowed = budget or (LOOKAHEADS[-1] if pauses else 0)
        if allowed:
            drafts.steps[allowed, depth, accepted] += count
    return drafts


if __name__ == "__main__":
    main()
