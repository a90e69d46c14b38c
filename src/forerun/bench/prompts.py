"""Reads the prompts of a comparison from files, optionally only those with a tag."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from forerun.align.data.prompt_files import TAGGED, PromptEntry, read_entries
from forerun.errors import InvalidRequest

__all__ = ["neighbours_apart", "read_prompts"]


def read_prompts(path: Path, tag: str | None = None) -> list[str]:
    """Read the prompts of a comparison from a file or a folder.

    Args:
        path: a file or a folder, see `read_entries`.
        tag: only prompts with this tag.

    Raises:
        InvalidRequest: something cannot be read, a record is malformed or a conversation, or there
            is no such prompt.
    """
    if tag is not None and not path.is_dir() and path.suffix not in TAGGED:
        raise InvalidRequest(f"{path} is plain text, which has no tags; --tag needs a .jsonl file")
    prompts = [text_of(entry) for entry in read_entries(path) if tag in (None, entry.tag)]
    if not prompts:
        raise InvalidRequest(f"{path} has no prompts" + (f" tagged {tag!r}" if tag else ""))
    return prompts


def text_of(entry: PromptEntry) -> str:
    """Return the text of a prompt entry; an entry without a text is refused."""
    if entry.text is None:
        raise InvalidRequest(f'{entry.where} is a conversation; give its text as a "prompt"')
    return entry.text


def neighbours_apart(prompts: Sequence[str], stride: int = 7) -> list[str]:
    """Reorder prompts with a stride, so that prompts from one module are not adjacent."""
    return [prompt for start in range(stride) for prompt in prompts[start::stride]]
