"""Every example of docs/drafters.md runs, in order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from forerun.drafters import registry

PAGE = Path(__file__).parents[2] / "docs" / "drafters.md"
pytestmark = pytest.mark.usefixtures("unchecked")


def test_the_examples_run(monkeypatch):
    monkeypatch.setattr(registry, "METHODS", [])
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    assert len(blocks) == 4
    assert len([line for line in blocks[0].splitlines() if line.strip()]) <= 40
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), namespace)
    load = registry.find_checkpoint({"architectures": ["BigramDrafter"]})
    assert load is not None
    assert isinstance(load(Path(), namespace["plain"].target), namespace["BigramDrafter"])
