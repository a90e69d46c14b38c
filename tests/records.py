"""Trace records for tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from forerun.theory.record import RequestRecord, StepRecord, TraceHeader
from forerun.trace.files import ENCODER, Record

HEADER = TraceHeader(
    target="target",
    target_hash="t0",
    draft="draft",
    draft_hash="d0",
    tokenizer_hash="k0",
    device="cpu",
    versions={"torch": "2.13.0", "python": "3.12"},
)
STEP = StepRecord(
    cycle_id=7,
    t_s=1.5,
    request_id="r",
    step=2,
    method="draft_model",
    k_budget=4,
    num_drafted=4,
    depth_drafted=4,
    num_accepted=2,
    num_emitted=3,
    draft_s=0.01,
    verify_s=0.02,
    other_s=0.001,
    batch_rows=5,
    num_prefill_rows=0,
    context_tokens=40,
    last_token_source="recovered",
    expected_accepted=2.5,
)
REQUEST = RequestRecord(
    request_id="r",
    parameters={"temperature": 1.0, "stop": ["\n"], "logit_bias": {"3": -1.0}, "seed": None},
    tags=("python", "größe"),
    num_prompt_tokens=12,
    num_output_tokens=34,
    ttft_s=0.2,
    prefill_s=0.15,
    finish_reason="stop",
    prompt_token_ids=(0, 7, 12345, *range(9)),
)
FULL = replace(
    STEP,
    acceptance_probability=0.7,
    stop_reason="budget",
    drafter_hash="d0",
    graph_hit=False,
    token_ids=(5, 0, 12345),
    rule="token",
    target_probs=(0.5, 0.25, 0.125, 0.5),
    draft_probs=(0.25, 0.5, 0.5, 0.5),
)
"""A step with every field filled."""


def steps(count: int, **changes: Any) -> Iterator[StepRecord]:
    """Steps of one request, a millisecond apart."""
    for index in range(count):
        yield replace(STEP, cycle_id=index, step=index, t_s=index / 1000, **changes)


def plain(**changes: Any) -> StepRecord:
    """A step that drafts nothing."""
    nothing = {"method": "plain", "k_budget": 0, "num_drafted": 0, "depth_drafted": 0}
    values: dict[str, Any] = {**nothing, "num_accepted": 0, "num_emitted": 1, "draft_s": 0.0}
    return replace(STEP, **(values | {"last_token_source": "bonus"} | changes))


def line_of(record: Record) -> bytes:
    """The line of a record in a trace."""
    return ENCODER.encode(record) + b"\n"
