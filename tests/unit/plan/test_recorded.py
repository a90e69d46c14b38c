from __future__ import annotations

import pytest
from msgspec.structs import replace
from tests.records import HEADER, REQUEST, STEP

from forerun.errors import InvalidRequest, InvalidTrace
from forerun.plan.workload import (
    Constant,
    SimulatedServerConfig,
    load_workload,
)
from forerun.trace.files import open_trace


def request_of(name, *, arrived_s, first_s, num_prompt, num_output, drafts=()):
    """A request's records: its first token ends a cycle of 10 ms, then one record per draft."""
    first = replace(
        STEP, request_id=name, t_s=first_s - 0.010, draft_s=0.0, verify_s=0.009, other_s=0.001,
        method="plain", k_budget=0, num_drafted=0, depth_drafted=0, num_accepted=0, num_emitted=1,
        num_prefill_rows=num_prompt, last_token_source="bonus",
    )  # fmt: skip
    steps = [
        replace(STEP, request_id=name, num_accepted=n, num_emitted=n + 1, t_s=first_s + i)
        for i, n in enumerate(drafts)
    ]
    end = replace(
        REQUEST, request_id=name, ttft_s=first_s - arrived_s, num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
    )  # fmt: skip
    return [first, *steps, end]


@pytest.fixture
def load(tmp_path):
    def run(records, text="trace = 't.jsonl'\nserver = {max_k = 6}\n"):
        with open_trace(tmp_path / "t.jsonl") as writer:
            for record in [HEADER, *records]:
                writer.add(record)
        path = tmp_path / "w.toml"
        path.write_text(text)
        return load_workload(path)

    return run


def test_a_trace_is_repeated(load):
    late = request_of(
        "late", arrived_s=107.5, first_s=108.0, num_prompt=30, num_output=9, drafts=[4] * 20
    )
    early = request_of(
        "early", arrived_s=100.0, first_s=108.5, num_prompt=20, num_output=5, drafts=[1] * 20
    )
    found = load([*late, *early])
    assert found.requests == 2
    assert found.arrivals == pytest.approx((0.0, 7.5))
    assert found.prompt_tokens == (20, 30)
    assert found.output_tokens == (5, 9)
    assert found.phases[0].acceptance == (1.0, 0.5, 0.5, 0.5)
    assert found.server == SimulatedServerConfig(max_k=6)


def test_requests_that_did_not_end_are_left_out(load):
    whole = request_of("a", arrived_s=0.0, first_s=1.0, num_prompt=3, num_output=2)
    cut = request_of("b", arrived_s=0.0, first_s=1.0, num_prompt=3, num_output=2)[:-1]
    found = load([*whole, *cut])
    assert found.requests == 1
    assert found.phases[0].acceptance == Constant(alpha=0.0)
    with pytest.raises(InvalidTrace, match="nothing to repeat"):
        load(cut)


def test_what_the_trace_decides_cannot_be_said_beside_it(load):
    whole = request_of("a", arrived_s=0.0, first_s=1.0, num_prompt=3, num_output=2)
    with pytest.raises(InvalidRequest, match="unknown field `requests`"):
        load(whole, "trace = 't.jsonl'\nrequests = 3\n")
    with pytest.raises(InvalidRequest, match="trace is 3; it must be a text"):
        load(whole, "trace = 3\n")
    with pytest.raises(InvalidRequest, match=r"server\.max_batch is 0; it must be a .* at least 1"):
        load(whole, "trace = 't.jsonl'\nserver = {max_batch = 0}\n")
    with pytest.raises(InvalidTrace, match="cannot be read"):
        load(whole, "trace = 'other.jsonl'\n")
