from __future__ import annotations

import json
import re

import msgspec
import pytest
from msgspec.structs import replace
from tests.records import FULL, HEADER, REQUEST, STEP

from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import checked

KINDS = {kind.__struct_config__.tag: kind for kind in (TraceHeader, RequestRecord, StepRecord)}


def record_from(kind, values):
    return checked(msgspec.convert(values, KINDS[kind]))


@pytest.mark.parametrize("record", [HEADER, REQUEST, STEP, FULL], ids=lambda r: type(r).__name__)
def test_records_survive_json(record):
    values = json.loads(json.dumps(record.to_dict()))
    assert record_from(str(record.__struct_config__.tag), values) == record


def test_fields_with_defaults_may_be_missing():
    values = {name: value for name, value in STEP.to_dict().items() if value is not None}
    assert "token_ids" not in values
    assert record_from("step", values) == STEP


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_accepted": "two"}, "Expected `int`, got `str` - at `$.num_accepted`"),
        ({"num_accepted": True}, "Expected `int`, got `bool` - at `$.num_accepted`"),
        ({"num_accepted": 2.0}, "Expected `int`, got `float` - at `$.num_accepted`"),
        ({"draft_s": None}, "Expected `float`, got `null` - at `$.draft_s`"),
        ({"draft_s": -1.0}, "Expected `float` >= 0.0 - at `$.draft_s`"),
        ({"verify_s": float("nan")}, "at `$.verify_s`"),
        ({"request_id": 3}, "Expected `str`, got `int` - at `$.request_id`"),
        ({"graph_hit": 1}, "Expected `bool | null`, got `int` - at `$.graph_hit`"),
        ({"token_ids": [1, "x"]}, "at `$.token_ids[1]`"),
        ({"target_probs": [0.5]}, "1 probabilities of 4 drafted tokens"),
        ({"draft_probs": [0.5, 2.0, 0.1, 0.1]}, "Expected `float` <= 1.001"),
        ({"target_probs": [0.5, float("nan"), 0.1, 0.1]}, "at `$.target_probs[1]`"),
        ({"num_accepted": 5}, "5 accepted of 4 nodes, 4 deep"),
        ({"num_accepted": -1}, "Expected `int` >= 0 - at `$.num_accepted`"),
        ({"depth_drafted": 6}, "6 deep"),
        ({"num_emitted": 4}, "4 emitted of 2 accepted"),
        ({"num_accepte": 2}, "unknown field `num_accepte`"),
    ],
)
def test_what_cannot_be_a_step_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record_from("step", STEP.to_dict() | changes)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("step", {"cycle_id": 1}, "missing required field `t_s`"),
        ("header", HEADER.to_dict() | {"schema_version": 99}, "schema version 99; this forerun"),
        ("header", HEADER.to_dict() | {"versions": {"torch": 2}}, "at `$.versions[...]`"),
        ("request", REQUEST.to_dict() | {"parameters": []}, "at `$.parameters`"),
        ("request", REQUEST.to_dict() | {"tags": "python"}, "at `$.tags`"),
    ],
)
def test_what_is_no_record_is_refused(kind, values, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record_from(kind, values)


def test_a_request_that_never_got_a_token_is_a_record():
    record = replace(REQUEST, ttft_s=None, prefill_s=None, finish_reason="abort")
    assert record_from("request", record.to_dict()) == record
