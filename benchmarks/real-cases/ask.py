"""Diagnose complaints with questions that a script answers from what each thread says.

    python benchmarks/real-cases/ask.py held-out-8.jsonl --out results/ask-8.json
    python benchmarks/real-cases/ask.py CASES.jsonl --answers answers.json --part held --thin 4

A case has `answers`: facts that the person with the complaint knows (`known`), and those that the
thread found out later (`found`); everything else is answered with "unknown". `--thin N` hides
half of what was understood of the words of each complaint, in N ways: where every complaint is
understood, as in cases that the words were adapted to, there is nothing to ask.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median

from mapping import evidence_of

from forerun.doctor.asking import likeliest_causes, next_question, with_answers
from forerun.doctor.evidence import Evidence
from forerun.provenance import collect

Case = Mapping[str, object]


def main() -> None:
    """Every case without questions and with them, and the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", type=Path)
    parser.add_argument("--answers", type=Path, help="answers by id, for cases without them")
    parser.add_argument("--part", choices=["dev", "held"], help="half of the cases, by a hash")
    parser.add_argument("--thin", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    apart = json.loads(options.answers.read_text()) if options.answers else {}
    cases = [json.loads(line) for line in options.cases.read_text().splitlines()]
    cases = [case for case in cases if options.part in (None, part_of(case))]
    results = []
    for case in cases:
        answers = case.get("answers") or apart[case["id"]]
        for who, truth in (
            ("what the person knows", answers["known"]),
            ("and what the thread found", answers["known"] | answers["found"]),
        ):
            for way in range(options.thin) if options.thin else (None,):
                results.append(asked(case, truth, way) | {"answers": who})
    summary = {
        who: summary_of(r for r in results if r["answers"] == who)
        for who in dict.fromkeys(str(result["answers"]) for result in results)
    }
    print(json.dumps(summary, indent=1))
    if options.out:
        document = {"provenance": collect({}).to_dict(), "summary": summary, "cases": results}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def part_of(case: Case) -> str:
    """The half that a case belongs to."""
    return (
        "held" if int(hashlib.sha256(str(case["source"]).encode()).hexdigest(), 16) % 2 else "dev"
    )


def asked(case: Case, truth: Mapping[str, bool], way: int | None) -> dict[str, object]:
    """What is found without and with questions."""
    full = evidence_of(case)
    start = full
    if way is not None:
        start = Evidence(
            facts={
                n: f for n, f in full.facts.items() if f.source != "symptom" or kept(case, n, way)
            }
        )
    truth = {f.name: f.value for f in full if isinstance(f.value, bool)} | dict(truth)
    answers: dict[str, bool | None] = {}
    num_questions = 0
    while items := next_question(with_answers(start, answers), answers):
        num_questions += 1
        answers |= {item.fact: truth.get(item.fact) for item in items}
    cause = "healthy" if case["cause"] == "no_fault" else str(case["cause"])
    allowed = {cause, *case["alt_causes"]}  # type: ignore[misc]  # a list of labels
    before, after = (
        [item.cause.label for item in likeliest_causes(with_answers(start, given))]
        for given in ({}, answers)
    )
    return {
        "id": case["id"],
        "cause": cause,
        "way": way,
        "before": before,
        "after": after,
        "first_before": before[0] in allowed,
        "three_before": bool(allowed & set(before)),
        "first": after[0] in allowed,
        "three": bool(allowed & set(after)),
        "num_questions": num_questions,
        "asked": answers,
    }


def kept(case: Case, name: str, way: int) -> bool:
    """Whether a word of a complaint is understood, in one of several ways."""
    return bool(int(hashlib.sha256(f"{way}{case['id']}{name}".encode()).hexdigest(), 16) % 2)


def summary_of(results: Iterable[Mapping[str, object]]) -> dict[str, object]:
    """Counts over cases."""
    rows = list(results)
    found = {
        name: sum(bool(row[name]) for row in rows)
        for name in ("first_before", "three_before", "first", "three")
    }
    return (
        {"num_runs": len(rows)}
        | found
        | {"median_questions": median(int(str(row["num_questions"])) for row in rows)}
        | {"median_observations": median(len(row["asked"]) for row in rows)}  # type: ignore[arg-type]
    )


if __name__ == "__main__":
    main()
