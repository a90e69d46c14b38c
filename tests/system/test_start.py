"""What a start costs that is ours to save: modules nobody needs are not loaded."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.errors import RunnerUnavailable
from forerun.native.library import compiled_kernels

STARTED = """
import json, sys
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

config = EngineConfig(max_batch=1, max_context=64, num_threads=1)
engine = Engine.load("zoo:code-11m", "zoo:code-2m", config=config)
(output,) = engine.generate(["def f"], SamplingParams(temperature=0.5, max_tokens=4))
print(json.dumps([len(output.token_ids), sorted(sys.modules)]))
"""
HEAVY = {
    "huggingface_hub": 0.3,
    "jinja2": 0.05,
    "matplotlib": 0.3,
    "sympy": 0.4,
    "torch._dynamo": 1.0,
    "torch._inductor": 1.0,
    "torch.distributed.tensor": 0.8,
    "transformers": 0.6,
}
"""Seconds each takes to load here, roughly."""


@pytest.fixture(scope="module")
def warm() -> None:
    """What is prepared once is there."""
    try:
        compiled_kernels()
    except RunnerUnavailable as error:
        pytest.skip(str(error))
    Engine.load("zoo:code-11m", "zoo:code-2m", config=EngineConfig(max_batch=1, max_context=64))


@pytest.mark.usefixtures("warm")
def test_a_warm_start_loads_nothing_heavy_but_torch():
    run = subprocess.run(
        [sys.executable, "-c", STARTED], capture_output=True, text=True, check=True
    )
    num_tokens, modules = json.loads(run.stdout)
    assert num_tokens == 4
    assert "torch" in modules
    assert not HEAVY.keys() & set(modules)
    assert run.stderr == ""


OPTIONAL = (
    "fastapi starlette uvicorn pydantic prometheus_client llguidance matplotlib pyarrow scipy "
    "accelerate filelock"
)
WITHOUT = f"import sys\nfor name in {OPTIONAL!r}.split():\n    sys.modules[name] = None\n"


def test_an_engine_needs_no_extra():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT + STARTED], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)[0] == 4


def test_a_command_names_the_extra_that_is_missing():
    code = WITHOUT + "from forerun.cli.main import main\nsys.exit(main(['serve', 'zoo:code-11m']))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert "pip install 'forerun[serve]'" in run.stderr
    assert run.returncode == 2
