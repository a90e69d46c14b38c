"""Measure what is read of complaints in words: precision, and true facts per complaint.

    python benchmarks/real-cases/read.py held-out-8.jsonl held-out-9.jsonl --out results/read.json

A fact that was read is true or false by the answers of the complaint, else by `judged.json`, which
has the judgement of one person who compared each sentence with the fact's definition. A fact that
was never judged is counted apart, and shown.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median

from cases import Complaint, complaints_of

from forerun.doctor.evidence import SETTING
from forerun.doctor.readers.complaint import read_complaint
from forerun.provenance import collect
from forerun.theory.intervals import wilson_interval

JUDGED = Path(__file__).with_name("judged.json")


def main() -> None:
    """Every set, and all together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    judged = json.loads(JUDGED.read_text())
    results: dict[str, object] = {}
    every = []
    for path in options.sets:
        rows = [judge(item, judged.get(item.id, {})) for item in complaints_of(path)]
        every += rows
        results[path.stem] = {"summary": summary_of(rows), "complaints": rows}
        print(path.stem, json.dumps(summary_of(rows)))
        for row in rows:
            for verdict in ("false", "not_judged"):
                if row[verdict]:
                    print(f"  {verdict}: {row[verdict]} {row['id']}")
    results["all"] = summary_of(every)
    print("all", json.dumps(summary_of(every)))
    if options.out:
        document = {"provenance": collect({}).to_dict(), "sets": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def judge(item: Complaint, judged: Mapping[str, bool]) -> dict[str, object]:
    """The facts of one complaint, by what is known of them."""
    found = read_complaint(item.words)
    answers = {**item.found, **item.known}
    verdicts: dict[str, list[str]] = {"true": [], "false": [], "not_judged": []}
    for fact in found:
        answer = answers.get(fact.name)
        is_true = judged.get(fact.name)
        if isinstance(fact.value, bool) and isinstance(answer, bool):
            is_true = answer == fact.value
        key = "not_judged" if is_true is None else "true" if is_true else "false"
        verdicts[key].append(fact.name)
    return {
        "id": item.id,
        **verdicts,
        "questions": sorted(set(found.supposed) - set(found.facts)),
        "unread": found.readings[0].unread,
    }


def summary_of(rows: list[dict[str, object]]) -> dict[str, object]:
    """Counts, precision with its interval, and medians per complaint."""
    lists = {name: [list(map(str, row[name])) for row in rows] for name in ("true", "false")}  # type: ignore[call-overload]
    num = {name: sum(map(len, each)) for name, each in lists.items()}
    precision = wilson_interval(num["true"], num["true"] + num["false"])
    return {
        "complaints": len(rows),
        "not_judged": sum(len(row["not_judged"]) for row in rows),  # type: ignore[arg-type]
        **num,
        "precision": [round(getattr(precision, end), 3) for end in ("estimate", "low", "high")],
        "median_true": median(map(len, lists["true"])),
        "median_true_beyond_set_up": median(len(set(each) - SETTING) for each in lists["true"]),
        "not_understood": sum(bool(row["unread"]) for row in rows),
    }


if __name__ == "__main__":
    main()
