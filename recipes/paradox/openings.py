"""Prompts of the target's own domain: openings of functions of the standard library.

They come from modules the shipped target was trained on; the held-out modules, which the shipped
prompts are cut from, stay out, so that drafts are judged on modules neither model has seen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "zoo"))

from corpus import is_held_out, read_text, stdlib_root
from prompts import body_starts, cut

PER_MODULE = 12
FOLLOWING_CHARS = 1500
TESTS = frozenset({"test", "tests", "idle_test", "lib2to3"})


def modules() -> Iterator[tuple[str, str]]:
    """Name and text of every library module that is not held out and is no test."""
    root = stdlib_root()
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root)
        if TESTS & set(inside.parts) or "site-packages" in inside.parts or is_held_out(inside):
            continue
        if text := read_text(path):
            yield str(inside.with_suffix("")), text


def openings(num_prompts: int, seed: int) -> list[dict[str, str]]:
    """Up to PER_MODULE openings of every module, `num_prompts` of them, shuffled.

    The source that follows an opening is its "response": text for `--fixed-share`.
    """
    rng = np.random.default_rng(seed)
    found = []
    for name, source in modules():
        lines = [line for line in body_starts(source) if line > 15]
        for line in rng.permutation(lines)[:PER_MODULE]:
            opening = {"tag": "library", "prompt": cut(source, int(line)), "name": name}
            found.append({**opening, "response": following(source, int(line))})
    return [found[i] for i in rng.permutation(len(found))[:num_prompts]]


def following(source: str, line: int) -> str:
    """What the library says from `line` on."""
    return "".join(source.splitlines(keepends=True)[line:])[:FOLLOWING_CHARS]


def write(path: Path, num_prompts: int, seed: int = 0) -> int:
    """Write prompts as JSON lines; returns how many."""
    records = openings(num_prompts, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), "utf-8")
    return len(records)
