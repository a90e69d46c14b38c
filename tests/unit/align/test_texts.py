"""The texts of an alignment, over tiny models on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace as changed
from tests import tiny
from tests.records import HEADER, REQUEST, STEP

from forerun.align.config import DataConfig
from forerun.align.samples import is_held_out, prompt_hash
from forerun.align.texts import TrainingTexts, read_prompt_split
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import content_hash
from forerun.sampling.config import SamplingParams
from forerun.trace.files import open_trace

PARAMS = SamplingParams(max_tokens=8, seed=2, ignore_eos=True)
NUM_PROMPTS = 40


def save(folder: Path, *, seed: int, extra: tuple[str, ...] = (), **changes: int) -> Path:
    tiny.network(seed=seed, **changes).save_pretrained(folder)
    tiny.backend(extra).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("target"), seed=0)


@pytest.fixture(scope="module")
def draft(tmp_path_factory) -> Path:
    """It is padded: it could say ids the target has never heard of."""
    return save(tmp_path_factory.mktemp("draft"), seed=5, vocab_size=320)


@pytest.fixture(scope="module")
def engine(target) -> Engine:
    return Engine.load(target, device="cpu", config=tiny.settings(k=0))


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"x{n} = ", "tag": f"t{n % 2}"} for n in range(NUM_PROMPTS)]
    rows = [{**row, "response": "import os"} if n % 4 == 0 else row for n, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(engine: Engine, target: Path, prompts: Path, **changes: object) -> TrainingTexts:
    data = DataConfig(prompts=prompts, **changes)
    return TrainingTexts(
        data=data,
        sampling=PARAMS,
        prompts=read_prompt_split(data, engine.tokenizer),
        target=engine,
        target_name=str(target),
        target_hash=content_hash(str(target)),
        tokenizer=engine.tokenizer,
        folder=prompts.parent / "responses",
    )


def silent(num_done: int, num_all: int) -> None:
    pass


def test_sides_share_no_prompt(engine, prompts, tmp_path):
    sides = read_prompt_split(DataConfig(prompts=prompts, held_out_share=0.2), engine.tokenizer)
    assert len(sides.training) + len(sides.held_out) == NUM_PROMPTS
    assert all(is_held_out(prompt.prompt_hash, 0.2) for prompt in sides.held_out)
    own = tmp_path / "own.txt"
    own.write_text("x3 = \nsomething else\n")
    sides = read_prompt_split(DataConfig(prompts=prompts, held_out=own), engine.tokenizer)
    assert (len(sides.training), len(sides.held_out)) == (NUM_PROMPTS - 1, 2)
    with pytest.raises(InvalidRequest, match="every prompt of"):
        read_prompt_split(DataConfig(prompts=prompts, held_out=prompts), engine.tokenizer)


def test_the_target_answers_what_it_is_not_judged_on(engine, target, prompts):
    made = texts(engine, target, prompts, held_out_share=0.2)
    told: list[tuple[int, int]] = []
    found = made.steady(lambda *done: told.append(done))
    assert [s.prompt_hash for s in found] == [p.prompt_hash for p in made.prompts.training]
    assert not any(is_held_out(sample.prompt_hash, 0.2) for sample in found)
    assert {sample.tag for sample in found} == {"t0", "t1"}
    assert told[-1] == (len(found), len(found))
    told.clear()
    assert (
        texts(engine, target, prompts, held_out_share=0.2).steady(lambda *done: told.append(done))
        == found
    )
    assert told == [(len(found), len(found))]


def test_responses_may_be_drawn_warmer_than_deployed(engine, target, prompts):
    cold = texts(engine, target, prompts)
    warm = texts(engine, target, prompts, response_temperature=2.0)
    assert (cold.params, warm.params) == (PARAMS, replace(PARAMS, temperature=2.0))
    assert cold.steady(silent) != warm.steady(silent)


def traced(path: Path, target: Path, prompts: Iterable[Sequence[int]]) -> Path:
    """A trace in which every prompt was answered in one step, whose last token was the target's."""
    hashes = {
        "target_hash": content_hash(str(target)),
        "tokenizer_hash": ModelFiles.find(target).tokenizer_hash,
    }
    with open_trace(path) as trace:
        trace.add(changed(HEADER, **hashes))
        for number, prompt_ids in enumerate(prompts):
            length, own = len(prompt_ids), {"request_id": str(number)}
            trace.add(changed(STEP, **own, context_tokens=length, token_ids=(5, 6, 7)))
            request = changed(REQUEST, **own, num_prompt_tokens=length, num_output_tokens=3)
            trace.add(changed(request, prompt_token_ids=tuple(prompt_ids)))
    return path


