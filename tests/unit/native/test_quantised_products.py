"""The tiles of quantised weights for every width of vectors, also without VNNI's instruction."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from forerun.errors import RunnerUnavailable
from forerun.native.library import SOURCES, find_compiler

PROGRAM = Path(__file__).with_name("quantised_products.cpp")
X86 = platform.machine() in ("x86_64", "AMD64")


def compile_program(*flags: str, output: Path) -> None:
    try:
        compiler = find_compiler()
    except RunnerUnavailable as error:
        pytest.skip(str(error))
    options = ["-std=c++17", f"-I{SOURCES}", *flags, str(PROGRAM), "-o", str(output)]
    done = subprocess.run([compiler, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O1", "-march=native"] if X86 else ["-O1"], id="this processor"),
        # VNNI's path by the definition of its instruction, in vectors of every width.
        pytest.param(["-O1"] if X86 else ["-O1", "-DFORERUN_LANE_BYTES=16"], id="portable"),
        pytest.param(["-O1", "-DFORERUN_LANE_BYTES=32"], id="AVX-VNNI defined"),
        pytest.param(["-O1", "-DFORERUN_LANE_BYTES=64"], id="AVX512-VNNI defined"),
    ],
)
def test_products_are_sums_of_integers(flags, tmp_path):
    program = tmp_path / "products"
    compile_program(*flags, "-Wno-psabi", output=program)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": 0 wrong") == 8


@pytest.mark.skipif(not X86, reason="x86 instructions")
@pytest.mark.parametrize("processor", ["haswell", "alderlake", "icelake-server", "sapphirerapids"])
def test_other_processors_instructions_compile(processor, tmp_path):
    compile_program("-O1", f"-march={processor}", "-S", output=tmp_path / "products.s")
    uses = "vpdpbusd" in (tmp_path / "products.s").read_text("utf-8")
    assert uses == (processor != "haswell")
