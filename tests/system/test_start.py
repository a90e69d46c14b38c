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
