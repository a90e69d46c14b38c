"""An engine on its own thread: callers on others, and no step that notices them half-way."""

from __future__ import annotations

import threading

import pytest
import torch
from tests import tiny
from tests.tabular import TabularModel

from forerun.engine import intake
from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.thread import EngineThread
from forerun.errors import EngineStopped, InvalidRequest, NumericalError, QueueFull
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(seed=3, max_tokens=80, ignore_eos=True)
TIMEOUT_S = 300.0


class Gated(TabularModel):
    """Stops within every pass, between draft and verification, until it is let through."""

    def __init__(self, model: TabularModel) -> None:
        super().__init__(log_probs=model.log_probs, order=model.order, store=model.store)
        self.entered = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)
        self.error: Exception | None = None

    def forward(self, batch):
        self.entered.release()
        assert self.passes.acquire(timeout=TIMEOUT_S)
        if self.error is not None:
            raise self.error
        return super().forward(batch)

    def let(self, num_passes: int = 1000) -> None:
        self.passes.release(num_passes)

    def wait_inside(self, num_passes: int) -> None:
        """Until it has been entered so many more times."""
        for _ in range(num_passes):
            assert self.entered.acquire(timeout=TIMEOUT_S)


@pytest.fixture
def engine(target: TabularModel, draft: TabularModel) -> Engine:
    return tiny.engine_over(target, tiny.drafting(draft, 8), max_batch=3, max_waiting=40)


def alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    return tiny.engine_over(tiny.tabular(0)).generate([prompt], params)[0].token_ids


def test_texts_are_those_of_the_engine_alone(engine, target, draft):
    with EngineThread(engine) as running:
        tickets = [running.submit([n], PARAMS) for n in range(8)]
        chunks = [list(ticket) for ticket in tickets]
        outputs = [ticket.result(TIMEOUT_S) for ticket in tickets]
    for n, (output, its_chunks) in enumerate(zip(outputs, chunks, strict=True)):
        assert output.token_ids == alone([n], PARAMS)
        assert output.token_ids == tuple(t for chunk in its_chunks for t in chunk.token_ids)
        assert [c.finish_reason for c in its_chunks][-1] == "length"
    assert (target.store.num_free, draft.store.num_free) == (4, 4)


