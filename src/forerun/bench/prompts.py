"""Prompts from a file: JSON lines, one per line, or separated by lines of dashes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from forerun.errors import InvalidRequest

__all__ = ["read_prompts", "spread"]

SEPARATOR = "---"


def read_prompts(path: Path, tag: str | None = None) -> list[str]:
    """Texts to continue.

    A file that ends in .jsonl holds objects with a "prompt" and perhaps a "tag". Any other is
    text: where some line is "---", such lines separate the prompts; otherwise every line is one.

    Args:
        path: the file.
        tag: only prompts with this tag.

    Raises:
        InvalidRequest: the file cannot be read, a line is malformed, or there is no such prompt.
    """
    try:
        content = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"prompts cannot be read from {path}: {error}") from error
    if path.suffix == ".jsonl":
        prompts = [text for text, own in records(content, path) if tag is None or own == tag]
    elif tag is not None:
        raise InvalidRequest(f"{path} is plain text, which has no tags; --tag needs a .jsonl file")
    else:
        prompts = list(texts(content))
    if not prompts:
        raise InvalidRequest(f"{path} has no prompts" + (f" tagged {tag!r}" if tag else ""))
    return prompts


def records(content: str, path: Path) -> Iterator[tuple[str, str | None]]:
    """Prompt and tag of every line that is not empty."""
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise InvalidRequest(f"{path}:{number} is no JSON: {error}") from error
        prompt = record.get("prompt") if isinstance(record, dict) else None
        if not isinstance(prompt, str) or not prompt:
            raise InvalidRequest(f'{path}:{number} is no object with a "prompt" of text')
        yield prompt, record.get("tag")


def texts(content: str) -> Iterator[str]:
    """Prompts of plain text."""
    lines = content.splitlines()
    if SEPARATOR not in lines:
        yield from (line for line in lines if line.strip())
        return
    block: list[str] = []
    for line in (*lines, SEPARATOR):
        if line != SEPARATOR:
            block.append(line)
            continue
        if any(part.strip() for part in block):
            yield "\n".join(block)
        block = []


def spread(prompts: Sequence[str], stride: int = 7) -> list[str]:
    """Neighbours apart: prompts of one module follow each other in the shipped file."""
    return [prompt for start in range(stride) for prompt in prompts[start::stride]]
