"""The tiles of quantised weights for every width of vectors, also without VNNI's instruction."""

from __future__ import annotations

import subprocess

import pytest
from tests.programs import X86, compile_program

PROGRAM = "quantised_products.cpp"


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
    compile_program(PROGRAM, *flags, "-Wno-psabi", output=program)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(": 0 wrong") == 8


@pytest.mark.skipif(not X86, reason="x86 instructions")
@pytest.mark.parametrize("processor", ["haswell", "alderlake", "icelake-server", "sapphirerapids"])
def test_other_processors_instructions_compile(processor, tmp_path):
    flags = ["-O1", f"-march={processor}", "-S"]
    compile_program(PROGRAM, *flags, output=tmp_path / "products.s")
    uses = "vpdpbusd" in (tmp_path / "products.s").read_text("utf-8")
    assert uses == (processor != "haswell")
