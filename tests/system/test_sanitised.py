"""The kernels under the sanitisers of the compiler, which see what no comparison of texts shows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from forerun.cache import hash_of
from forerun.errors import RunnerUnavailable
from forerun.native.library import find_compiler

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "sanitised"
FLAGS = "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined"

# The tests whose passes the kernels run, with shapes at the edges of what they are given.
FILES = {
    "tests/system/test_cycles_ahead.py": "not block and not walk and not truncated and not int",
    "tests/system/test_native_identity.py": "",
    "tests/property/test_native_rows.py": "",
    "tests/unit/models/runner": "native",
    "tests/unit/drafters/test_tree_kernels.py": "",
    "tests/unit/drafters/test_eagle3_drafter.py": "",
    "tests/unit/sampling": "",
    "tests/exact/test_engine_enumeration.py": "",
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """The environment of a run whose kernels are compiled with the sanitisers."""
    try:
        real = find_compiler()
    except RunnerUnavailable as error:
        pytest.skip(str(error))
    CACHE.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The compiler itself runs without what is loaded into the tests, which slows it fivefold. Its
    # name, of which the kernels' own is made, says how it is called.
    script = f'#!/bin/sh\nunset LD_PRELOAD\nexec "{real}" "$@" {FLAGS}\n'
    compiler = CACHE / f"c++-{hash_of(script.encode())}"
    compiler.write_text(script)
    compiler.chmod(0o700)
    source, built = CACHE / "empty.cpp", CACHE / "empty.so"
    source.write_text("extern int empty;\n")
    asked = [str(compiler), "-shared", "-fPIC", str(source), "-o", str(built)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    runtime = subprocess.run(
        [real, "-print-file-name=libasan.so"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if done.returncode or not Path(runtime).is_absolute():
        pytest.skip(f"{real} has no AddressSanitizer: {done.stderr.strip() or runtime}")
    return os.environ | {
        "CXX": str(compiler),
        "FORERUN_CACHE": str(CACHE),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:strict_string_checks=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


@pytest.mark.full
@pytest.mark.parametrize("path", FILES)
def test_no_access_outside_of_memory(environment, path):
    chosen = ["-k", FILES[path]] if FILES[path] else []
    asked = [sys.executable, "-m", "pytest", "-q", "-x", "-s", path, *chosen]
    alone = {name: at for name, at in environment.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(asked, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
