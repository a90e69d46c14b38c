"""Reads tokenizers with transformers and caches them by content and version.

To read one transformers loads most of itself and torch's compiler, another second of every start.
So what it made of the files is kept on disk, and the `tokenizers` library alone does the work from
there. Only chat templates, which few runs render, are left to transformers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from forerun.cache import cache_folder, cached_json, hash_of
from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.chat_template import TemplateProcess, TemplateRefused, without_none
from forerun.models.tokenizers import Messages, Renderer, Tokenizer, TokenizerDefinition

__all__ = ["adopt", "read_tokenizer"]

SUFFIXES = frozenset({".jinja", ".json", ".model", ".tiktoken", ".txt"})
"""Of all files that may decide what a tokenizer does."""


def read_tokenizer(folder: Path, cache: Path | None = None) -> Tokenizer:
    """The tokenizer of a model folder.

    Args:
        folder: where its files are.
        cache: folder to use instead of `cache_folder()`.

    Raises:
        InvalidModel: there is none, or it is of an unsupported kind.
    """
    kept = cached_json(
        cache or cache_folder(),
        f"tokenizer-{key_of(folder)}",
        lambda: asdict(definition_of(by_transformers(folder))),
    )
    return Tokenizer(TokenizerDefinition(**kept), lambda: renderer(by_transformers(folder)))


def adopt(backend: Any) -> Tokenizer:
    """Wrap a transformers tokenizer.

    Raises:
        InvalidModel: it is of an unsupported kind.
    """
    return Tokenizer(definition_of(backend), lambda: renderer(backend))


def definition_of(backend: Any) -> TokenizerDefinition:
    """Return the definition of a tokenizer that transformers has read.

    Raises:
        InvalidModel: it does not run on the `tokenizers` library.
    """
    if not backend.is_fast:
        raise InvalidModel(f"{type(backend).__name__} has no tokenizer.json; convert it to one")
    return TokenizerDefinition(
        content=backend.backend_tokenizer.to_str(),
        eos_token_id=backend.eos_token_id,
        splits_special_tokens=backend.split_special_tokens,
        has_chat_template=backend.chat_template is not None,
    )


def renderer(backend: Any) -> Renderer:
    """Return a function that renders a tokenizer's chat template within limits."""
    template = backend.get_chat_template()
    process = TemplateProcess()

    def render(messages: Messages, given: Mapping[str, Any]) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **given,
            **{name: str(token) for name, token in backend.special_tokens_map.items()},
            "messages": without_none(messages),
        }
        try:
            return process.render(template, variables)
        except TemplateRefused as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}") from error

    return render


def by_transformers(folder: Path) -> Any:
    """Read the tokenizer of a folder with transformers.

    Raises:
        InvalidModel: it makes none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        if (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists():
            raise InvalidModel(
                f"{folder} has its tokenizer as tokenizer.model alone; to convert it, run "
                "`pip install sentencepiece protobuf` and then transformers' "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) ({error})"
            ) from error
        raise InvalidModel(f"the tokenizer in {folder} cannot be loaded: {error}") from error


def key_of(folder: Path) -> str:
    """Hash the files and library versions that determine how a tokenizer behaves."""
    versions = [version(name) for name in ("transformers", "tokenizers")]
    parts = ["\0".join(versions).encode()]
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if path.suffix in SUFFIXES and path.is_file():
            parts.append(path.name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return hash_of(b"".join(parts))
