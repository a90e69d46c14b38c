"""Facts files: what a person knows, checked, and never more than they said."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from forerun.diagnose.evidence import FACTS, Evidence
from forerun.diagnose.readers import documents
from forerun.diagnose.readers.text import read_text
from forerun.errors import ForerunError

SCHEMA = Path(documents.__file__).with_name("facts.schema.json")
YAML = """\
# notes
---
forerun_facts: 1
source: on-call notes
facts:
  tokens_per_s: 61
  output_differs: no
  changed: [target, driver]
  verify_rows: [1, 2, 4]
  self_draft_rate: {value: 0.99, source: probe, interval: [0.98, 1.0]}
"""


def read(text: str) -> Evidence:
    return read_text(io.BytesIO(text.encode()), "facts")


def test_yaml_with_sources_and_intervals():
    found = read(YAML)
    assert found.number("tokens_per_s") == 61 and found.flag("output_differs") is False
    assert found.words("changed") == ("target", "driver")
    assert found.numbers("verify_rows") == (1, 2, 4)
    assert found.facts["tokens_per_s"].source == "facts: on-call notes"
    fact = found.facts["self_draft_rate"]
    assert fact.source == "probe" and fact.interval is not None and fact.interval.low == 0.98


def test_json_says_the_same():
    document = {"forerun_facts": 1, "facts": {"k": 4, "output_differs": True}}
    found = read(json.dumps(document, indent=2))
    assert found.number("k") == 4 and found.flag("output_differs") is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forerun_facts: 2\nfacts: {}", "format 2"),
        ("forerun_facts: 1\nfacts: [k]", "no object named facts"),
        ("forerun_facts: 1\nfacts: {acceptance: 0.4}", "no fact 'acceptance'"),
        ("forerun_facts: 1\nfacts: {k: -1}", "k is -1"),
        ("forerun_facts: 1\nfacts: {k: {value: 1, sauce: x}}", "unknown entries sauce"),
        ("forerun_facts: 1\nfacts: {alpha_1: {value: 0.5, interval: [0.6, 0.7]}}", "does not hold"),
        ("forerun_facts: 1\nfacts: {alpha_1: {value: 0.5, interval: [a, b]}}", "two numbers"),
        ("forerun_facts: 1\nfacts: {k: 1", "not YAML"),
        ("forerun_facts: 1\na: &a [1]\nb: *a\nfacts: {}", "aliases"),
        ("forerun_facts: 1\nfacts: !!python/object/apply:os.system [ls]", "not YAML"),
    ],
)
def test_mistakes_are_named(text: str, message: str):
    with pytest.raises(ForerunError, match=message):
        read(text)


def test_the_shipped_schema_has_every_fact():
    shipped = json.loads(SCHEMA.read_text())
    assert set(shipped["properties"]["facts"]["properties"]) == set(FACTS)
