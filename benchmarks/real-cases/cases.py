"""Complaints of every set in one form, and the evidence that their texts, figures and logs give.

Two formats are read: the sets of this folder (`mapping.py` says what is entered of their fields),
and complaints with `words`, `facts` and `logs`, which is the form to write new ones in.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mapping import add_contrasts, after_values, facts_of, lines_before, say

from forerun.doctor.evidence import Evidence, merge
from forerun.doctor.readers.complaint import read_complaint
from forerun.doctor.readers.sources import read_text

FOLDER = Path(__file__).parent


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One complaint, what the person knew, and the causes that count as found."""

    id: str
    words: str
    figures: Evidence
    causes: frozenset[str]
    known: Mapping[str, object]
    found: Mapping[str, object]

    def evidence(self) -> Evidence:
        """Figures and logs first, then the words, as `forerun diagnose` reads them."""
        return merge(self.figures, read_complaint(self.words))


def complaints_of(path: Path) -> list[Complaint]:
    """Every complaint of a file."""
    apart = json.loads((FOLDER / "answers.json").read_text())
    return [complaint_of(json.loads(line), apart) for line in path.read_text().splitlines()]


def complaint_of(case: Mapping[str, object], apart: Mapping[str, object]) -> Complaint:
    """One line of a file; `apart` has the answers of cases without them."""
    answers = case.get("answers") or apart.get(str(case["id"])) or {"known": {}, "found": {}}
    cause = case.get("true_cause", case.get("cause"))
    others = case.get("also_right", case.get("alt_causes")) or []
    return Complaint(
        id=str(case["id"]),
        words=str(case.get("words", case.get("symptom"))),
        figures=figures_of(case),
        causes=frozenset({"healthy" if cause == "no_fault" else str(cause), *others}),  # type: ignore[misc]  # a list of labels
        known=answers["known"],  # type: ignore[index]
        found=answers["found"],  # type: ignore[index]
    )


def figures_of(case: Mapping[str, object]) -> Evidence:
    """Figures and log lines from before the fix."""
    found = Evidence()
    if isinstance(facts := case.get("facts"), Mapping):
        lines = [str(line) for line in case["logs"]]  # type: ignore[attr-defined]
        for name, value in facts.items():
            say(found, name, value, "facts")
    else:
        known = case["evidence"]
        assert isinstance(known, Mapping)
        other = known.get("other") or {}
        lines = lines_before(case, after_values(known, other))
        for name, value in facts_of(known, other):
            say(found, name, value, "case fields")
    if lines:
        found = merge(found, read_text(io.BytesIO("\n".join(lines).encode()), "log lines"))
    if "evidence" in case:
        add_contrasts(found, known, other)
    return found
