"""Files of prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

Writer = Callable[..., Path]


@pytest.fixture
def write_lines(tmp_path: Path) -> Writer:
    """Writes objects as a JSON lines file."""

    def write(*rows: object, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write
