"""recipes/paradox: the prompts it learns and judges on, HumanEval's among them if there are any."""

from __future__ import annotations

import gzip
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from rich.console import Console
from tests.conftest import ROOT

from forerun.align.config import DataConfig
from forerun.align.texts import read_prompt_split
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles

RECIPES = ("paradox", "zoo")
OWN_MODULES = ("corpus", "finetune", "openings", "prompts", "story")
PROBLEMS = (
    'def widest(rows: list[str]) -> int:\n    """ Length of the longest row, 0 without any.\n'
    '    >>> widest(["a", "abc"])\n    3\n    """\n',
    'def turned(pairs):\n    """ Swap both halves of every pair.\n'
    '    >>> turned([(1, 2)])\n    [(2, 1)]\n    """\n',
)


@pytest.fixture
def recipe(monkeypatch):
    for name in RECIPES:
        monkeypatch.syspath_prepend(str(ROOT / "recipes" / name))
    spec = importlib.util.spec_from_file_location(
        "story_of_a_draft", ROOT / "recipes/paradox/run.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["story_of_a_draft"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    few = list(zip(range(24), module.write.__globals__["modules"](), strict=False))
    monkeypatch.setitem(
        module.write.__globals__, "modules", lambda: iter(source for _, source in few)
    )
    yield module
    for name in ("story_of_a_draft", *OWN_MODULES):
        sys.modules.pop(name, None)


def problems() -> str:
    """Two problems of ours in the format of HumanEval."""
    rows = [
        {
            "task_id": f"HumanEval/{number}",
            "prompt": prompt,
            "entry_point": prompt[4 : prompt.index("(")],
            "canonical_solution": "    return 0\n",
            "test": "def check(candidate):\n    assert True\n",
        }
        for number, prompt in enumerate(PROBLEMS)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows) + "\n"


def prompts_of(recipe, out: Path, human_eval: Path | None) -> list[dict[str, str]]:
    options = recipe.Recipe(out=out, num_prompts=6, human_eval=human_eval)
    out.mkdir(exist_ok=True)
    recipe.Story(options, Console(quiet=True)).prompts()
    return [json.loads(line) for line in (out / "held-out.jsonl").read_text().splitlines()]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packed", [False, True])
def test_the_problems_of_humaneval_are_judged_on_by_name(recipe, tmp_path, packed):
    path = tmp_path / ("HumanEval.jsonl.gz" if packed else "HumanEval.jsonl")
    content = problems().encode()
    path.write_bytes(gzip.compress(content) if packed else content)
    out = tmp_path / "out"
    judged = prompts_of(recipe, out, path)
    own = [record["prompt"] for record in judged if record["tag"] == "HumanEval"]
    assert own == list(PROBLEMS)
    assert len(judged) == len(held_out_prompts()) + 2
    config = DataConfig(prompts=out / "prompts", held_out=out / "held-out.jsonl")
    sides = read_prompt_split(config, ModelFiles.find("zoo:code-11m").tokenizer)
    assert {prompt.tag for prompt in sides.held_out} == {"held-out modules", "HumanEval"}
    assert len(sides.training) == 100 + 6


def test_what_is_judged_on_does_not_change_under_a_recipe(recipe, tmp_path):
    path = tmp_path / "HumanEval.jsonl"
    path.write_text(problems())
    without = prompts_of(recipe, tmp_path, None)
    assert prompts_of(recipe, tmp_path, None) == without
    with pytest.raises(SystemExit, match="holds other prompts than are asked for"):
        prompts_of(recipe, tmp_path, path)
