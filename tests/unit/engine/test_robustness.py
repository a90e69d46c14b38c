"""What callers, drafters and signals may do to an engine, and what it makes of them."""

from __future__ import annotations

import asyncio
import copy
import os
import pickle
import signal
import threading

import pytest
import torch
from tests import tiny

from forerun.drafters.base import Drafter
from forerun.engine.config import EngineConfig
from forerun.engine.engine import EngineGuard
from forerun.engine.thread import EngineThread
from forerun.errors import (
    EngineBusy,
    EngineStopped,
    InvalidRequest,
    MaskError,
    NumericalError,
)
from forerun.models.base import WrappedModel
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)


class Interrupting(WrappedModel):
    """Sends this process an interrupt in every pass."""

    def forward(self, batch):
        os.kill(os.getpid(), signal.SIGINT)
        return super().forward(batch)


class Misbehaving:
    """A token mask that allows everything until its output is three tokens long."""

    def __init__(self, later: object, num_told: int = 0) -> None:
        self.later = later
        self.num_told = num_told

    def fork(self) -> Misbehaving:
        return Misbehaving(self.later, self.num_told)

    def advance(self, token: int) -> None:
        self.num_told += 1

    def allowed(self) -> object:
        return self.later if self.num_told >= 3 else torch.ones(8, dtype=torch.bool)


class Unforkable(Misbehaving):
    def fork(self):
        raise RuntimeError("this grammar cannot be forked")


class Exits(Drafter):
    method = "exits"
    required_features: tuple[int, ...] = ()

    def propose(self, requests, plans):
        raise SystemExit(3)

    def observe(self, outcomes):
        raise SystemExit(4)

    def forget(self, request_id):
        raise SystemExit(5)


def test_streams_read_in_turns_lose_nothing(target):
    engine = tiny.engine_over(target)
    prompts = [[1, 2], [3], [4, 4, 4]]
    expected = [output.token_ids for output in engine.generate(prompts, PARAMS)]
    found: list[list[int]] = [[] for _ in prompts]
    streams = [engine.stream(prompt, PARAMS) for prompt in prompts]
    while streams != [None] * 3:
        for place, stream in enumerate(streams):
            chunk = next(stream, None) if stream is not None else None
            if chunk is None:
                streams[place] = None
            else:
                found[place] += chunk.token_ids
    assert [tuple(tokens) for tokens in found] == expected
    assert target.store.num_free == 4


@pytest.mark.parametrize(
    "later", [torch.ones(8), torch.ones(7, dtype=torch.bool), torch.ones(8).tolist(), None]
)
@pytest.mark.parametrize("k", [0, 3])
def test_a_mask_that_returns_something_else_ends_its_own_request_only(target, draft, later, k):
    engine = tiny.engine_over(target, tiny.drafting(draft, 8) if k else None, k=k)
    expected = engine.generate([[5, 1]], PARAMS)[0].token_ids
    sound = engine.add_request([5, 1], PARAMS)
    sick = engine.add_request([7], PARAMS, mask=Misbehaving(later))
    with pytest.raises(MaskError, match="its token mask") as failure:
        while engine.has_unfinished:
            engine.step()
    assert failure.value.request_id == sick
    engine.abort(sick)
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(sound).token_ids == expected
    assert target.store.num_free == 4


def test_parameters_that_verification_cannot_compute_end_their_own_request_only(target):
    engine = tiny.engine_over(target)
    expected = engine.generate([[5, 1]], PARAMS)[0].token_ids
    sound = engine.add_request([5, 1], PARAMS)
    params = SamplingParams(max_tokens=12)
    object.__setattr__(params, "top_k", 2**63)  # what SamplingParams itself refuses
    sick = engine.add_request([7], params)
    with pytest.raises(NumericalError, match="verification failed with its parameters") as failure:
        while engine.has_unfinished:
            engine.step()
    assert failure.value.request_id == sick
    engine.abort(sick)
    while engine.has_unfinished:
        engine.step()
    assert engine.take_output(sound).token_ids == expected
    assert target.store.num_free == 4


