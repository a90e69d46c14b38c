"""A seed decides the text: no neighbour, K, drafter, place in the queue or preemption has a say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests import tiny
from tests.tabular import TabularModel

from forerun.drafters.base import Drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.suffix import SuffixDrafter
from forerun.engine.config import RequestTerms
from forerun.engine.engine import Engine
from forerun.engine.results import Completion
from forerun.sampling.config import SamplingParams

VOCAB = 6
NUM_SLOTS = 3
MAX_CONTEXT = 48
MAX_NEW = 12
LONG = (1, 2, 3, 4, 5, 0) * 4

pytestmark = pytest.mark.usefixtures("unchecked")

prompts = st.sampled_from([(1,), (2, 5), LONG, (*LONG, 3), (*LONG, 3, 3), LONG[:9]])
sampling = st.builds(
    SamplingParams,
    seed=st.integers(0, 3),
    n=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 0.7, 1.0, 1.5]),
    max_tokens=st.integers(4, MAX_NEW),
    min_tokens=st.integers(0, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (4,)]),
    stop=st.sampled_from([(), ("#",), ('"#',)]),
    top_k=st.sampled_from([0, 3]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    bad_token_ids=st.sampled_from([(), (3,)]),
    verification=st.sampled_from(["auto", "coupled", "walk"]),
)


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A request, when it comes after the one before, and when it is called off, if it is."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int
    steps_before: int
    aborted_after: int | None


arrivals = st.lists(
    st.builds(
        Arrival,
        prompt=prompts,
        params=sampling,
        priority=st.integers(0, 1),
        steps_before=st.integers(0, 4),
        aborted_after=st.sampled_from([None, None, None, 0, 2, 5]),
    ),
    min_size=1,
    max_size=5,
)

Texts = tuple[tuple[tuple[int, ...], str, str], ...]


def laws() -> TabularModel:
    return tiny.tabular(0, vocab_size=VOCAB, num_slots=NUM_SLOTS)


DRAFTERS: dict[str, Callable[[TabularModel], Drafter | None]] = {
    "none": lambda target: None,
    "cousin": lambda target: DraftModel(tiny.cousin(target, 5), VOCAB),
    "itself": lambda target: DraftModel(tiny.cousin(target, 5, scale=0.0), VOCAB),
    "stranger": lambda target: DraftModel(
        tiny.tabular(9, vocab_size=VOCAB, num_slots=NUM_SLOTS), VOCAB
    ),
    "suffix": lambda target: SuffixDrafter(),
}


def texts_of(completions: tuple[Completion, ...]) -> Texts:
    return tuple((c.token_ids, c.text, c.finish_reason) for c in completions)


@cache
def alone(prompt: tuple[int, ...], params: SamplingParams) -> Texts:
    """Plain decoding, nobody else there."""
    engine = tiny.engine_over(laws(), k=0, max_batch=1, max_context=MAX_CONTEXT, sharing="none")
    (output,) = engine.generate([list(prompt)], params)
    return texts_of(output.completions)


class Run:
    """Requests come and go on one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls_off: dict[str, int] = {}
        self.kept: dict[str, Arrival] = {}
        self.num_preempted = 0
        self.num_shared = 0

    def step(self) -> None:
        self.engine.step()
        for name in [*self.calls_off]:
            self.calls_off[name] -= 1
            if self.calls_off[name] < 0:
                del self.calls_off[name]
                self.engine.abort(name)

    def add(self, arrival: Arrival) -> None:
        for _ in range(arrival.steps_before):
            self.step()
        terms = RequestTerms(priority=arrival.priority)
        name = self.engine.add_request(list(arrival.prompt), arrival.params, terms=terms)
        if arrival.aborted_after is None:
            self.kept[name] = arrival
        else:
            self.calls_off[name] = arrival.aborted_after

    def finish(self) -> None:
        while self.engine.has_unfinished:
            self.step()

    def check(self) -> None:
        for name, arrival in self.kept.items():
            completions = self.engine.take_output(name).completions
            assert texts_of(completions) == alone(arrival.prompt, arrival.params)
            self.num_preempted += sum(c.num_preemptions > 0 for c in completions)
            self.num_shared += sum(c.num_cached_tokens > 0 for c in completions)


@settings(max_examples=60)
@given(
    arrivals,
    st.sampled_from(sorted(DRAFTERS)),
    st.integers(1, 7),
    st.sampled_from([2, 7, 256]),
    st.integers(1, NUM_SLOTS),
    st.booleans(),
)
def test_a_seed_decides_the_text(
    requests: list[Arrival], drafter: str, k: int, chunk: int, max_batch: int, scarce: bool
) -> None:
    target = laws()
    sizes: dict[str, int] = {"max_batch": max_batch, "prefill_chunk": chunk}
    if scarce:  # room for one sequence of full length: others are preempted as it grows
        sizes["max_kv_tokens"] = MAX_CONTEXT + k
    engine = tiny.engine_over(
        target, DRAFTERS[drafter](target), k=k, max_context=MAX_CONTEXT, **sizes
    )
    run = Run(engine)
    for arrival in requests:
        run.add(arrival)
    run.finish()
    run.check()
    assert target.store.num_free == NUM_SLOTS


def test_the_schedules_reach_preemption_and_shared_beginnings() -> None:
    """Otherwise the property above would show less than it says."""
    target = laws()
    engine = tiny.engine_over(
        target,
        DRAFTERS["cousin"](target),
        k=3,
        max_context=MAX_CONTEXT,
        max_kv_tokens=MAX_CONTEXT + 3,
    )
    params = SamplingParams(seed=1, n=2, max_tokens=MAX_NEW, ignore_eos=True)
    run = Run(engine)
    for priority in (1, 0):
        for prompt in (LONG, (2, 5)):
            run.add(
                Arrival(
                    prompt=prompt,
                    params=params,
                    priority=priority,
                    steps_before=2,
                    aborted_after=None,
                )
            )
    run.finish()
    run.check()
    assert run.num_preempted > 0
    assert run.num_shared > 0
