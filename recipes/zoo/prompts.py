"""Cut prompts from the held-out modules: the text before a function's body."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from corpus import HELD_OUT_MODULES
from edits import module_path

PROMPT_CHARS = 700
PER_MODULE = 2


def body_starts(source: str) -> list[int]:
    """Line numbers (0-based) where the body of a function of at least six lines begins."""
    starts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.body[0].lineno >= 6:
            starts.append(node.body[0].lineno - 1)
    return sorted(starts)


def cut(source: str, line: int) -> str:
    """The PROMPT_CHARS before `line`, begun at a line start."""
    before = "".join(source.splitlines(keepends=True)[:line])
    tail = before[-PROMPT_CHARS:]
    return tail if len(before) <= PROMPT_CHARS else tail[tail.index("\n") + 1 :]


def prompts(seed: int) -> Iterator[dict[str, str]]:
    """PER_MODULE prompts of every held-out module, seeded."""
    rng = np.random.default_rng(seed)
    for module in sorted(HELD_OUT_MODULES):
        source = module_path(module).read_text("utf-8")
        lines = [n for n in body_starts(source) if n > 15]
        for line in sorted(rng.permutation(lines)[:PER_MODULE]):
            yield {"name": f"{module}:{line + 1}", "text": cut(source, int(line))}


def write(zoo: Path, seed: int = 0) -> None:
    """Write prompts.jsonl, an object per line; the texts have the PSF licence."""
    lines = "".join(json.dumps(prompt) + "\n" for prompt in prompts(seed))
    (zoo / "prompts.jsonl").write_text(lines, "utf-8")
