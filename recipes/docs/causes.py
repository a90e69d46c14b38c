"""Write docs/causes.md and docs/facts.md from the rules and the vocabulary of facts.

`python recipes/docs/causes.py` rewrites their tables and the JSON Schema of facts files; `--check`
only says whether they are up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from facts_schema import SCHEMA_PATH, described, schema

from forerun.doctor.diagnosis import CAUSES, EXPERIMENTS, Cause, Sign
from forerun.doctor.evidence import GROUPS

DOCS = Path(__file__).parents[2] / "docs"
BEGIN, END = "<!-- written by: python recipes/docs/causes.py -->\n", "<!-- end of tables -->\n"


def causes() -> Iterator[str]:
    """Every cause: what, why, evidence, changes."""
    family = ""
    for cause in CAUSES.values():
        if cause.family != family:
            family = cause.family
            yield f"## {family.capitalize()}\n\n"
        yield from cause_lines(cause)


def cause_lines(cause: Cause) -> Iterator[str]:
    """One cause."""
    yield f"**`{cause.label}`** {cause.what} {cause.why}\n\n"
    signs = sorted(cause.signs, key=lambda sign: -max(sign.yes, sign.no))
    supporting = [sign_words(sign) for sign in signs if max(sign.yes, sign.no) > 0.0]
    opposing = [sign_words(sign) for sign in signs if max(sign.yes, sign.no) <= 0.0]
    if supporting:
        yield f"- evidence: {', '.join(supporting)}\n"
    if opposing:
        yield f"- speaks against it: {', '.join(opposing)}\n"
    for remedy in cause.remedies:
        yield f"- change: {remedy.change}. Price: {remedy.price}.\n"
    yield "\n"


def sign_words(sign: Sign) -> str:
    """A fact and its weights."""
    weights = f"{sign.yes:+g}" if not sign.no else f"{sign.yes:+g} / {sign.no:+g}"
    if sign.word is not None:
        return f"`{sign.fact}` {sign.word} ({weights})"
    if sign.ramp is not None:
        start, end = sign.ramp
        return f"`{sign.fact}` from {start:g} to {end:g} ({weights})"
    return f"`{sign.fact}` ({weights})"


def facts() -> Iterator[str]:
    """The vocabulary."""
    for name, group in GROUPS.items():
        yield f"| {name} | type | definition |\n|---|---|---|\n"
        for kind in group:
            choices = f": {', '.join(kind.choices)}" if kind.choices else ""
            yield f"| `{kind.name}` | {kind.type} | {described(kind)}{choices} |\n"
        yield "\n"


def tests() -> Iterator[str]:
    """What can be looked at next."""
    yield "## Tests\n\n| test | minutes | what to do |\n|---|---|---|\n"
    for item in EXPERIMENTS:
        yield f"| {item.name} | {item.minutes:g} | {item.how} |\n"
    yield "\n"


def with_tables(page: Path, tables: Iterable[str]) -> str:
    """The text of a page with these tables between its two comments."""
    before, _, rest = page.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "".join(tables) + END + after


def main() -> int:
    """Rewrite or compare; 1 if a comparison failed."""
    current = {
        DOCS / "causes.md": with_tables(DOCS / "causes.md", [*causes(), *tests()]),
        DOCS / "facts.md": with_tables(DOCS / "facts.md", facts()),
        SCHEMA_PATH: json.dumps(schema(), indent=1) + "\n",
    }
    stale = [path for path, text in current.items() if path.read_text() != text]
    if stale and "--check" in sys.argv[1:]:
        names = ", ".join(path.name for path in stale)
        print(f"stale: {names}; run `python recipes/docs/causes.py`")
        return 1
    for path in stale:
        path.write_text(current[path])
    return 0


if __name__ == "__main__":
    sys.exit(main())
