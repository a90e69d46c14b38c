"""Programs of the kernels' headers alone, in tests/unit/native."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from forerun.errors import RunnerUnavailable
from forerun.native.library import SOURCES, find_compiler

FOLDER = Path(__file__).parent / "unit" / "native"
X86 = platform.machine() in ("x86_64", "AMD64")


def compile_program(name: str, *flags: str, output: Path) -> None:
    try:
        compiler = find_compiler()
    except RunnerUnavailable as error:
        pytest.skip(str(error))
    options = ["-std=c++17", f"-I{SOURCES}", *flags, str(FOLDER / name), "-o", str(output)]
    done = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
