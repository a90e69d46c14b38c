"""The whole data stage over tiny models on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests import tiny
from tests.records import HEADER, REQUEST, STEP

from forerun.align.config import DataConfig
from forerun.align.data.gather import Gatherer, written_by
from forerun.align.data.on_policy import draft_writer
from forerun.align.data.prompts import PromptRecord
from forerun.align.data.sample import prompt_hash
from forerun.align.data.split import is_held_out
from forerun.engine.engine import Engine
from forerun.errors import IncompatibleDraft, InvalidRequest
from forerun.models.content_hash import tokenizer_hash
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
def pair(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    # The draft is padded: it could say ids the target has never heard of.
    return save(folder / "target", seed=0), save(folder / "draft", seed=5, vocab_size=320)


@pytest.fixture
def prompts(tmp_path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": f"x{n} = ", "tag": f"t{n % 2}"} for n in range(NUM_PROMPTS)]
    rows = [{**row, "response": "import os"} if n % 4 == 0 else row for n, row in enumerate(rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def engine(pair) -> Engine:
    return Engine.load(pair[0], device="cpu", config=tiny.settings(k=0))


def gatherer(engine, pair, prompts, **changes) -> Gatherer:
    return Gatherer(
        config=DataConfig(prompts=prompts, **changes),
        target=str(pair[0]),
        engine=engine,
        params=PARAMS,
        folder=prompts.parent / "responses",
    )


def test_the_target_answers_every_prompt_that_is_not_held_out(engine, pair, prompts):
    told: list[tuple[int, int]] = []
    made = replace(
        gatherer(engine, pair, prompts, held_out_share=0.2), tell=lambda *done: told.append(done)
    )
    data = made.gather(None)
    assert len(data.train) + len(data.held_out) == NUM_PROMPTS
    assert all(is_held_out(prompt.prompt_hash, 0.2) for prompt in data.held_out)
    assert not any(is_held_out(sample.prompt_hash, 0.2) for sample in data.train)
    assert {sample.source for sample in data.train} == {"target"}
    assert {sample.tag for sample in data.train} == {"t0", "t1"}
    assert told[-1] == (len(data.train), len(data.train))
    told.clear()
    assert made.gather(None) == data
    assert told == [(len(data.train), len(data.train))]


def test_shares_are_kept_and_no_prompt_is_answered_by_both(engine, pair, prompts):
    made = gatherer(engine, pair, prompts, on_policy_share=0.5, fixed_share=0.25)
    train = made.gather(pair[1]).train
    learned = {
        source: sum(s.num_learned for s in train if s.source == source)
        for source in ("target", "draft", "fixed")
    }
    total = sum(learned.values())
    longest = max(sample.num_learned for sample in train)
    assert learned["draft"] == pytest.approx(total / 2, abs=longest)
    assert learned["fixed"] == pytest.approx(total / 4, abs=longest)
    writers = {(s.prompt_hash, s.source) for s in train if s.source != "fixed"}
    assert len(writers) == len({prompt for prompt, _ in writers})
    assert max(t for s in train for t in s.token_ids) < tiny.VOCAB_SIZE


def test_only_the_draft_answers_where_it_has_the_whole_share(engine, pair, prompts):
    made = gatherer(engine, pair, prompts, on_policy_share=1.0)
    train = made.gather(pair[1]).train
    assert {sample.source for sample in train} == {"draft"}
    assert not list((prompts.parent / "responses").glob("target-*"))


def test_a_draft_that_has_learned_writes_anew(engine, pair, prompts, tmp_path):
    _, before = draft_writer(pair[1], engine, PARAMS, tmp_path)
    other = save(tmp_path / "trained", seed=6)
    _, after = draft_writer(other, engine, PARAMS, tmp_path)
    assert before.path != after.path


def test_a_draft_with_another_tokenizer_is_refused(engine, tmp_path):
    other = save(tmp_path / "other", seed=5, extra=("<other>",), vocab_size=320)
    with pytest.raises(IncompatibleDraft, match="tokenizer is not the target's"):
        draft_writer(other, engine, PARAMS, tmp_path)


def test_on_policy_needs_a_draft(engine, pair, prompts):
    with pytest.raises(InvalidRequest, match="source 'draft', which has none"):
        gatherer(engine, pair, prompts, on_policy_share=0.5).gather(None)


def test_what_was_rejected_comes_on_top_but_not_of_held_out_prompts(engine, pair, prompts):
    path = prompts.parent / "t.jsonl"
    header = replace(
        HEADER,
        target_hash=content_hash(str(pair[0])),
        tokenizer_hash=tokenizer_hash(pair[0]),
    )
    with open_trace(path) as trace:
        trace.add(header)
        for number in range(NUM_PROMPTS):
            own = (number, 8, 9)
            name = f"r{number}"
            emitted = (5, 6, 7)
            trace.add(replace(STEP, request_id=name, context_tokens=3, token_ids=emitted))
            trace.add(
                replace(
                    REQUEST,
                    request_id=name,
                    num_prompt_tokens=3,
                    num_output_tokens=3,
                    prompt_token_ids=own,
                )
            )
    made = gatherer(engine, pair, prompts, held_out_share=0.3, replay=(path,))
    replay = [sample for sample in made.gather(None).train if sample.source == "replay"]
    expected = [
        own
        for number in range(NUM_PROMPTS)
        if not is_held_out(prompt_hash(own := (number, 8, 9)), 0.3)
    ]
    assert [sample.token_ids for sample in replay] == [(*own, 5, 6, 7) for own in expected]
    assert {sample.spans for sample in replay} == {((5, 6),)}
    assert 0 < len(replay) < NUM_PROMPTS


def test_prompts_are_divided_by_the_shares_of_those_who_answer():
    prompts = [
        PromptRecord(prompt_ids=(n,), prompt_hash=prompt_hash([n]), tag="", where="p")
        for n in range(2000)
    ]
    shares = {"target": 0.6, "draft": 0.2, "fixed": 0.2}
    by_target, by_draft = (written_by(who, prompts, shares) for who in ("target", "draft"))
    assert len(by_target) == pytest.approx(1500, abs=80)  # 4 standard deviations
    assert sorted(p.prompt_hash for p in by_target + by_draft) == sorted(
        p.prompt_hash for p in prompts
    )
    # Whoever is held out says nothing of who would have answered.
    held_out = [p for p in by_draft if is_held_out(p.prompt_hash, 0.5)]
    assert len(held_out) == pytest.approx(len(by_draft) / 2, abs=50)
    assert written_by("draft", prompts, {"target": 1.0}) == []
    assert written_by("target", prompts, {"fixed": 1.0}) == []
