"""More requests than places: who waits, who gives way, who is refused, and when it is too late."""

from __future__ import annotations

import time

import pytest
from tests import tiny
from tests.tabular import TabularModel, TokenStore

from forerun.engine.config import EngineConfig, RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.scheduler import Scheduler
from forerun.errors import InvalidRequest, QueueFull
from forerun.models.base import Context
from forerun.sampling.config import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)
PROMPTS = [[n, *range(1, 8)] for n in range(4)]


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def over(target: TabularModel, draft: TabularModel, **changes: object) -> Engine:
    return tiny.engine_over(target, tiny.drafting(draft, 8), **changes)


def alone(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    engine = tiny.engine_over(tiny.tabular(0), sharing="none")
    return engine.generate([prompt], params)[0].token_ids


def run_out(engine: Engine) -> None:
    while engine.has_unfinished:
        engine.step()


def names(sequences) -> list[str]:
    return [sequence.request_id for sequence in sequences]


# -------------------------------------------------------------------------------------------- queue


def test_the_queue_refuses_beyond_its_bound_and_says_what_to_do(target):
    engine = tiny.engine_over(target, max_batch=2, max_waiting=1)
    for _ in range(3):
        engine.add_request([1], GREEDY)
    message = r"3 sequences run and wait, at most 3 may \(max_batch 2 and max_waiting 1\)"
    with pytest.raises(QueueFull, match=message + r".*try again later, or raise max_waiting"):
        engine.add_request([1], GREEDY)
    engine.step()
    with pytest.raises(QueueFull):
        engine.add_request([1], GREEDY, "refused")
    engine.abort("request-0")
    assert engine.add_request([1], GREEDY, "refused") == "refused"


def test_samples_that_could_never_all_wait_are_refused_for_good(target):
    engine = tiny.engine_over(target, max_batch=2, max_waiting=3)
    with pytest.raises(InvalidRequest, match=r"n is 6, but at most 5 .*max_waiting 3"):
        engine.add_request([1], SamplingParams(n=6))
    (output,) = engine.generate([[1]], SamplingParams(n=5, seed=1, max_tokens=3, ignore_eos=True))
    assert len(output.completions) == 5


def test_generate_queues_no_more_than_may_wait(target):
    engine = tiny.engine_over(target, max_batch=2, max_waiting=1)
    outputs = engine.generate([[n % 8] for n in range(20)], GREEDY)
    assert [output.token_ids for output in outputs[:3]] == [alone([n], GREEDY) for n in range(3)]
    assert len(outputs) == 20


def test_generate_checks_every_prompt_before_it_begins(target):
    engine = tiny.engine_over(target, max_batch=1, max_waiting=0)
    with pytest.raises(InvalidRequest, match="the prompt is empty"):
        engine.generate([[1], [2], []], GREEDY)
    assert target.store.num_free == 4


@pytest.mark.parametrize(
    "changes",
    [
        {"max_waiting": -1},
        {"num_kept": -1},
        {"sharing": "some"},
        {"max_kv_tokens": 4096},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_limits_under_which_nothing_could_run(changes):
    with pytest.raises(InvalidRequest, match=next(iter(changes))):
        EngineConfig(**changes)


@pytest.mark.parametrize(
    "terms",
    [
        {"priority": 1.5},
        {"priority": True},
        {"deadline_s": 0},
        {"deadline_s": float("nan")},
        {"deadline_s": "soon"},
        {"tenant": ""},
        {"tenant": 7},
    ],
    ids=str,
)
def test_terms_that_mean_nothing(terms):
    with pytest.raises(InvalidRequest, match=f"{next(iter(terms))} is "):
        RequestTerms(**terms)


# ----------------------------------------------------------------------------------------- priority


def test_priority_goes_before_arrival(target):
    engine = tiny.engine_over(target, max_batch=1)
    for name, priority in (("a", 0), ("b", 1), ("c", 0), ("d", -1)):
        engine.add_request([1], GREEDY, name, RequestTerms(priority=priority))
    assert names(engine.scheduler.waiting) == ["d", "a", "c", "b"]


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_youngest_of_the_last_gives_way_and_loses_nothing(target, draft, params):
    engine = over(target, draft, max_batch=3)
    for name, priority, prompt in zip("abc", (0, 5, 5), PROMPTS, strict=False):
        engine.add_request(prompt, params, name, RequestTerms(priority=priority))
    for _ in range(3):
        engine.step()
    engine.add_request(PROMPTS[3], params, "urgent", RequestTerms(priority=1))
    engine.step()
    assert sorted(names(engine.scheduler.running)) == ["a", "b", "urgent"]
    assert names(engine.scheduler.waiting) == ["c"]
    assert (target.store.num_free, draft.store.num_free) == (1, 2)  # the draft has yet to begin
    run_out(engine)
    outputs = [engine.take_output(name) for name in ("a", "b", "c", "urgent")]
    assert [o.token_ids for o in outputs] == [alone(prompt, params) for prompt in PROMPTS]
    assert [o.completions[0].num_preemptions for o in outputs] == [0, 0, 1, 0]


def test_equals_do_not_push_each_other_out(target):
    engine = tiny.engine_over(target, max_batch=1)
    engine.add_request([1], GREEDY, "first", RequestTerms(priority=2))
    engine.step()
    engine.add_request([1], GREEDY, "second", RequestTerms(priority=2))
    engine.step()
    assert names(engine.scheduler.running) == ["first"]


def test_a_prompt_half_read_gives_way_too(target, draft):
    engine = over(target, draft, max_batch=1, prefill_chunk=8)
    prompt = [1, 2, 3, 4, 5] * 8
    engine.add_request(prompt, SEEDED, "long", RequestTerms(priority=1))
    engine.step()
    engine.step()
    engine.add_request([1], SEEDED, "urgent")
    run_out(engine)
    assert engine.take_output("urgent").token_ids == alone([1], SEEDED)
    assert engine.take_output("long").token_ids == alone(prompt, SEEDED)


# ----------------------------------------------------------------------------------------------- KV


@pytest.mark.parametrize("sharing", ["tenant", "none"])
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_kv_holds_no_more_than_it_may(target, draft, params, sharing):
    engine = over(
        target, draft, max_context=40, max_kv_tokens=60, max_tree_nodes=4, sharing=sharing
    )
    for n, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, params, str(n))
    most = 0
    while engine.has_unfinished:
        engine.step()
        held = [s.context.num_cached for s in engine.scheduler.running if s.context is not None]
        most = max(most, sum(held))
        assert sum(held) <= 60
        assert target.store.num_free == 4 - len(held)
    assert most > 45
    outputs = [engine.take_output(str(n)) for n in range(4)]
    assert [o.token_ids for o in outputs] == [alone(prompt, params) for prompt in PROMPTS]
    preemptions = [o.completions[0].num_preemptions for o in outputs]
    assert preemptions[0] == 0
    assert sum(preemptions) > 0


def test_a_preempted_sequence_is_next_again():
    config = EngineConfig(max_context=20, max_kv_tokens=24, num_speculative_tokens=0)
    scheduler, store = Scheduler(config), TokenStore(4, 20, 1)
    first, second, third = (tiny.sequence(name, num_prompt=8) for name in "abc")
    for number, sequence in enumerate((first, second, third)):
        sequence.rank = (0, number)
        scheduler.add(sequence)
    for sequence in scheduler.admit(4):
        sequence.context = Context(store, sequence.ids)
    assert scheduler.running == [first, second, third]
    first.ids += [1]
    assert scheduler.preempt(1) == [third]
    assert scheduler.waiting == [third]
    assert [*scheduler.admit(1)] == []
    second.ids += [1] * 7
    assert scheduler.preempt(2) == []
    second.ids += [1]
    assert scheduler.preempt(2) == [second]
    assert scheduler.waiting == [second, third]
    scheduler.remove(first)
    assert [*scheduler.admit(3)] == [second, third]


# ----------------------------------------------------------------------------------------- deadline


def test_a_deadline_ends_a_text_where_it_is(target, draft, clock):
    engine = over(target, draft, max_batch=2)
    terms = RequestTerms(deadline_s=5)
    engine.add_request(PROMPTS[0], SEEDED, "late", terms)
    engine.add_request(PROMPTS[1], SEEDED, "other")
    engine.add_request(PROMPTS[2], SEEDED, "waiting", terms)
    for _ in range(3):
        clock.now_s += 1
        engine.step()
    clock.now_s += 2
    chunks = engine.step()
    assert [(c.request_id, c.token_ids, c.finish_reason) for c in chunks] == [
        ("late", (), "deadline"),
        ("waiting", (), "deadline"),
    ]
    assert (target.store.num_free, draft.store.num_free) == (3, 3)
    (late,) = engine.take_output("late").completions
    assert late.finish_reason == "deadline"
    assert 3 <= len(late.token_ids) < 20
    assert late.token_ids == alone(PROMPTS[0], SEEDED)[: len(late.token_ids)]
    assert late.total_s == 5
    (waiting,) = engine.take_output("waiting").completions
    assert (waiting.token_ids, waiting.text) == ((), "")
    assert (waiting.ttft_s, waiting.prefill_s, waiting.total_s) == (None, None, 5)
    run_out(engine)
    assert engine.take_output("other").token_ids == alone(PROMPTS[1], SEEDED)


def test_a_request_in_time_is_left_alone_and_its_deadline_forgotten(target, clock):
    engine = tiny.engine_over(target)
    terms = RequestTerms(deadline_s=5)
    (output,) = engine.generate([[1]], GREEDY, terms)
    assert output.completions[0].finish_reason == "length"
    clock.now_s += 10
    (output,) = engine.generate([[1]], GREEDY)
    assert output.completions[0].finish_reason == "length"


def test_each_deadline_is_its_own(target, clock):
    engine = tiny.engine_over(target)
    for name, seconds in (("b", 4), ("a", 2), ("c", 6)):
        engine.add_request([1], GREEDY, name, RequestTerms(deadline_s=seconds))
    ended = []
    for _ in range(7):
        clock.now_s += 1
        ended += [c.request_id for c in engine.step() if c.finish_reason == "deadline"]
    assert ended == ["a", "b", "c"]


# -------------------------------------------------------------------------------------- calling off


@pytest.mark.parametrize("state", ["queued", "reading", "decoding", "preempted"])
def test_a_request_can_be_called_off_in_every_state(target, draft, state):
    engine = over(target, draft, max_batch=1, prefill_chunk=8)
    blocking = RequestTerms(priority=-1)
    if state == "queued":
        engine.add_request([1], SEEDED, "other", blocking)
    engine.add_request([1, 2, 3, 4, 5] * 5, SEEDED, "mine")
    for _ in range({"queued": 2, "reading": 2, "decoding": 7, "preempted": 7}[state]):
        engine.step()
    if state == "preempted":
        engine.add_request([1], SEEDED, "other", blocking)
        engine.step()
    is_running = names(engine.scheduler.running) == ["mine"]
    assert is_running == (state in ("reading", "decoding"))
    output = engine.abort("mine")
    assert output is not None
    (completion,) = output.completions
    assert completion.finish_reason == "abort"
    expected = alone([1, 2, 3, 4, 5] * 5, SEEDED)
    assert completion.token_ids == expected[: len(completion.token_ids)]
    assert bool(completion.token_ids) == (state in ("decoding", "preempted"))
    assert engine.abort("mine") is None
    run_out(engine)
    assert (target.store.num_free, draft.store.num_free) == (4, 4)
    (again,) = engine.generate([[1, 2, 3, 4, 5] * 5], SEEDED)
    assert again.token_ids == expected
