"""The figures of benchmarks/profiles/README.md are those of the committed profiles."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_profiles_as_they_are():
    command = [sys.executable, ROOT / "recipes" / "docs" / "performance.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
