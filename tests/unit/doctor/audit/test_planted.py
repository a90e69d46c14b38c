"""Every planted fault changes the text of a tiny engine where its place is exercised."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial

import pytest
from tests import tiny
from tests.automaton import Automaton
from tests.lab.planted import FAULTS
from tests.lab.planting import ChainVerifier, verify_by

from forerun.control.base import Plan
from forerun.engine.config import RequestTerms
from forerun.sampling.config import SamplingParams

MAX_CONTEXT, NUM_SLOTS = 128, 10
OFF = RequestTerms(plan=Plan())
GRAMMAR = [{t: (s + 1) % 6 for t in range(1 + 30 * s, 31 + 30 * s)} for s in range(6)]
SEQUENTIAL = ("acceptance", "residual", "bonus")


@cache
def network(jitter: float):
    return tiny.network(max_context=MAX_CONTEXT, scale=0.3, jitter=jitter)


def engine(max_batch: int = 8):
    target, draft = (tiny.adapted(network(jitter), NUM_SLOTS) for jitter in (0.0, 0.04))
    changes = {"max_batch": max_batch, "max_context": MAX_CONTEXT, "sharing": "none"}
    return tiny.engine_over(target, tiny.drafting(draft), **changes)


def prompt(number: int, size: int = 6) -> list[int]:
    return [(7 * i * i + 3 * number + 5) % 299 + 1 for i in range(size)]


def params(seed: int, **changes) -> SamplingParams:
    fixed = {"verification": "block", "max_tokens": 18, "ignore_eos": True}
    return SamplingParams(**{"temperature": 1.0, "seed": seed, **fixed, **changes})


def outputs(engine, ids):
    while engine.has_unfinished:
        engine.step()
    found = [engine.take_output(request_id) for request_id in ids]
    return [(output.token_ids, output.text) for output in found]


def batch(terms=None, *, num=8, mask=None, chat=False, each=lambda n: {}, **changes):
    """Requests that begin together."""
    served = engine()
    if chat:
        served.tokenizer.use_chat_template("{{ messages[0]['content'] }}")
    ids = []
    for n in range(num):
        ids_of_prompt = served.intake.render(f"def f{n}(a):") if chat else prompt(n)
        sampling = params(n, **changes, **each(n))
        ids.append(served.add_request(ids_of_prompt, sampling, terms=terms, mask=mask and mask()))
    return outputs(served, ids)


def stop_strings(terms=None):
    """Stop strings that occur in the text of plain decoding."""
    changes = {"num": 12, "verification": "auto"}
    texts = [text for _, text in batch(OFF, **changes)]
    stops = [tuple(text[at : at + 3] for at in range(4, 10, 2)) for text in texts]
    return batch(terms, each=lambda n: {"stop": stops[n]}, **changes)


def preempted(terms=None):
    """Two requests, one of which gives way to a third."""
    served, plan = engine(max_batch=2), None if terms is None else terms.plan
    found = []
    for first in range(3):
        low, high = (RequestTerms(priority=rank, plan=plan) for rank in (1, 0))
        added = [(prompt(first + n, 20), params(first + n)) for n in (0, 20)]
        ids = [served.add_request(*one, terms=low) for one in added]
        for _ in range(5):
            served.step()
        ids.append(served.add_request(prompt(first + 90, 20), params(first + 90), terms=high))
        found += outputs(served, ids)
    return found


def staggered(terms=None):
    """Requests that begin while others decode."""
    served, ids = engine(), []
    for n in range(8):
        ids.append(served.add_request(prompt(n, 12), params(n), terms=terms))
        served.step()
        served.step()
    return outputs(served, ids)


def automaton() -> Automaton:
    return Automaton(GRAMMAR, tiny.VOCAB_SIZE)


SPACES = {"logit_bias": dict.fromkeys(tiny.tokenizer().encode(" self x in items : "), 3.0)}
COUNTED = {"frequency_penalty": 1.0, "presence_penalty": 1.0, "max_tokens": 40}
EOS_LIKELY = {"ignore_eos": False, "logit_bias": {tiny.EOS: 3.0}}
PLACES: dict[str, Callable[..., list]] = {
    "lenient beyond 64 tokens": partial(batch, max_tokens=80),
    "two best tokens pass when greedy": partial(batch, temperature=0.0),
    "lenient on the chat route": partial(batch, chat=True),
    "bonus ignores top-k, top-p and min-p": partial(batch, num=16, top_k=5),
    "penalties count rejected tokens": partial(batch, verification="auto", **COUNTED),
    "first rows overwritten after a preemption": preempted,
    "EOS banned in the pass": partial(batch, **EOS_LIKELY),
    "stop string missed across steps": stop_strings,
    "space lost where a step begins": partial(batch, num=32, **SPACES),
    "mask missing for draft rows": partial(batch, mask=automaton),
    "mask missing for the bonus": partial(batch, mask=automaton),
    "row of a neighbour after a batch shrinks": partial(
        batch, each=lambda n: {"max_tokens": 6 + 3 * n}
    ),
    "compared a row early beside a prompt": staggered,
}
"""Where each fault is exercised; the others are by any requests."""
ELSEWHERE: dict[str, Callable[..., list]] = {
    "lenient beyond 64 tokens": partial(batch, max_tokens=60),
    "two best tokens pass when greedy": batch,
    "lenient on the chat route": batch,
    "bonus ignores top-k, top-p and min-p": batch,
    "penalties count rejected tokens": batch,
    "first rows overwritten after a preemption": batch,
    "EOS banned in the pass": batch,
    "stop string missed across steps": batch,
    "mask missing for draft rows": batch,
    "mask missing for the bonus": batch,
    "row of a neighbour after a batch shrinks": partial(batch, num=1),
    "compared a row early beside a prompt": batch,
}
"""Requests with speculation that do not reach the place."""


SLOW = PLACES.keys() - {
    "EOS banned in the pass",
    "mask missing for draft rows",
    "row of a neighbour after a batch shrinks",
}
"""Faults of places that take long texts or many requests; `make test` has the other families."""


@cache
def sound_texts(ask: Callable[..., list], is_plain: bool, is_sequential: bool) -> list:
    """Texts without a fault, which many faults are compared with."""
    with verify_by(ChainVerifier()) if is_sequential else contextlib.nullcontext():
        return ask(OFF) if is_plain else ask()


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[pytest.mark.full] * (fault.name in SLOW))
        for fault in FAULTS
    ],
)
def test_a_planted_fault_changes_texts_at_its_place_alone(fault):
    # Both sides compare the same numbers, so that a difference is the fault's.
    is_sequential = fault.family in SEQUENTIAL or fault.name == "a seed's number used twice"
    ask = PLACES.get(fault.name, batch)
    other = ELSEWHERE.get(fault.name)
    sound = sound_texts(ask, False, is_sequential)
    plain = sound_texts(ask, True, is_sequential)
    others = other and sound_texts(other, False, is_sequential)
    with fault.plant():
        assert ask() != sound
        assert ask(OFF) == plain
        assert (other and other()) == others
