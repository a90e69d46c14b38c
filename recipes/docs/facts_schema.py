"""The JSON Schema of facts files, from the vocabulary of facts."""

from __future__ import annotations

from pathlib import Path

from forerun.doctor.evidence import FACTS, MAX_LIST, MAX_WORD, FactKind
from forerun.doctor.readers import sources as documents
from forerun.doctor.readers.sources import FORMAT, KEY
from forerun.theory.record import Json

SCHEMA_PATH = Path(documents.__file__).with_name("facts.schema.json")


def schema() -> dict[str, Json]:
    """Return the JSON Schema of facts files."""
    properties: dict[str, Json] = {
        name: {"description": described(kind), "$ref": f"#/$defs/{definition_name(kind)}"}
        for name, kind in FACTS.items()
    }
    definitions: dict[str, Json] = {definition_name(k): entry_schema(k) for k in FACTS.values()}
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
        "$defs": definitions,
    }


def definition_name(kind: FactKind) -> str:
    """Return the name of the definition that all facts of the same values share."""
    if kind.choices:
        return f"{kind.type} of {kind.name}"
    low = f" from {kind.low:g}" if kind.low else ""
    return f"{kind.type}{low}{'' if kind.high is None else f' up to {kind.high:g}'}"


def entry_schema(kind: FactKind) -> dict[str, Json]:
    """Return the JSON Schema of an entry: a value, or an object with source and interval."""
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
    return {"anyOf": [bare, detailed]}


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
