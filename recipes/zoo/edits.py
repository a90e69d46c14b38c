"""Edits to copy: a function, then the same function with one name changed.

What such a text continues with can be copied from its first half, which is where a drafter that
copies gains most. A model of this size copies only if it has been shown edits, so training mixes
them in.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import numpy as np
from corpus import stdlib_files, stdlib_root
from transformers import PreTrainedTokenizerFast

FUNCTION_LINES = (6, 20)
MAX_PAIR_TOKENS = 512
PER_FUNCTION = 2
NEW_NAMES = (
    *("first", "current", "entry", "source", "buffer", "status", "detail", "chosen", "item_name"),
    *("total", "left", "other", "payload", "known", "wanted", "inner", "part", "found", "number"),
)


def module_path(name: str) -> Path:
    """Source file of a standard-library module or package."""
    single = stdlib_root() / f"{name}.py"
    return single if single.exists() else stdlib_root() / name / "__init__.py"


def functions(source: str, num_lines: tuple[int, int]) -> Iterator[str]:
    """Functions within a range of lines, with their indentation taken off."""
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        if num_lines[0] <= node.end_lineno - node.lineno + 1 <= num_lines[1]:
            own = lines[node.lineno - 1 : node.end_lineno]
            yield "".join(line[node.col_offset :] if line.strip() else line for line in own)


def names_in(
    piece: str,
    *,
    min_chars: int = 2,
    min_count: int = 2,
    excluded: Container[str] = ("self", *NEW_NAMES),
) -> list[str]:
    """Local names that are long enough and occur often enough, the most frequent first."""
    try:
        tree = ast.parse(piece)
    except SyntaxError:  # a continuation line lost its indentation
        return []
    stored = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    stored |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    counts = Counter(word for word in re.findall(r"\w+", piece) if word in stored)
    return [
        name
        for name, count in counts.most_common()
        if count >= min_count and len(name) >= min_chars and name not in excluded
    ]


def edit(piece: str, old: str, new: str) -> tuple[str, str]:
    """A function with the request to change a name, and the function with the name changed."""
    return f"{piece}\n# The same, with {old} called {new}:\n", re.sub(rf"\b{old}\b", new, piece)


def build_edits(tokenizer: PreTrainedTokenizerFast, out: Path, window: int, seed: int = 4) -> None:
    """Write `edits.npy`: windows of `window` + 1 ids, edits of functions that are trained on."""
    if (out / "edits.npy").exists():
        return
    rng = np.random.default_rng(seed)
    texts = []
    for source in stdlib_files(tests=False, held_out=False):
        for piece in functions(source, FUNCTION_LINES):
            for old in names_in(piece)[:PER_FUNCTION]:
                texts.append("".join(edit(piece, old, str(rng.choice(NEW_NAMES)))) + "\n\n")
    ids = [
        ids for ids in tokenizer(texts, verbose=False)["input_ids"] if len(ids) < MAX_PAIR_TOKENS
    ]
    rows, row = [], [0]
    for index in rng.permutation(len(ids)):
        if len(row) + len(ids[index]) > window + 1:
            # The rest of the window shows the next edit's beginning.
            rows.append((row + ids[index])[: window + 1])
            row = [0]
        row = row + ids[index]
    np.save(out / "edits.npy", np.array(rows, dtype=np.uint16))
