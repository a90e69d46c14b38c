"""The models that ship with the package: their folders, and prompts kept out of their training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import InvalidModel

PREFIX = "zoo:"
ZOO = ("code-40m", "code-2m-for-40m", "eagle3-for-40m", "code-11m", "code-2m", "books-1m")
# Test models, in the repository only: they would be a quarter of the wheel.
REPOSITORY_ONLY = ("code-11m", "code-2m")
ZOO_DRAFTS = {"zoo:code-40m": "zoo:code-2m-for-40m", "zoo:code-11m": "zoo:code-2m"}
"""The draft made for a shipped target."""
FOLDER = Path(__file__).parent / "zoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPrompt:
    """The beginning of a module that was kept out of training."""

    name: str
    text: str


def zoo_path(name: str) -> Path:
    """Folder of a shipped model, one of ZOO, with or without the prefix "zoo:".

    Raises:
        InvalidModel: there is no such model, or it is not part of this installation.
    """
    short = name.removeprefix(PREFIX)
    if short not in ZOO:
        known = ", ".join(PREFIX + model for model in ZOO)
        raise InvalidModel(f"no shipped model is called {name!r}; there are {known}")
    folder = FOLDER / short
    if not folder.is_dir():
        advice = (
            "it is a test model that only a checkout has (pip install -e .); use zoo:code-40m"
            if short in REPOSITORY_ONLY
            else "reinstall forerun or rebuild it with recipes/zoo"
        )
        raise InvalidModel(
            f"{PREFIX}{short} is missing from this installation ({folder}); {advice}"
        )
    return folder


def held_out_prompts() -> tuple[HeldOutPrompt, ...]:
    """Prompts for demonstrations and benchmarks, in the order of the file."""
    return prompts_of(FOLDER / "prompts.jsonl")


def edit_prompts() -> tuple[HeldOutPrompt, ...]:
    """Prompts that show a function of a held-out module and begin it again with a name changed."""
    return prompts_of(FOLDER / "edits.jsonl")


def prompts_of(path: Path) -> tuple[HeldOutPrompt, ...]:
    """Read one prompt per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return tuple(HeldOutPrompt(name=r["name"], text=r["text"]) for r in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"held-out prompts cannot be read from {path}: {error}") from error
