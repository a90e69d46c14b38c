"""A fixed mapping from the words of a complaint to facts: what a person would enter.

`symptoms.txt` holds the patterns. They are made of the vocabulary of the field (what is low, slow
or wrong, and what it depends on), not of any thread; an observation that is a contrast needs the
words of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

__all__ = ["observations_in"]

Rule = tuple[tuple[str, ...], tuple[re.Pattern[str], ...]]
SENTENCES = re.compile(r"[.;!?]\s|\n")
AND = " && "


def observations_in(text: str) -> Iterator[tuple[str, object]]:
    """Observations of one text, all yes; and what it says was changed."""
    sentences = SENTENCES.split(text)
    found = {fact for facts, patterns in rules() if holds(patterns, sentences) for fact in facts}
    if "acceptance_fine" in found:  # then something else is what is low
        found -= {"acceptance_low", "acceptance_dropped"}
    changed = sorted(fact.removeprefix("changed=") for fact in found if "=" in fact)
    yield from ((fact, True) for fact in sorted(found) if "=" not in fact)
    if changed:
        yield "changed", changed


def holds(patterns: tuple[re.Pattern[str], ...], sentences: list[str]) -> bool:
    """Whether some sentence has all of them, in any order."""
    return any(all(pattern.search(sentence) for pattern in patterns) for sentence in sentences)


@lru_cache(maxsize=1)
def rules() -> tuple[Rule, ...]:
    """The patterns, macros filled in."""
    macros: dict[str, str] = {}
    found = []
    for line in Path(__file__).with_name("symptoms.txt").read_text().splitlines():
        facts, tab, pattern = line.partition("\t")
        if tab:
            filled = re.sub(r"<([A-Z]+)>", lambda name: macros[name.group(1)], pattern)
            parts = [re.compile(part, re.IGNORECASE) for part in filled.split(AND)]
            found.append((tuple(facts.split(",")), tuple(parts)))
        elif line and not line.startswith("#"):
            name, _, value = line.partition(" = ")
            macros[name] = value
    return tuple(found)
