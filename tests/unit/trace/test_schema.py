from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from tests.records import FULL, HEADER, REQUEST, STEP

from forerun.trace.arrow import FOLDERS, TYPES
from forerun.trace.schema import CONVERSIONS, KINDS, kind_of, record_from


@pytest.mark.parametrize("record", [HEADER, REQUEST, STEP, FULL], ids=lambda r: type(r).__name__)
def test_records_survive_json(record):
    values = json.loads(json.dumps(record.to_dict()))
    assert record_from(kind_of(record), values) == record


def test_fields_with_defaults_may_be_missing():
    values = {name: value for name, value in STEP.to_dict().items() if value is not None}
    assert "token_ids" not in values
    assert record_from("step", values) == STEP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted": "two"}, "num_accepted is 'two', not int"),
        ({"num_accepted": True}, "num_accepted is True, not int"),
        ({"num_accepted": 2.0}, "num_accepted is 2.0, not int"),
        ({"draft_s": None}, "draft_s is None, not float"),
        ({"draft_s": -1.0}, "_s is (-1.0|nan|inf)"),
        ({"verify_s": float("nan")}, "_s is (-1.0|nan|inf)"),
        ({"request_id": 3}, "request_id is 3, not str"),
        ({"graph_hit": 1}, r"graph_hit is 1, not bool \| None"),
        ({"token_ids": [1, "x"]}, "token_ids is"),
        ({"target_entropies": 0.5}, "target_entropies is 0.5"),
        ({"num_accepted": 5}, "5 accepted of 4 nodes, 4 deep"),
        ({"num_accepted": -1}, "-1 accepted"),
        ({"depth_drafted": 6}, "6 deep"),
        ({"num_emitted": 4}, "4 emitted of 2 accepted"),
        ({"num_accepte": 2}, "unknown fields num_accepte"),
    ],
)
def test_what_cannot_be_a_step_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        record_from("step", STEP.to_dict() | changes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("banana", {}, "kind 'banana'"),
        (None, {}, "kind None"),
        (["step"], {}, "kind"),
        ("step", {"cycle_id": 1}, "no t_s"),
        ("header", HEADER.to_dict() | {"schema_version": 99}, "schema version 99; this forerun"),
        ("header", HEADER.to_dict() | {"versions": {"torch": 2}}, "versions is"),
        ("request", REQUEST.to_dict() | {"parameters": []}, "parameters is"),
        ("request", REQUEST.to_dict() | {"tags": "python"}, "tags is 'python'"),
    ],
)
def test_what_is_no_record_is_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        record_from(kind, values)


def test_a_request_that_never_got_a_token_is_a_record():
    record = replace(REQUEST, ttft_s=None, prefill_s=None, finish_reason="abort")
    assert record_from("request", record.to_dict()) == record


def test_every_field_can_be_read_and_stored():
    annotations = {
        kind: {str(field.type).removesuffix(" | None") for field in fields(made)}
        for kind, made in KINDS.items()
    }
    assert set.union(*annotations.values()) <= CONVERSIONS.keys()
    assert {*FOLDERS.values(), "header"} == KINDS.keys()
    assert annotations["step"] | annotations["request"] <= TYPES.keys()
