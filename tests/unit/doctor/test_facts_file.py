"""Facts files: what a person knows, checked, and never more than they said."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from forerun.doctor.evidence import FACTS, Evidence
from forerun.doctor.readers import sources as documents
from forerun.doctor.readers.sources import read_text
from forerun.errors import ForerunError

SCHEMA = Path(documents.__file__).with_name("facts.schema.json")
FACTS_FILE = {
    "forerun_facts": 1,
    "source": "on-call notes",
    "facts": {
        "tokens_per_s": 61,
        "output_differs": False,
        "changed": ["target", "driver"],
        "verify_rows": [1, 2, 4],
        "self_draft_rate": {"value": 0.99, "source": "probe", "interval": [0.98, 1.0]},
    },
}


def read(text: str) -> Evidence:
    return read_text(io.BytesIO(text.encode()), "facts")


def test_sources_and_intervals():
    found = read(json.dumps(FACTS_FILE))
    assert found.number("tokens_per_s") == 61 and found.flag("output_differs") is False
    assert found.words("changed") == ("target", "driver")
    assert found.numbers("verify_rows") == (1, 2, 4)
    assert found.facts["tokens_per_s"].source == "facts: on-call notes"
    fact = found.facts["self_draft_rate"]
    assert fact.source == "probe" and fact.interval is not None and fact.interval.low == 0.98


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (["k"], "no object named facts"),
        ({"acceptance": 0.4}, "no fact 'acceptance'"),
        ({"k": -1}, "k is -1"),
        ({"k": {"value": 1, "sauce": "x"}}, "unknown entries sauce"),
        ({"alpha_1": {"value": 0.5, "interval": [0.6, 0.7]}}, "does not hold"),
        ({"alpha_1": {"value": 0.5, "interval": ["a", "b"]}}, "two numbers"),
    ],
)
def test_mistakes_are_named(facts: object, message: str):
    with pytest.raises(ForerunError, match=message):
        read(json.dumps({"forerun_facts": 1, "facts": facts}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"forerun_facts": 2, "facts": {}}', "format 2"),
        ('{"forerun_facts": 1, "facts": {"k": 1', "not JSON"),
        ("forerun_facts: 1\nfacts: {k: 4}", "in YAML; write it as JSON"),
    ],
)
def test_other_files_are_refused(text: str, message: str):
    with pytest.raises(ForerunError, match=message):
        read(text)


def test_the_shipped_schema_has_every_fact():
    shipped = json.loads(SCHEMA.read_text())
    assert set(shipped["properties"]["facts"]["properties"]) == set(FACTS)
