from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from forerun.theory.record import StepRecord

STEP = StepRecord(
    cycle_id=7,
    t_s=1.5,
    request_id="r",
    step=2,
    method="draft-model",
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


@pytest.fixture
def step_record() -> Callable[..., StepRecord]:
    return lambda **changes: replace(STEP, **changes)
