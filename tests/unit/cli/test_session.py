"""One request of `forerun generate`: its times, and what its trace records."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

from tests import tiny
from tests.records import HEADER

from forerun.cli import session
from forerun.drafters.draft_model import DraftModel
from forerun.sampling.config import SamplingParams
from forerun.theory.record import RequestRecord, StepRecord
from forerun.trace.files import open_trace, read_trace

KINDS = (StepRecord, RequestRecord)
PARAMS = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


class AbstainingDraftModel(DraftModel):
    """A draft model that is given a budget at every step and proposes nothing."""

    def propose(self, requests, plans):
        return [None] * len(requests)


def test_the_first_token_is_timed_from_the_request_and_not_to_its_end(monkeypatch):
    ticks = map(float, count())
    monkeypatch.setattr(session, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    engine = tiny.engine_over(tiny.tabular())
    run = session.Session(engine, trace=None, trace_tokens=False)
    assert len(list(run.run([1, 2, 3], PARAMS))) == 5
    # The clock is read at the start and after every step: five steps of one token each.
    assert run.figures.ttft_s == 1.0
    assert run.figures.total_s == 5.0


def test_a_step_that_drafted_nothing_has_no_drafter_hash(tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = tiny.engine_over(tiny.tabular(), AbstainingDraftModel(tiny.tabular(5), 8))
    with open_trace(path) as trace:
        trace.add(HEADER)
        run = session.Session(
            engine, trace=trace, trace_tokens=False, drafter_hashes={"draft_model": "d0"}
        )
        list(run.run([1, 2, 3], PARAMS))
    steps = [record for record in read_trace(path) if isinstance(record, StepRecord)]
    assert "draft_model" in {step.method for step in steps}
    assert {step.drafter_hash for step in steps} == {None}


def test_a_trace_names_every_sample_alike_in_steps_and_requests(tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = tiny.engine_over(tiny.tabular(), DraftModel(tiny.tabular(5), 8))
    with open_trace(path) as trace:
        trace.add(HEADER)
        run = session.Session(engine, trace=trace, trace_tokens=False)
        list(run.run([1, 2, 3], SamplingParams(temperature=1.0, max_tokens=5, n=2)))
    _, *records = read_trace(path)
    names = [{r.request_id for r in records if isinstance(r, kind)} for kind in KINDS]
    assert names[0] == names[1]
    assert len(names[0]) == 2


def test_penalties_leave_the_targets_probabilities_out(tmp_path):
    path = tmp_path / "trace.jsonl"
    engine = tiny.engine_over(tiny.tabular(), DraftModel(tiny.tabular(5), 8))
    with open_trace(path) as trace:
        trace.add(HEADER)
        run = session.Session(engine, trace=trace, trace_tokens=False, trace_probabilities=True)
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=24, frequency_penalty=1.0)
        list(run.run([1, 2, 3], params))
    steps = [record for record in read_trace(path) if isinstance(record, StepRecord)]
    drafting = [step for step in steps if step.num_drafted]
    assert drafting and all(step.target_probs is None for step in drafting)
