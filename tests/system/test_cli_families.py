"""`forerun info` and `forerun generate` on local folders of families of the eager runner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests import tiny

from forerun.cli.main import main

TARGETS = ("gemma3", "gpt2", "qwen3-moe")
REQUEST = ("def add(", "--temperature", "0", "--max-tokens", "24", "--ignore-eos", "--json")
FIXED = ("--controller", "fixed")  # `auto` may leave such a draft unused


def save(folder: Path, family: str, **changes: float) -> Path:
    tiny.network(family, **changes).save_pretrained(folder)
    tiny.backend().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=TARGETS)
def target(request, tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("target") / request.param, request.param)


@pytest.fixture
def call(capsys):
    def run(*arguments: object) -> str:
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out

    return run


def test_speculation_changes_no_text(call, target, tmp_path):
    cousin = save(tmp_path / "cousin", target.name, jitter=0.02)
    stranger = save(tmp_path / "stranger", "llama", num_layers=1)
    answers = {
        draft: json.loads(call("generate", *REQUEST, *FIXED, "--target", target, "--draft", draft))
        for draft in ("none", cousin, stranger)
    }
    assert answers[cousin]["figures"]["num_accepted"] > 0
    assert len({tuple(answer["token_ids"]) for answer in answers.values()}) == 1
    assert len(set(answers["none"]["token_ids"])) > 4


def test_info_says_what_it_is(call, target):
    name = type(tiny.network(target.name)).__name__
    assert f"{name}, 2 layers, width 32, 2 heads of 16" in call("info", target)
    content = json.loads(call("info", target, "--json"))
    assert content["architecture"]["name"] == name
    assert content["num_parameters"] == tiny.adapted(tiny.network(target.name)).num_parameters
    assert content["kv_bytes_per_token"] > 0


def test_info_says_how_far_layers_see(call, tmp_path):
    for family, words in {
        "llama": "every layer sees the whole context",
        "mistral-sliding": "every layer sees 8 tokens back",
        "gemma3": "some layers see 8 tokens back, others the whole context",
    }.items():
        assert words in call("info", save(tmp_path / family, family))
