"""Diagnose a file of real complaints and count how often the cause is found.

    python benchmarks/real-cases/evaluate.py CASES.jsonl --out RESULT.json

The cases are not part of the project. `mapping.py` says what is entered of each.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from mapping import evidence_of

from forerun.doctor.diagnosis import Diagnosis, diagnose
from forerun.doctor.evidence import GROUPS
from forerun.provenance import collect

SETTING = frozenset(
    {
        *("engine", "method", "target_name", "draft_name", "k", "batch", "temperature", "top_p"),
        *("top_k", "context_tokens", "target_quantised", "draft_quantised", "target_moe"),
        *("target_parameters", "draft_parameters"),
    }
)
"""Facts that describe a set-up and not what is wrong with it."""


def main() -> None:
    """Every case, then the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--show", action="store_true", help="print every case's evidence")
    options = parser.parse_args()
    results = []
    for line in options.cases.read_text().splitlines():
        case = json.loads(line)
        evidence = evidence_of(case)
        said = sorted(fact.name for fact in evidence if fact.name not in SETTING)
        diagnosis = diagnose(evidence)
        results.append(result_of(case, said, diagnosis))
        if options.show:
            show(case, results[-1], diagnosis)
    summary = summary_of(results)
    print(json.dumps(summary, indent=1))
    if options.out:
        document = {"provenance": collect({}).to_dict(), "summary": summary, "cases": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def result_of(case: dict[str, object], said: list[str], diagnosis: Diagnosis) -> dict[str, object]:
    """What was expected and what was found."""
    labels = [ranked.scored.cause.label for ranked in diagnosis.causes]
    cause = "healthy" if case["cause"] == "no_fault" else str(case["cause"])
    allowed = {cause, *(str(label) for label in case.get("alt_causes", []))}  # type: ignore[attr-defined]
    return {
        "id": case["id"],
        "cause": cause,
        "facts": said,
        "verdict": diagnosis.verdict,
        "found": labels,
        "first": bool(labels) and labels[0] in allowed,
        "top_three": bool(allowed & set(labels[:3])),
        "next_test": None if diagnosis.next_test is None else diagnosis.next_test.name,
    }


def summary_of(results: list[dict[str, object]]) -> dict[str, object]:
    """Counts, and the confusion of causes."""
    informed = [result for result in results if result["facts"]]
    silent = [result for result in results if not result["facts"]]
    confusion: Counter[tuple[str, str]] = Counter()
    for result in informed:
        found = result["found"]
        assert isinstance(found, list)
        confusion[str(result["cause"]), found[0] if found else "inconclusive"] += 1
    return {
        "num_cases": len(results),
        "num_without_evidence": len(silent),
        "num_of_them_said_so": sum(r["verdict"] == "inconclusive" for r in silent),
        "num_with_evidence": len(informed),
        "num_first": sum(bool(result["first"]) for result in informed),
        "num_top_three": sum(bool(result["top_three"]) for result in informed),
        "num_insufficient": sum(r["verdict"] == "inconclusive" for r in informed),
        "confusion": [
            {"cause": cause, "found": found, "num": num}
            for (cause, found), num in sorted(confusion.items())
        ],
    }


def show(case: dict[str, object], result: dict[str, object], diagnosis: Diagnosis) -> None:
    """One case for reading."""
    mark = "  " if result["first"] else "3 " if result["top_three"] else "X "
    print(mark, result["id"], result["cause"], "->", result["found"][:4], "|", case["symptom"])  # type: ignore[index]
    print("      ", ", ".join(result["facts"]))  # type: ignore[arg-type]
    derived = {kind.name for kind in GROUPS["derived"]}
    print("      ", ", ".join(sorted(f.name for f in diagnosis.evidence if f.name in derived)))


if __name__ == "__main__":
    main()
