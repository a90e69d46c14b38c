from __future__ import annotations

import json

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP

from forerun.theory.record import SCHEMA_VERSION, StepRecord


@pytest.mark.parametrize("record", [HEADER, REQUEST], ids=["header", "request"])
def test_records_survive_json(record):
    back = json.loads(json.dumps(record.to_dict()))
    tuples = {name: tuple(back[name]) for name in ("tags", "prompt_token_ids") if name in back}
    assert type(record)(**(back | tuples)) == record


def test_step_survives_json():
    record = replace(STEP, acceptance_probability=0.7, graph_hit=False)
    assert StepRecord(**json.loads(json.dumps(record.to_dict()))) == record


def test_the_header_carries_the_schema_version():
    assert HEADER.to_dict()["schema_version"] == SCHEMA_VERSION


def test_token_ids_are_absent_unless_asked_for():
    assert STEP.to_dict()["token_ids"] is None


def test_records_do_not_change():
    with pytest.raises(AttributeError):
        STEP.num_accepted = 3
