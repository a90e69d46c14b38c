"""A model's files are found, read and checked once per `Engine.load`."""

from __future__ import annotations

import builtins
import io
import os
from collections import Counter
from pathlib import Path

import pytest

from forerun.models.checkpoint import ModelFiles

SOURCE = Path(ModelFiles.open.__code__.co_filename).parents[1]


@pytest.fixture
def opened(monkeypatch):
    """Counts of the files that Python code opens, by path."""
    counts: Counter[str] = Counter()
    plain = io.open

    def count(file, *args, **kwargs):
        if isinstance(file, str | os.PathLike):
            counts[os.fspath(file)] += 1
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", count)
    monkeypatch.setattr(builtins, "open", count)
    return counts