@pytest.mark.usefixtures("unchecked")
def test_a_request_that_cannot_be_queued_leaves_its_place(target):
    engine = tiny.engine_over(target, max_batch=1, max_waiting=0)
    with EngineThread(engine) as running:
        for _ in range(3):
            with pytest.raises(InvalidRequest, match="give RequestTerms"):
                running.submit([1], PARAMS, terms={"priority": 1})
            with pytest.raises(RuntimeError, match="cannot be forked"):
                running.submit([1], PARAMS, mask=Unforkable(None))
        assert running.submit([1], PARAMS).result(30.0).token_ids


def test_a_ticket_may_be_iterated_again(target):
    with EngineThread(tiny.engine_over(target)) as running:
        ticket = running.submit([1], PARAMS)
        tokens = [token for chunk in ticket for token in chunk.token_ids]
        assert list(ticket) == []
        assert tuple(tokens) == ticket.result(30.0).token_ids


def test_a_ticket_may_be_awaited(target):
    async def read(ticket) -> list[int]:
        return [token async for chunk in ticket for token in chunk.token_ids]

    with EngineThread(tiny.engine_over(target)) as running:
        ticket = running.submit([1], PARAMS)
        assert tuple(asyncio.run(read(ticket))) == ticket.result(30.0).token_ids


def test_nobody_hangs_where_an_abort_fails(target, monkeypatch):
    engine = tiny.engine_over(target)
    running = EngineThread(engine)
    running.start()
    long = SamplingParams(max_tokens=80, ignore_eos=True)
    tickets = [running.submit([1, n], long) for n in range(6)]

    def refuse(request_id: str) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(engine, "abort", refuse)
    running.close()
    for ticket in tickets:
        try:
            ticket.result(30.0)
        except EngineStopped:
            continue


def test_a_thread_that_was_never_started_can_be_closed(target):
    running = EngineThread(tiny.engine_over(target))
    running.close()
    with pytest.raises(EngineStopped, match="runs once"):
        running.start()
    with pytest.raises(EngineStopped, match="closed, or was never started"):
        running.submit([1])


def test_a_forked_process_is_told_so(target, monkeypatch):
    engine = tiny.engine_over(target)
    with EngineThread(engine) as running, monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineStopped, match="forked"):
            running.submit([1])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        with pytest.raises(EngineBusy, match="fork"):
            engine.step()


def test_a_second_thread_is_refused_in_a_sentence(target):
    inside, leave = threading.Event(), threading.Event()

    class Slow(WrappedModel):
        def forward(self, batch):
            inside.set()
            assert leave.wait(30.0)
            return super().forward(batch)

    engine = tiny.engine_over(Slow(target))
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(engine.generate([[1]], PARAMS)))
    thread.start()
    assert inside.wait(30.0)
    with pytest.raises(EngineBusy, match="another thread is using the engine"):
        engine.generate([[2]], PARAMS)
    leave.set()
    thread.join()
    assert found


def test_an_interrupt_comes_between_two_steps(target, draft):
    expected = tiny.engine_over(target).generate([[1], [2]], PARAMS)
    engine = tiny.engine_over(Interrupting(target), tiny.drafting(draft, 8))
    names = [engine.add_request([n], PARAMS) for n in (1, 2)]
    tokens: dict[str, list[int]] = {name: [] for name in names}
    num_interrupts = 0
    while engine.has_unfinished:
        try:
            chunks = engine.step()
        except KeyboardInterrupt:
            num_interrupts += 1
            continue
        for chunk in chunks:
            tokens[chunk.request_id] += chunk.token_ids
    assert num_interrupts > 2
    found = [engine.take_output(name).token_ids for name in names]
    assert found == [output.token_ids for output in expected]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert target.store.num_free == 4


