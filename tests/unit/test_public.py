"""The public names: every one can be had, and none of them is loaded before it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import forerun


@pytest.mark.parametrize("name", forerun.__all__)
def test_a_public_name_can_be_had(name):
    found = getattr(forerun, name)
    assert found is not None
    assert name in dir(forerun)


def test_a_name_that_does_not_exist_is_refused():
    with pytest.raises(AttributeError, match="has no attribute 'Engin'"):
        forerun.Engin  # noqa: B018 (the access itself is tested)


def test_the_package_is_imported_without_torch():
    code = (
        "import sys, forerun; from forerun import Plan, Chain, Tree, Controller, StepRecord, "
        "SamplingParams, EngineConfig, ForerunError, errors; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
