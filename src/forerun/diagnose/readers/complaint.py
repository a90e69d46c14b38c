"""Reads observations from a complaint in words, such as "slower with 8 requests at once".

`tables/symptoms.txt` holds the patterns. They are made of the vocabulary of the field (what is low,
slow or wrong, and what it depends on); an observation that is a contrast needs the words of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

from forerun.diagnose.evidence import FOLDER, Evidence, Reading
from forerun.errors import InvalidRequest

Rule = tuple[tuple[str, ...], tuple[re.Pattern[str], ...]]
MAX_COMPLAINT = 4000
"""Characters; the patterns take time in proportion to the length of a sentence."""
SENTENCES = re.compile(r"[.;!?]\s|\n")
AND = " && "


def read_complaint(text: str) -> Evidence:
    if len(text) > MAX_COMPLAINT:
        raise InvalidRequest(f"a complaint in words may have at most {MAX_COMPLAINT} characters")
    evidence = Evidence(readings=[Reading(source="the complaint", kinds={"words"}, num_lines=1)])
    for name, value in observations_in(text):
        evidence.add(name, value, "the complaint")
    if not evidence.facts:
        raise InvalidRequest(
            f"{text[:60]!r} is no file, and nothing in it is understood as a complaint; say what "
            "is low, slow or wrong and what it depends on, or give --observed NAME"
        )
    return evidence


def observations_in(text: str) -> Iterator[tuple[str, object]]:
    """Return the observations of a text, all yes, and what it says was changed."""
    sentences = SENTENCES.split(text)
    found = {fact for facts, patterns in rules() if holds(patterns, sentences) for fact in facts}
    if "acceptance_fine" in found:  # then something else is what is low
        found -= {"acceptance_low", "acceptance_dropped"}
    changed = sorted(fact.removeprefix("changed=") for fact in found if "=" in fact)
    yield from ((fact, True) for fact in sorted(found) if "=" not in fact)
    if changed:
        yield "changed", changed


def holds(patterns: tuple[re.Pattern[str], ...], sentences: list[str]) -> bool:
    """Whether some sentence matches all patterns, in any order."""
    return any(all(pattern.search(sentence) for pattern in patterns) for sentence in sentences)


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    macros: dict[str, str] = {}
    found = []
    for line in (FOLDER / "symptoms.txt").read_text("utf-8").splitlines():
        facts, tab, pattern = line.partition("\t")
        if tab:
            filled = re.sub(r"<([A-Z]+)>", lambda name: macros[name.group(1)], pattern)
            parts = [re.compile(part, re.IGNORECASE) for part in filled.split(AND)]
            found.append((tuple(facts.split(",")), tuple(parts)))
        elif line and not line.startswith("#"):
            name, _, value = line.partition(" = ")
            macros[name] = value
    return tuple(found)
