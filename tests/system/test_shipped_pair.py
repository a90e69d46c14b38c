"""The models that ship: sizes, the figures it was accepted on, and exactness in fp32."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from forerun.cli.main import main
from forerun.control.base import Tree
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.catalog import held_out_prompts, zoo_path
from forerun.models.draft_card import identify, read_card
from forerun.sampling.config import SamplingParams

MEBIBYTE = 2**20
CONFIG = EngineConfig(num_speculative_tokens=4, max_batch=4, controller="fixed")
CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "seeded": SamplingParams(temperature=1, seed=11, max_tokens=40),
    "seeded, truncated, penalised": SamplingParams(
        temperature=0.8, top_p=0.9, repetition_penalty=1.1, seed=12, max_tokens=40
    ),
}


def figures(name: str) -> dict[str, object]:
    """What the recipe measured of a shipped model."""
    return json.loads((zoo_path(name) / "figures.json").read_text("utf-8"))


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("code-40m", 96),
        ("code-2m-for-40m", 6),
        ("eagle3-for-40m", 6),
        ("code-11m", 40),
        ("code-2m", 5),
        ("books-1m", 5),
    ],
)
def test_weights_keep_to_their_size(name, limit):
    weights = zoo_path(name) / "model.safetensors"
    assert 0 < weights.stat().st_size <= limit * MEBIBYTE


def test_the_shipped_head_fits_and_names_its_target(capsys):
    assert main(["info", "zoo:code-40m", "--draft", "zoo:eagle3-for-40m", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["draft"]
    assert found["method"] == "eagle3" and found["fits"]
    assert found["warnings"] == []
    card = read_card(zoo_path("eagle3-for-40m"))
    assert card is not None
    assert card.made_for == identify(zoo_path("code-40m"))


def test_target_leads_the_domain_draft():
    lead = "held_out_bits_per_byte"
    assert figures("code-2m")[lead] - figures("code-11m")[lead] >= 0.15
    assert figures("books-1m")[lead] > figures("code-2m")[lead]
    assert figures("code-40m")[lead] < figures("code-11m")[lead]


@pytest.mark.parametrize(("target", "most"), [("code-40m", 0.35), ("code-11m", 0.2)])
def test_few_completions_of_a_target_loop(target, most):
    texts = {text["temperature"]: text for text in figures(target)["texts"]}
    assert texts[0.7]["num_texts"] >= 50
    assert texts[0.7]["looping_share"] <= most


def test_held_out_prompts_fit_and_differ():
    prompts = held_out_prompts()
    assert len({prompt.text for prompt in prompts}) == len(prompts) >= 50
    assert all(100 <= len(prompt.text) <= 800 for prompt in prompts)


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("zoo:code-11m", "zoo:code-2m"),
        pytest.param("zoo:code-11m", "zoo:books-1m", marks=pytest.mark.full),
        pytest.param("zoo:code-40m", "zoo:code-2m-for-40m", marks=pytest.mark.full),
        ("zoo:code-40m", "zoo:eagle3-for-40m"),
    ],
)
def test_speculative_text_equals_plain_text_in_fp32(target, draft):
    plain = Engine.load(target, dtype="float32", config=CONFIG)
    speculative = plain.with_draft(draft, dtype="float32")
    prompts = [prompt.text for prompt in held_out_prompts()[3:60:30]]
    num_accepted = 0
    for name, params in CASES.items():
        outputs = speculative.generate(prompts, params)
        for prompt, output in zip(prompts, outputs, strict=True):
            # Plain decoding takes the prompts one by one: batches must not change a text either.
            (expected,) = plain.generate([prompt], params)
            assert output.token_ids == expected.token_ids, name
            num_accepted += output.completions[0].acceptance.num_accepted
    assert num_accepted > 0


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("zoo:code-11m", "zoo:code-2m"),
        pytest.param("zoo:code-40m", "zoo:code-2m-for-40m", marks=pytest.mark.full),
        pytest.param("zoo:code-40m", "zoo:eagle3-for-40m", marks=pytest.mark.full),
    ],
)
def test_texts_of_trees_equal_plain_texts_in_fp32(target, draft):
    plain = Engine.load(target, dtype="float32", config=CONFIG)
    config = replace(CONFIG, tree=Tree(num_nodes=7, depth=3, width=3))
    speculative = Engine.load(target, draft=draft, dtype="float32", config=config)
    prompts = [prompt.text for prompt in held_out_prompts()[:2]]
    for params in CASES.values():
        expected = [output.token_ids for output in plain.generate(prompts, params)]
        found = speculative.generate(prompts, params)
        assert [output.token_ids for output in found] == expected
        steps = [step for output in found for step in output.completions[0].acceptance.steps]
        assert any(depth > 1 for depth, _ in steps)
