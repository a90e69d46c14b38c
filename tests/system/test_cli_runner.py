"""--runner and --threads mean the same in every command that has them."""

from __future__ import annotations

import json

import pytest

from forerun.cli.main import main
from forerun.engine.engine import Engine
from forerun.models import load
from forerun.models.huggingface import HuggingFaceModel
from forerun.models.runner.graphs.model import TorchModel
from forerun.models.runner.native import NativeModel

MODELS = {"native": NativeModel, "graphs": TorchModel, "eager": HuggingFaceModel}
COMMANDS = ("generate", "bench", "profile")


@pytest.fixture
def loaded(monkeypatch):
    """Every engine that is loaded, as it comes."""
    engines: list[Engine] = []
    real = Engine.load

    def note(*arguments, **options):
        engines.append(real(*arguments, **options))
        return engines[-1]

    monkeypatch.setattr(Engine, "load", note)
    return engines


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_threads(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help-all"])
    text = capsys.readouterr().out
    assert "--threads" in text
    assert ("--runner {auto,native,graphs,eager}" in text) == (name != "bench")


@pytest.mark.parametrize("runner", MODELS)
def test_generate(tiny_pair, loaded, runner, capsys):
    pair = ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.small)]
    greedy = ["--temperature", "0", "--max-tokens", "9", "--json", "--quiet"]
    arguments = ["--runner", runner, "--threads", "1"]
    assert main(["generate", "def f", *pair, *greedy, *arguments]) == 0
    (engine,) = loaded
    assert type(engine.target) is MODELS[runner]
    assert engine.config.num_threads == 1
    captured = capsys.readouterr()
    assert len(json.loads(captured.out)["token_ids"]) == 9
    assert captured.err == ""


def test_bench(tiny_pair, loaded, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f\nimport\n")
    arguments = ["--target", str(tiny_pair.target), "--arms", f"{tiny_pair.draft}@2"]
    small = ["--prompts", str(prompts), "--blocks", "2", "--max-tokens", "18", "--batch", "1"]
    chosen = ["--threads", "1", "--temperatures", "0"]
    assert main(["bench", *arguments, *small, *chosen]) == 0
    (engine,) = loaded
    assert engine.config.num_threads == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_no_threads_are_refused(name, tiny_pair, tmp_path, capsys):
    given = {
        "generate": ["x"],
        "bench": ["--target", str(tiny_pair.target), "--arms", f"{tiny_pair.draft}@2"],
        "profile": ["--target", str(tiny_pair.target), "--draft", str(tiny_pair.draft)],
    }
    assert main([name, *given[name], "--threads", "0"]) == 2
    assert "threads is 0; it must be" in capsys.readouterr().err


def test_what_is_prepared_is_said_on_stderr_alone(tiny_pair, monkeypatch, capsys):
    """As if the tiny weights were large."""
    monkeypatch.setattr(load, "LARGE_BYTES", 0)
    pair = ["--target", str(tiny_pair.target), "--draft", "none", "--threads", "1"]
    assert main(["generate", "x", *pair, "--max-tokens", "3", "--json"]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    first, second, _ = captured.err.splitlines()
    assert first == f"forerun: preparing 0.0 GB of weights of {tiny_pair.target} ..."
    assert second.startswith("forerun: prepared them in ")
