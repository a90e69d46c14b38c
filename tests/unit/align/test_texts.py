"""The texts of an alignment, over tiny models on disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests import tiny

from forerun.align.config import DataConfig
from forerun.align.samples import is_held_out
from forerun.align.texts import TrainingTexts, read_prompt_split
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.models.checkpoint import ModelFiles
from forerun.sampling.config import SamplingParams

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
        target=ModelFiles.open(target),
        engine=engine,
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
    found = made.read(lambda *done: told.append(done))
    assert [s.prompt_hash for s in found] == [p.prompt_hash for p in made.prompts.training]
    assert not any(is_held_out(sample.prompt_hash, 0.2) for sample in found)
    assert {sample.tag for sample in found} == {"t0", "t1"}
    assert told[-1] == (len(found), len(found))
    told.clear()
    assert (
        texts(engine, target, prompts, held_out_share=0.2).read(lambda *done: told.append(done))
        == found
    )
    assert told == [(len(found), len(found))]


def test_responses_may_be_drawn_warmer_than_deployed(engine, target, prompts):
    cold = texts(engine, target, prompts)
    warm = texts(engine, target, prompts, response_temperature=2.0)
    assert (cold.params, warm.params) == (PARAMS, replace(PARAMS, temperature=2.0))
    assert cold.read(silent) != warm.read(silent)


def test_a_mix_of_both_sources(engine, target, prompts):
    made = texts(engine, target, prompts, fixed_share=0.25)
    chosen = made.mixed(made.read(silent))
    learned = {
        source: sum(s.num_learned for s in chosen if s.source == source)
        for source in ("target", "fixed")
    }
    longest = max(sample.num_learned for sample in chosen)
    assert learned["fixed"] == pytest.approx(sum(learned.values()) / 4, abs=longest)