class InterruptedLock:
    """A lock that is interrupted behind one call, or ahead of the other."""

    def __init__(self, call: str) -> None:
        self.lock = threading.RLock()
        self.call = call

    def acquire(self, *, blocking: bool) -> bool:
        taken = self.lock.acquire(blocking=blocking)
        self.interrupt("acquire")
        return taken

    def release(self) -> None:
        self.interrupt("release")
        self.lock.release()

    def interrupt(self, call: str) -> None:
        if call == self.call:
            self.call = ""
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("call", ["acquire", "release"])
def test_an_interrupt_at_the_beginning_or_end_of_a_step_leaves_the_engine_free(call, monkeypatch):
    guard = EngineGuard()
    monkeypatch.setattr(guard, "_lock", InterruptedLock(call))
    entered = []

    def enter() -> None:
        with guard:
            entered.append(threading.get_ident())

    with pytest.raises(KeyboardInterrupt):
        enter()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert entered[-1:] == [other.ident]
    enter()
    assert len(entered) == 3


def test_a_step_that_broke_off_while_committing_asks_for_a_reset(target, monkeypatch):
    engine = tiny.engine_over(target)
    engine.add_request([1], PARAMS)
    engine.step()
    with monkeypatch.context() as patch:

        def fail(*args: object) -> None:
            raise MemoryError("planted")

        patch.setattr(type(target.store), "commit", fail)
        with pytest.raises(MemoryError):
            engine.step()
    with pytest.raises(EngineStopped, match=r"call reset\(\)"):
        engine.step()
    engine.reset()
    assert not engine.has_unfinished
    assert target.store.num_free == 4
    alone = tiny.engine_over(tiny.tabular(0)).generate([[1]], PARAMS)
    assert engine.generate([[1]], PARAMS)[0].token_ids == alone[0].token_ids


@pytest.mark.parametrize("copying", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_engine_says_that_it_cannot_be_copied(target, copying):
    with pytest.raises(TypeError, match="an Engine holds weights and threads"):
        copying(tiny.engine_over(target))


def test_a_drafter_that_exits_ends_drafting_alone(target):
    expected = tiny.engine_over(target).generate([[1]], PARAMS)[0].token_ids
    engine = tiny.engine_over(target, Exits())
    assert engine.generate([[1]], PARAMS)[0].token_ids == expected


def test_too_many_threads_are_refused():
    with pytest.raises(InvalidRequest, match=r"num_threads is 100000.*at most 1024"):
        EngineConfig(num_threads=100000)


def test_a_request_that_waits_for_a_prefix_holds_nobody_up(target):
    engine = tiny.engine_over(target, prefill_chunk=8, max_batch=3)
    shared = [1, 2, 3, 4, 5, 6, 7, 0] * 6
    engine.add_request(shared, PARAMS, "reads")
    engine.add_request([*shared, 3], PARAMS, "waits")
    engine.add_request([2, 2], PARAMS, "other")
    chunks = [*engine.step(), *engine.step()]
    assert {chunk.request_id for chunk in chunks} == {"other"}


def test_a_clock_that_jumps_gives_no_negative_durations(target, monkeypatch):
    readings = iter(range(10**6, 0, -1))
    monkeypatch.setattr("time.monotonic", lambda: float(next(readings)))
    (output,) = tiny.engine_over(target).generate([[1]], PARAMS)
    completion = output.completions[0]
    assert completion.total_s == completion.ttft_s == completion.prefill_s == 0.0


def test_names_of_vllm_are_understood(target):
    engine = tiny.engine_over(target)
    params = SamplingParams(max_tokens=4, logprobs=2, seed=1)
    (output,) = engine.generate([[1]], sampling_params=params)
    assert output.outputs is output.completions
    entry = output.outputs[0].logprobs[0]
    assert entry.token == engine.tokenizer.decode([entry.token_id])
    assert len(entry.top_tokens) == 2
    with pytest.raises(InvalidRequest, match="'max_model_len'; it is called max_context here"):
        EngineConfig().with_settings({"max_model_len": 8})
    with pytest.raises(InvalidRequest, match="no setting 'colour'"):
        EngineConfig().with_settings({"colour": 8})


def test_stats_count_what_was_done(target, draft):
    engine = tiny.engine_over(target, tiny.drafting(draft, 8))
    engine.generate([[1], [2]], PARAMS)
    stats = engine.stats()
    assert stats.num_emitted == 24
    assert 0 < stats.num_accepted <= stats.num_drafted
    assert engine.capabilities().methods == ("draft_model",)
    assert (stats.num_running, stats.num_waiting) == (0, 0)