def test_many_threads_submit_and_abort_at_once(engine, target, draft):
    found: dict[int, tuple[int, ...]] = {}
    reasons: set[str] = set()

    def call(first: int) -> None:
        for n in range(first, 48, 6):
            ticket = running.submit([n % 8, n // 8], PARAMS)
            if n % 5 == 0:
                ticket.abort()
                reasons.add(ticket.result(TIMEOUT_S).completions[0].finish_reason)
            else:
                found[n] = ticket.result(TIMEOUT_S).token_ids

    with EngineThread(engine) as running:
        callers = [threading.Thread(target=call, args=(first,)) for first in range(6)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(TIMEOUT_S)
    assert reasons <= {"abort", "length"}
    assert found == {n: alone([n % 8, n // 8], PARAMS) for n in range(48) if n % 5}
    assert (target.store.num_free, draft.store.num_free) == (4, 4)


def test_calling_off_between_draft_and_verification(target, draft):
    gated = Gated(target)
    engine = tiny.engine_over(gated, tiny.drafting(draft, 8))
    with EngineThread(engine) as running:
        ticket, other = running.submit([1], LONG), running.submit([2], PARAMS)
        gated.let(3)
        gated.wait_inside(4)  # the drafts of the fourth step are made, the target is at work
        ticket.abort()
        with pytest.raises(TimeoutError):
            ticket.result(0)
        gated.let()
        output = ticket.result(TIMEOUT_S)
        assert other.result(TIMEOUT_S).token_ids == alone([2], PARAMS)
    (completion,) = output.completions
    assert completion.finish_reason == "abort"
    assert 4 <= len(completion.token_ids) < 80
    assert completion.token_ids == alone([1], LONG)[: len(completion.token_ids)]
    assert (target.store.num_free, draft.store.num_free) == (4, 4)


def test_what_cannot_be_honoured_is_refused_at_once(target):
    gated = Gated(target)
    with EngineThread(tiny.engine_over(gated)) as running:
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            running.submit([])
        ticket = running.submit([1], LONG, "mine")
        with pytest.raises(InvalidRequest, match="'mine' is already in use"):
            running.submit([1], PARAMS, "mine")
        gated.let()
        assert ticket.result(TIMEOUT_S).request_id == "mine"


def test_a_name_that_is_another_requests_sample(target):
    gated = Gated(target)
    with EngineThread(tiny.engine_over(gated)) as running:
        running.submit([1], SamplingParams(seed=1, n=2, max_tokens=8), "a")
        ticket = running.submit([1], PARAMS, "a/1")
        gated.let()
        with pytest.raises(InvalidRequest, match="'a/1' is already in use"):
            ticket.result(TIMEOUT_S)


def test_calling_off_what_has_ended_does_not_end_a_request_of_the_same_name(target):
    gated = Gated(target)
    with EngineThread(tiny.engine_over(gated)) as running:
        gated.let(PARAMS.max_tokens)
        first = running.submit([1], PARAMS, "mine")
        first.result(TIMEOUT_S)
        second = running.submit([2], PARAMS, "mine")
        first.abort()
        gated.let()
        assert second.result(TIMEOUT_S).token_ids == alone([2], PARAMS)


def test_a_full_queue_refuses_and_has_room_again(target):
    gated = Gated(target)
    engine = tiny.engine_over(gated, max_batch=1, max_waiting=1)
    with EngineThread(engine) as running:
        tickets = [running.submit([1], PARAMS), running.submit([2], PARAMS)]
        with pytest.raises(QueueFull, match="2 sequences run and wait, at most 2 may"):
            running.submit([3], PARAMS)
        gated.let()
        for ticket in tickets:
            ticket.result(TIMEOUT_S)
        assert running.submit([3], PARAMS).result(TIMEOUT_S).token_ids == alone([3], PARAMS)


def test_places_of_several_samples_are_given_back(target):
    engine = tiny.engine_over(target, max_batch=2, max_waiting=1)
    with EngineThread(engine) as running:
        for seed in range(3):
            samples = SamplingParams(seed=seed, max_tokens=2, n=3)
            assert len(running.submit([1], samples).result(TIMEOUT_S).completions) == 3
        assert not running.is_full


@pytest.mark.parametrize(
    ("prompts", "changes"),
    [
        ([[1]] * 2000, {"prompt_logprobs": 5}),
        ([[1] * 20], {"n": 40, "logprobs": 7, "max_tokens": 80}),
    ],
)
def test_an_answer_has_a_limit_of_log_probabilities(target, monkeypatch, prompts, changes):
    monkeypatch.setattr(intake, "MAX_LOGPROBS", 10_000)
    engine = tiny.engine_over(target, max_batch=4, max_waiting=4000)
    with EngineThread(engine) as running:
        message = f"{len(prompts)} prompts x n = .* log-probabilities; an answer may hold 10000"
        with pytest.raises(InvalidRequest, match=message):
            running.submit_all(prompts, SamplingParams(seed=1, **changes))
        assert not engine.has_unfinished
        running.submit_all(prompts[:10], SamplingParams(seed=1, **changes | {"n": 1}))
        # No more tokens are counted than the context has room for.
        running.submit([1], SamplingParams(seed=1, logprobs=7, max_tokens=10_000))


def test_a_deadline(engine):
    with EngineThread(engine) as running:
        ticket = running.submit([1], LONG, terms=RequestTerms(deadline_s=1e-9))
        assert [chunk.finish_reason for chunk in ticket] == ["deadline"]
        assert ticket.result(TIMEOUT_S).token_ids == ()


def test_a_sick_request_fails_alone(target):
    law = target.log_probs.clone()
    law[:, 7] = -torch.inf
    law = law.log_softmax(-1)
    law[target.state_of([7])] = torch.nan
    sick = TabularModel(log_probs=law, order=target.order, store=target.store)
    with EngineThread(tiny.engine_over(sick)) as running:
        bad, good = running.submit([7], PARAMS), running.submit([1], PARAMS)
        with pytest.raises(NumericalError, match="NaN"):
            bad.result(TIMEOUT_S)
        assert len(good.result(TIMEOUT_S).token_ids) == 12


def test_an_error_of_the_engine_reaches_everybody(target):
    gated = Gated(target)
    gated.error = RuntimeError("the device is gone")
    running = EngineThread(tiny.engine_over(gated))
    running.start()
    tickets = [running.submit([n], PARAMS) for n in range(6)]
    gated.let()
    for ticket in tickets:
        with pytest.raises(EngineStopped, match="ended by an error: the device is gone") as caught:
            ticket.result(TIMEOUT_S)
        assert caught.value.__cause__ is gated.error
        with pytest.raises(EngineStopped):
            list(ticket)
    with pytest.raises(EngineStopped, match="the device is gone"):
        running.submit([1], PARAMS)
    running.close()


def test_closing_ends_what_goes_on(target, draft):
    gated = Gated(target)
    engine = tiny.engine_over(gated, tiny.drafting(draft, 8), max_batch=3)
    with EngineThread(engine) as running:
        tickets = [running.submit([n], LONG) for n in range(6)]
        gated.let(3)
        gated.wait_inside(4)
        threading.Timer(0.01, gated.let).start()  # closing waits for the step that is going on
    for ticket in tickets:
        with pytest.raises(EngineStopped, match="closed"):
            ticket.result(TIMEOUT_S)
        ticket.abort()
    with pytest.raises(EngineStopped, match="closed"):
        running.submit([1], PARAMS)
    assert (target.store.num_free, draft.store.num_free) == (4, 4)
    assert not engine.has_unfinished


def test_waiting_for_a_result_has_an_end(target):
    gated = Gated(target)
    with EngineThread(tiny.engine_over(gated)) as running:
        ticket = running.submit([1], PARAMS)
        with pytest.raises(TimeoutError, match="goes on after 0 s"):
            ticket.result(0)
        gated.let()
