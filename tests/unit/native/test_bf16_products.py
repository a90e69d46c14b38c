"""The tiles of bf16 weights for 1 to 40 rows, with and without the instructions of AMX."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.programs import X86, compile_program

PROGRAM = "bf16_products.cpp"
NATIVE = ["-O1", "-march=native"] if X86 else ["-O1"]


def run_program(folder: Path, *flags: str, refuse: bool = False) -> tuple[bool, str]:
    """Check the products; return whether AMX computed them, and a hash of their bits."""
    program = folder / "products"
    compile_program(PROGRAM, *flags, "-Wno-psabi", output=program)
    command = [str(program), "refuse"] if refuse else [str(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    found, bits = done.stdout.splitlines()
    assert found.startswith("0 far, 0 different, AMX ")
    return found.endswith("1"), bits


def test_rows_have_the_same_bits_among_any_others(tmp_path):
    run_program(tmp_path, *NATIVE)


@pytest.mark.skipif(not X86, reason="x86 instructions")
def test_without_amx_rows_have_the_bits_of_vectors(tmp_path):
    """Where the compiler lacks AMX, and where the system refuses its registers."""
    amx, bits = run_program(tmp_path, *NATIVE, "-mno-amx-tile")
    assert not amx
    assert run_program(tmp_path, *NATIVE, refuse=True) == (False, bits)


@pytest.mark.skipif(not X86, reason="x86 instructions")
@pytest.mark.parametrize("processor", ["haswell", "znver3", "icelake-server", "sapphirerapids"])
def test_other_processors_instructions_compile(processor, tmp_path):
    assembly = tmp_path / "products.s"
    compile_program(PROGRAM, "-O1", f"-march={processor}", "-S", output=assembly)
    assert ("tdpbf16ps" in assembly.read_text("utf-8")) == (processor == "sapphirerapids")