def test_a_mix_of_both_sources(engine, target, prompts):
    made = texts(engine, target, prompts, fixed_share=0.25)
    chosen = made.mixed(made.steady(silent))
    learned = {
        source: sum(s.num_learned for s in chosen if s.source == source)
        for source in ("target", "fixed")
    }
    longest = max(sample.num_learned for sample in chosen)
    assert learned["fixed"] == pytest.approx(sum(learned.values()) / 4, abs=longest)


def test_what_was_rejected_comes_on_top_but_not_of_held_out_prompts(engine, target, prompts):
    sides = read_prompt_split(DataConfig(prompts=prompts, held_out_share=0.3), engine.tokenizer)
    everything = [prompt.prompt_ids for prompt in (*sides.training, *sides.held_out)]
    path = traced(prompts.parent / "t.jsonl", target, everything)
    made = texts(engine, target, prompts, held_out_share=0.3, replay=(path,))
    chosen = made.mixed(made.steady(silent))
    replay = [sample for sample in chosen if sample.source == "replay"]
    assert {s.prompt_hash for s in replay} == {prompt.prompt_hash for prompt in sides.training}
    for sample in replay:
        last = len(sample.token_ids)
        assert sample.token_ids[-3:] == (5, 6, 7)
        assert sample.spans == ((last - 1, last),)
        assert prompt_hash(sample.token_ids[:-3]) == sample.prompt_hash
    assert len(chosen) == 2 * len(replay)


def test_a_long_prompt_in_a_trace_is_known_for_held_out(engine, target, tmp_path):
    """It was served whole; prompts that are read lose their beginning."""
    path = tmp_path / "prompts.jsonl"
    long = [f"import this, and that; then x{n} = " for n in range(NUM_PROMPTS)]
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in long))
    trace = traced(tmp_path / "t.jsonl", target, map(engine.tokenizer.encode, long))
    own = {"held_out_share": 0.3, "max_prompt_tokens": 6, "replay": (trace,)}
    made = texts(engine, target, path, **own)
    replay = [sample for sample in made.steady(silent) if sample.source == "replay"]
    assert {s.prompt_hash for s in replay} == {
        prompt.prompt_hash for prompt in made.prompts.training
    }
    assert len(replay) == len(made.prompts.training) < NUM_PROMPTS
    assert all(len(sample.token_ids) > 6 + 3 for sample in replay)


def test_a_server_answers_instead(engine, target, prompts, monkeypatch):
    """Resumed where it broke off."""
    asked: list[dict] = []

    lock = threading.Lock()

    def answer(transport: httpx.HTTPTransport, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        body = json.loads(request.read())
        with lock:
            asked.append(body)
            if len(asked) == 10:
                return httpx.Response(404, text="gone")
        token = body["prompt"][0]
        choice = {
            "text": engine.tokenizer.decode([token]),
            "finish_reason": "length",
            "token_ids": [token],
        }
        return httpx.Response(200, json={"choices": [choice]})

    monkeypatch.setattr(httpx.HTTPTransport, "handle_request", answer)
    own = {"responses_from": "http://server", "responses_model": "m"}
    with pytest.raises(InvalidRequest, match=r"gone; \d+ responses are kept"):
        texts(engine, target, prompts, **own).steady(silent)
    made = texts(engine, target, prompts, **own)
    found = made.steady(silent)
    assert len(found) == len(made.prompts.training)
    assert {body["model"] for body in asked} == {"m"}
    num_lines = len(next((prompts.parent / "responses").glob("target-*")).read_text().splitlines())
    assert num_lines == 1 + len(found)
