from __future__ import annotations

from dataclasses import replace

import pytest
from tests import tiny
from tests.unit.align.data.conftest import origin, prompts

from forerun.align.texts import ResponseStore, seed_of, write_responses
from forerun.errors import InvalidRequest
from forerun.sampling.config import SamplingParams

PARAMS = SamplingParams(max_tokens=6, seed=1)
PROMPTS = [replace(p, prompt_ids=tuple(t % 8 for t in p.prompt_ids)) for p in prompts(7)]


def engine(*, drafted: bool = False, max_batch: int = 3):
    target = tiny.tabular(0, num_slots=max_batch)
    drafter = tiny.drafting(tiny.cousin(target, 5), 8) if drafted else None
    return tiny.engine_over(target, drafter, max_batch=max_batch)


def written(store: ResponseStore) -> dict[str, tuple[int, ...]]:
    return {sample.prompt_hash: sample.token_ids for sample in store.samples(PROMPTS)}


@pytest.fixture
def uninterrupted(tmp_path) -> dict[str, tuple[int, ...]]:
    store = ResponseStore(tmp_path / "whole", origin())
    write_responses(engine(), PROMPTS, store)
    return written(store)


def test_responses_are_the_targets(tmp_path):
    """At temperature 0 there is one right answer, plain or drafted."""
    greedy = SamplingParams(max_tokens=6, temperature=0)
    store = ResponseStore(tmp_path, origin(params=greedy))
    write_responses(engine(drafted=True), PROMPTS, store)
    alone = engine().generate([list(prompt.prompt_ids) for prompt in PROMPTS], greedy)
    expected = {
        prompt.prompt_hash: prompt.prompt_ids + output.token_ids
        for prompt, output in zip(PROMPTS, alone, strict=True)
    }
    assert written(store) == expected


def test_a_response_depends_on_its_prompt_alone(tmp_path, uninterrupted):
    store = ResponseStore(tmp_path / "other", origin())
    write_responses(engine(max_batch=2), list(reversed(PROMPTS)), store)
    assert written(store) == uninterrupted


def test_an_interruption_costs_what_was_under_way(tmp_path, uninterrupted):
    told: list[tuple[int, int]] = []

    def interrupted(num_done: int, num_all: int) -> None:
        told.append((num_done, num_all))
        if num_done == 4:
            raise KeyboardInterrupt

    busy = engine()
    store = ResponseStore(tmp_path / "broken off", origin())
    with pytest.raises(KeyboardInterrupt):
        write_responses(busy, PROMPTS, store, on_progress=interrupted)
    assert told == [(number, 7) for number in range(5)]
    assert not busy.has_unfinished

    told.clear()
    store = ResponseStore(tmp_path / "broken off", origin())
    assert len(store) == 4
    write_responses(busy, PROMPTS, store, on_progress=lambda *done: told.append(done))
    assert told == [(number, 7) for number in range(4, 8)]
    assert written(store) == uninterrupted
    assert len(store.path.read_text().splitlines()) == 1 + 7


def test_nothing_is_done_twice(tmp_path):
    store = ResponseStore(tmp_path, origin())
    write_responses(engine(), PROMPTS, store)
    content = store.path.read_bytes()
    write_responses(engine(), PROMPTS, store)
    assert store.path.read_bytes() == content


def test_a_prompt_that_does_not_fit_is_named(tmp_path):
    long = replace(PROMPTS[0], prompt_ids=(1,) * tiny.MAX_CONTEXT)
    store = ResponseStore(tmp_path, origin())
    busy = engine()
    with pytest.raises(InvalidRequest, match=r"p\.jsonl:7: the prompt has 96 tokens"):
        write_responses(busy, [PROMPTS[0], long], store)
    assert not busy.has_unfinished


def test_seeds_differ_by_prompt_and_seed():
    seeds = {seed_of(prompt.prompt_hash, seed) for prompt in PROMPTS for seed in range(5)}
    assert len(seeds) == len(PROMPTS) * 5
    assert all(0 <= seed < 2**63 for seed in seeds)
