"""Diagnose complaints with questions that a script answers from what each person knew.

    python benchmarks/real-cases/ask.py held-out-8.jsonl held-out-9.jsonl --out results/ask.json

A complaint has answers: facts that the person knew (`known`), and those that the thread found out
later (`found`); everything else is answered with "unknown".
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from cases import Complaint, complaints_of

from forerun.doctor.asking import likeliest_causes, next_question, with_answers
from forerun.doctor.diagnosis import diagnose
from forerun.provenance import collect


def main() -> None:
    """Every complaint without questions and with them, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sets", type=Path, nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="print every question")
    options = parser.parse_args()
    results: dict[str, object] = {}
    for path in options.sets:
        complaints = complaints_of(path)
        for who in ("knew", "knew and found"):
            rows = [
                ask(item, item.known | (item.found if who != "knew" else {})) for item in complaints
            ]
            results[f"{path.stem}, {who}"] = {"summary": summary_of(rows), "cases": rows}
            print(f"{path.stem}, {who}:", json.dumps(summary_of(rows)))
            if options.show and who == "knew":
                print(*map(shown, rows), sep="\n")
    if options.out:
        document = {"provenance": collect({}).to_dict(), "sets": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def ask(item: Complaint, truth: Mapping[str, object]) -> dict[str, object]:
    """What is found without and with questions."""
    start = item.evidence()
    answers: dict[str, object] = {}
    screens = []
    while question := next_question(start, answers)[1]:  # type: ignore[arg-type]
        asked = [each.fact for each in question]
        answers |= {name: truth.get(name) for name in asked}
        screens.append(asked)
    before, after = (
        [
            each.cause.label
            for each in likeliest_causes(diagnose(with_answers(start, given)).evidence)
        ]
        for given in ({}, answers)
    )
    verdict = diagnose(with_answers(start, answers)).verdict  # type: ignore[arg-type]
    return {
        "id": item.id,
        "causes": sorted(item.causes),
        "before": before,
        "after": after,
        "first_before": before[0] in item.causes,
        "three_before": bool(item.causes & set(before)),
        "first": after[0] in item.causes,
        "three": bool(item.causes & set(after)),
        "called_healthy": verdict == "healthy" and "healthy" not in item.causes,
        "num_questions": len(screens),
        "num_answered": sum(any(answers[n] is not None for n in names) for names in screens),
        "asked": answers,
    }


def summary_of(results: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Counts over complaints."""
    rows = list(results)
    counts = "first_before three_before first three called_healthy num_questions num_answered"
    return (
        {"num": len(rows)}
        | {name: sum(int(row[name]) for row in rows) for name in counts.split()}  # type: ignore[call-overload]
        | {"median_questions": median(int(str(row["num_questions"])) for row in rows)}
    )


def shown(row: Mapping[str, object]) -> str:
    """One complaint for reading."""
    mark = "  " if row["first"] else "3 " if row["three"] else "X "
    return f"{mark}{row['id']} {row['causes']} -> {row['after']} asked {row['asked']}"


if __name__ == "__main__":
    main()
