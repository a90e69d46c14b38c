"""What the trace says of a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.control.base import Capacity, Controller, Decision, Plan, RequestState
from forerun.engine import step
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords, ObservedStep
from forerun.models.base import ModelOutput, RowBatch
from forerun.sampling.config import SamplingParams
from forerun.sampling.proposal import TokenSource
from forerun.theory.acceptance import AcceptanceCounts
from forerun.theory.record import StepRecord

PARAMS = SamplingParams(seed=4, max_tokens=17, ignore_eos=True)
PROMPTS = {"a": [1, 2, 3, 4, 5, 6], "b": [3], "c": [2, 2]}


def drafted(target: TabularModel, **changes: int) -> Engine:
    return tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5), 8), **changes)


def recorded(engine: Engine, params: SamplingParams = PARAMS) -> list[StepRecord]:
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    for name, ids in PROMPTS.items():
        engine.add_request(ids, params, name)
    while engine.has_unfinished:
        engine.step()
    return records


@pytest.mark.parametrize("verification", ["auto", "block"])
def test_counts_of_a_request_add_up(target, verification):
    engine = drafted(target)
    records = recorded(engine, SamplingParams(seed=4, max_tokens=17, verification=verification))
    for name, ids in PROMPTS.items():
        mine = [record for record in records if record.request_id == name]
        completion = engine.take_output(name).completions[0]
        num_tokens = len(ids)
        for record in mine:
            assert record.context_tokens == num_tokens
            assert 0 <= record.num_accepted <= record.num_drafted <= record.k_budget <= 3
            assert record.depth_drafted == record.num_drafted
            assert 0 <= record.expected_accepted <= record.num_drafted + 1e-9
            assert record.method == ("draft_model" if record.k_budget else "plain")
            num_tokens += record.num_emitted
        assert num_tokens == len(ids) + len(completion.token_ids)
        assert all(record.num_emitted == record.num_accepted + 1 for record in mine[:-1])
        assert [record.step for record in mine] == list(range(1, len(mine) + 1))
        assert AcceptanceCounts.from_records(mine) == completion.acceptance
        assert [record.last_token_source for record in mine] == last_sources(completion, mine)


def last_sources(completion, records: list[StepRecord]) -> list[TokenSource]:
    ends, end = [], 0
    for record in records:
        end += record.num_emitted
        ends.append(completion.sources[end - 1])
    return ends


def test_sources_say_where_tokens_came_from(target):
    itself = tiny.engine_over(target, tiny.drafting(tiny.cousin(target, 5, scale=0.0), 8))
    (output,) = itself.generate([[1]], PARAMS)
    block = [TokenSource.ACCEPTED] * 3 + [TokenSource.BONUS]
    # The last step may only emit one token: it does not draft.
    assert list(output.completions[0].sources) == block * 4 + [TokenSource.PLAIN]
    found = Counter(drafted(target).generate([[1]], PARAMS)[0].completions[0].sources)
    assert found[TokenSource.RECOVERED] > 0


def test_cycles_are_numbered_timed_and_shared(target):
    records = recorded(drafted(target, prefill_chunk=2))
    cycles: dict[int, list[StepRecord]] = {}
    for record in records:
        cycles.setdefault(record.cycle_id, []).append(record)
    starts = [cycle[0].t_s for _, cycle in sorted(cycles.items())]
    assert starts == sorted(starts)
    for cycle in cycles.values():
        shared = {(r.t_s, r.draft_s, r.verify_s, r.other_s, r.batch_rows) for r in cycle}
        assert len(shared) == 1
        assert min(cycle[0].draft_s, cycle[0].verify_s, cycle[0].other_s) >= 0
        assert cycle[0].batch_rows >= sum(r.num_drafted + 1 for r in cycle)


class Slow:
    """A language model whose every pass takes a while."""

    def __init__(self, model: TabularModel, clock: list[float], seconds: float) -> None:
        self.model, self.clock, self.seconds = model, clock, seconds

    def __getattr__(self, name: str) -> object:
        return getattr(self.model, name)

    def forward(self, batch: RowBatch) -> ModelOutput:
        self.clock[0] += self.seconds
        return self.model.forward(batch)

    def greedy_chain(self, batch: RowBatch, num_tokens: int, vocab_size: int) -> torch.Tensor:
        self.clock[0] += self.seconds
        return self.model.greedy_chain(batch, num_tokens, vocab_size)


@pytest.mark.measured_times
@pytest.mark.parametrize("params", [PARAMS, replace(PARAMS, temperature=0.0)])
def test_the_target_pass_drafting_and_the_rest_are_told_apart(
    target, params, monkeypatch, unchecked
):
    """Verification is none of the pass: what it takes is to be seen."""
    clock = [0.0]
    monkeypatch.setattr(step.time, "monotonic", lambda: clock[0])
    verify = step.verify

    def slow_verify(*args):
        clock[0] += 100.0
        return verify(*args)

    monkeypatch.setattr(step, "verify", slow_verify)
    draft = Slow(tiny.cousin(target, 5), clock, 1.0)
    records = recorded(tiny.engine_over(Slow(target, clock, 10.0), tiny.drafting(draft, 8)), params)
    passes = 1 if params.greedy else 3
    assert {r.draft_s for r in records if r.num_drafted == 3} == {passes}
    assert {r.verify_s for r in records} == {10.0}
    assert {r.other_s for r in records} == {100.0}


def test_prefill_rows_are_counted(target):
    records = recorded(drafted(target, prefill_chunk=2))
    prefill = {record.cycle_id: record.num_prefill_rows for record in records}
    # "a" reads six tokens two at a time, "c" its two and "b" its one at once.
    assert [prefill[cycle] for cycle in range(4)] == [5, 2, 2, 0]


def test_the_last_row_of_a_prompt_is_a_prefill_row(target):
    engine = drafted(target, prefill_chunk=2)
    records: list[StepRecord] = []
    engine.observers[:] = [EmittedRecords(records.append)]
    engine.generate([[1, 2, 3, 4, 5]], PARAMS)
    # The third chunk is one row; only steps that emit leave a record.
    assert [(r.cycle_id, r.num_prefill_rows) for r in records[:2]] == [(2, 1), (3, 0)]


def test_the_end_of_the_context_limits_drafts(target):
    engine = drafted(target, k=7, max_context=12)
    records = recorded(engine, SamplingParams(seed=4, ignore_eos=True))
    assert max(record.context_tokens + record.num_emitted for record in records) == 12
    for record in records:
        assert record.context_tokens + record.k_budget + 1 <= 12


class Greedy(Controller):
    """A controller that asks for more than there is room for, and for less than nothing."""

    def __init__(self, k: int) -> None:
        self.k = k

    def decide(self, states: list[RequestState], capacity: Capacity) -> Decision:
        return Decision([Plan.chain("mine", self.k) for _ in states])

    def observe(self, records: list[StepRecord]) -> None:
        """Nothing to learn."""


@pytest.mark.parametrize("k", [50, 1, -1])
def test_whatever_the_controller_says_the_text_is_plain(target, k):
    engine = drafted(target, max_context=30)
    controlled = Engine(
        target=target,
        tokenizer=engine.tokenizer,
        drafter=tiny.drafting(tiny.cousin(target, 5, scale=0.1), 8),
        controller=Greedy(k),
        config=engine.config,
    )
    params = SamplingParams(seed=4, ignore_eos=True)
    plain = tiny.engine_over(target, max_context=30).generate([[1, 2]], params)
    found = controlled.generate([[1, 2]], params)
    assert len(found[0].token_ids) == 28
    assert found[0].token_ids == plain[0].token_ids
    assert (found[0].completions[0].acceptance.num_drafted > 0) == (k > 0)


def test_a_failing_listener_costs_no_token(target):
    engine = drafted(target)
    expected = engine.generate([[1]], PARAMS)[0].token_ids

    def refuse(record: StepRecord) -> None:
        raise OSError("disk full")

    engine.observers[:] = [EmittedRecords(refuse)]
    engine.add_request([1], PARAMS, "r")
    while engine.has_unfinished:
        with pytest.raises(OSError, match="disk full"):
            engine.step()
    assert engine.take_output("r").token_ids == expected
    assert target.store.num_free == 4


class Failing:
    """An observer that fails at its third step."""

    is_required = False
    wants_logits = False

    def __init__(self) -> None:
        self.num_seen = 0

    def observe(self, step: ObservedStep) -> None:
        self.num_seen += 1
        if self.num_seen == 3:
            raise KeyError("page")


def test_an_observer_that_fails_is_removed_with_one_warning(target, caplog):
    engine = drafted(target)
    expected = engine.generate([[1]], PARAMS)[0].token_ids
    failing = Failing()
    records: list[StepRecord] = []
    remaining = EmittedRecords(records.append)
    engine.observers[:] = [failing, remaining]
    assert engine.generate([[1]], PARAMS)[0].token_ids == expected
    assert engine.observers == [remaining]
    assert failing.num_seen == 3
    assert sum(record.num_emitted for record in records) == len(expected)
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert warning == "observer Failing failed and was removed: KeyError('page')"


class WithoutLogits:
    is_required = False

    def observe(self, step: ObservedStep) -> None:
        pass


class Raising(WithoutLogits):
    @property
    def wants_logits(self) -> bool:
        raise RuntimeError("closed")


class WithoutAnything:
    pass


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("kind", [WithoutLogits, Raising, WithoutAnything])
def test_an_observer_with_missing_parts_is_removed_with_one_warning(target, caplog, kind):
    engine = drafted(target)
    expected = engine.generate([[1]], PARAMS)[0].token_ids
    engine.observers[:] = [kind()]
    assert engine.generate([[1]], PARAMS)[0].token_ids == expected
    assert engine.observers == []
    (warning,) = [entry.getMessage() for entry in caplog.records if entry.levelname == "WARNING"]
    assert f"observer {kind.__name__} failed and was removed" in warning


def test_times_of_a_completion(target):
    (output,) = drafted(target).generate([[1]], PARAMS)
    assert 0 <= output.completions[0].ttft_s <= output.completions[0].total_s
