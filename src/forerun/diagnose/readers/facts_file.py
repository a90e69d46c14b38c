"""Reads and writes facts files, which hold facts as YAML or JSON.

    forerun_facts: 1
    source: notes of the on-call engineer
    facts:
      tokens_per_s: 61
      tokens_per_s_plain: 70
      output_differs: no
      changed: [target]

A value may also be an object with `value`, and optionally `source` and `interval` (two ends). The
JSON Schema beside this module says the same; `schema` makes it from the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from forerun.diagnose.evidence import FACTS, MAX_LIST, MAX_WORD, Evidence, FactKind, Reading, shown
from forerun.errors import InvalidRequest
from forerun.theory.intervals import Interval
from forerun.theory.record import Json

__all__ = ["KEY", "facts_document", "read_facts", "schema"]

FORMAT = 1
KEY = "forerun_facts"
SCHEMA_PATH = Path(__file__).with_name("facts.schema.json")


def read_facts(document: Mapping[str, object], name: str) -> Evidence:
    """Return the evidence of a parsed facts file.

    Raises:
        InvalidRequest: it is of a newer format, or holds no facts; a fact that is unknown or out of
            range is named. A misspelled name must not be taken for a fact that was not observed.
    """
    version = document.get(KEY)
    if version != FORMAT:
        raise InvalidRequest(
            f"{name} has facts format {shown(version)}; this forerun reads {FORMAT}"
        )
    facts = document.get("facts")
    if not isinstance(facts, Mapping):
        raise InvalidRequest(f"{name} has no object named facts")
    given = document.get("source")
    source = f"{name}: {given[:MAX_WORD]}" if isinstance(given, str) else name
    evidence = Evidence(readings=[Reading(source=name, kinds={"facts"}, num_lines=len(facts))])
    for key, value in facts.items():
        try:
            add_fact(evidence, str(key), value, source)
        except ValueError as error:
            raise InvalidRequest(f"{name}: {error}") from error
    return evidence


def facts_document(evidence: Evidence, source: str) -> dict[str, Json]:
    """Return evidence as the content of a facts file for `read_facts`."""
    facts: dict[str, Json] = {}
    for fact in evidence:
        value: Json = [*fact.value] if isinstance(fact.value, tuple) else fact.value
        entry: dict[str, Json] = {"value": value, "source": fact.source[:MAX_WORD]}
        if fact.interval is not None:
            entry["interval"] = [fact.interval.low, fact.interval.high]
        facts[fact.name] = entry
    return {KEY: FORMAT, "source": source[:MAX_WORD], "facts": facts}


def add_fact(evidence: Evidence, key: str, value: object, source: str) -> None:
    """Add one entry of a facts file, which is a value or an object with a value."""
    if not isinstance(value, Mapping):
        evidence.add(key, value, source)
        return
    if unknown := set(map(str, value)) - {"value", "source", "interval"}:
        raise ValueError(f"{key} has unknown entries {', '.join(sorted(unknown))[:MAX_WORD]}")
    own = value.get("source")
    where = own[:MAX_WORD] if isinstance(own, str) else source
    evidence.add(key, value.get("value"), where, interval_of(key, value))


def interval_of(key: str, value: Mapping[str, object]) -> Interval | None:
    """Check that the interval of a fact has two ends around its value."""
    ends, estimate = value.get("interval"), value.get("value")
    if ends is None:
        return None
    numbers = [estimate, *ends] if isinstance(ends, list) else []
    if len(numbers) != 3 or not all(
        isinstance(number, int | float) and not isinstance(number, bool) for number in numbers
    ):
        raise ValueError(f"{key}: interval must be two numbers around a number")
    try:
        middle, low, high = (float(number) for number in numbers)
    except OverflowError as error:
        raise ValueError(f"{key}: interval has a number that is too large") from error
    if not low <= middle <= high:
        raise ValueError(f"{key}: interval {low:g} to {high:g} does not hold {middle:g}")
    return Interval(estimate=middle, low=low, high=high)


def schema() -> dict[str, Json]:
    """Return the JSON Schema of facts files."""
    properties: dict[str, Json] = {name: property_of(kind) for name, kind in FACTS.items()}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Facts for forerun diagnose",
        "type": "object",
        "required": [KEY, "facts"],
        "additionalProperties": False,
        "properties": {
            KEY: {"const": FORMAT, "description": "format of this file"},
            "source": {"type": "string", "description": "who or what states it"},
            "facts": {
                "type": "object",
                "additionalProperties": False,
                "properties": properties,
            },
        },
    }


def property_of(kind: FactKind) -> dict[str, Json]:
    """Return the JSON Schema of one entry: a value, or an object with source and interval."""
    bare = value_schema(kind)
    detailed: dict[str, Json] = {
        "type": "object",
        "required": ["value"],
        "additionalProperties": False,
        "properties": {
            "value": bare,
            "source": {"type": "string"},
            "interval": {
                "type": "array",
                "items": {"type": "number"},
                "minItems": 2,
                "maxItems": 2,
            },
        },
    }
    return {"description": described(kind), "anyOf": [bare, detailed]}


def value_schema(kind: FactKind) -> dict[str, Json]:
    """Return the JSON Schema of a fact's value without source and interval."""
    if kind.type == "flag":
        return {"type": "boolean"}
    if kind.type in ("word", "words"):
        single: dict[str, Json] = {"type": "string", "maxLength": MAX_WORD}
        if kind.choices:
            single = {"enum": list(kind.choices)}
    else:
        single = {"type": "number", "minimum": kind.low}
        if kind.high is not None:
            single["maximum"] = kind.high
    if kind.type in ("number", "word"):
        return single
    return {"type": "array", "items": single, "maxItems": MAX_LIST}


def described(kind: FactKind) -> str:
    """Return definition and unit of a fact as text."""
    return f"{kind.definition} ({kind.unit})" if kind.unit else kind.definition
