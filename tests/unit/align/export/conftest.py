"""A tiny pair on disk whose draft often agrees with its target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from tests import tiny


@dataclass(frozen=True)
class Pair:
    """Folders of models."""

    target: Path
    draft: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folders = Pair(tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("draft"))
    for folder, jitter in ((folders.target, 0.0), (folders.draft, 0.03)):
        tiny.network(jitter=jitter).save_pretrained(folder)
        tiny.backend().save_pretrained(folder)
    return folders
