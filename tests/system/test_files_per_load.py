"""How many source files a reader opens who follows a GGUF file through `Engine.load`."""

from __future__ import annotations

import runpy
from pathlib import Path

from gguf import GGMLQuantizationType as Kind
from tests.gguf_files import all_of, write_gguf, write_tiny_folder

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed" / "files_per_request.py"
MOST = 27


def test_a_load_enters_few_files(tmp_path: Path) -> None:
    """The aim is 15; a ceiling is only lowered."""
    path = write_gguf(tmp_path / "x.gguf", write_tiny_folder(tmp_path), all_of(Kind.Q8_0))
    script = runpy.run_path(str(SCRIPT))
    found = script["list_names"](script["run_load"](path))
    assert "models/gguf/file.py" in found and "engine/engine.py" in found
    assert len(found) <= MOST, found
