from __future__ import annotations

import json
from dataclasses import FrozenInstanceError

import pytest

from forerun.theory.record import SCHEMA_VERSION, RequestRecord, StepRecord, TraceHeader

HEADER = TraceHeader(
    target="target",
    target_hash="t0",
    draft=None,
    draft_hash=None,
    tokenizer_hash="k0",
    device="cpu",
    versions={"torch": "2.13.0"},
)
REQUEST = RequestRecord(
    request_id="r",
    parameters={"temperature": 1.0, "stop": ["\n"], "logit_bias": {"3": -1.0}, "seed": None},
    tags=("python", "chat"),
    num_prompt_tokens=12,
    num_output_tokens=34,
    ttft_s=0.2,
    prefill_s=0.15,
    finish_reason="stop",
)


@pytest.mark.parametrize("record", [HEADER, REQUEST], ids=["header", "request"])
def test_records_survive_json(record):
    back = json.loads(json.dumps(record.to_dict()))
    if "tags" in back:
        back["tags"] = tuple(back["tags"])
    assert type(record)(**back) == record


def test_step_survives_json(step_record):
    record = step_record(acceptance_probability=0.7, graph_hit=False)
    assert StepRecord(**json.loads(json.dumps(record.to_dict()))) == record


def test_the_header_carries_the_schema_version():
    assert HEADER.to_dict()["schema_version"] == SCHEMA_VERSION


def test_token_ids_are_absent_unless_asked_for(step_record):
    assert step_record().to_dict()["token_ids"] is None


def test_records_do_not_change(step_record):
    with pytest.raises(FrozenInstanceError):
        step_record().num_accepted = 3
