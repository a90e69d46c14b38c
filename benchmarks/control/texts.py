"""Texts that nothing here was trained on: code, prose and repeated edits, as many as are wanted.

Code is cut from the standard library modules that were held out of every training, before the body
of a function. An edit is mechanical: a piece of such a module, the same with one name changed, and
the request to change another. Prose is from books the shipped draft off the shelf knows and the
target was hardly shown.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES / "zoo"))

from corpus import HELD_OUT_MODULES  # noqa: E402
from edits import functions, module_path, names_in  # noqa: E402
from prompts import body_starts, cut  # noqa: E402

PER_MODULE = 10
PROSE_CHARS = 600
PROSE_STEP = 9_000
EDIT_LINES = (14, 40)
NEW_NAMES = ("first", "current", "entry", "source", "buffer", "status", "detail", "chosen")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and the module or place it is from.

    `result` is what a capable model would write, where that is known.
    """

    origin: str
    prompt: str
    result: str | None = None


def code_texts(seed: int = 1) -> list[Text]:
    """Openings of functions, the modules in turns."""
    rng = np.random.default_rng(seed)  # noqa: TID251 (its own generator, not the global one)
    found = []
    for module in sorted(HELD_OUT_MODULES):
        source = module_path(module).read_text("utf-8")
        lines = [line for line in body_starts(source) if line > 15]
        for line in rng.permutation(lines)[:PER_MODULE]:
            found.append(Text(origin=module, prompt=cut(source, int(line))))
    return in_turns(found)


def prose_texts() -> list[Text]:
    """Pieces of books that begin with a sentence; an origin is a piece."""
    found = []
    for path in sorted((RECIPES / "paradox" / "prose").glob("*.txt")):
        book = path.read_text("utf-8")
        for start in range(PROSE_STEP, len(book) - PROSE_STEP, PROSE_STEP):
            begin = book.index(". ", start) + 2
            piece = book[begin : begin + PROSE_CHARS]
            found.append(Text(origin=f"{path.stem}:{start}", prompt=piece))
    return in_turns(found, key=lambda text: text.origin.partition(":")[0])


def edit_texts(seed: int = 2) -> list[Text]:
    """Changes of names in pieces of held-out modules: the first is made, the second asked for."""
    rng = np.random.default_rng(seed)  # noqa: TID251 (its own generator, not the global one)
    found = []
    for module in sorted(HELD_OUT_MODULES):
        source = module_path(module).read_text("utf-8")
        pieces = [p for p in functions(source, EDIT_LINES) if len(frequent_names(p)) >= 2]
        for index in rng.permutation(len(pieces))[:PER_MODULE]:
            piece = pieces[int(index)]
            one, two = frequent_names(piece)[:2]
            new, newer = rng.choice(NEW_NAMES, 2, replace=False)
            changed = re.sub(rf"\b{one}\b", str(new), piece)
            prompt = (
                f"# The code:\n{piece}\n# Now call {one} {new}:\n{changed}\n"
                f"# Now call {two} {newer}:\n"
            )
            result = re.sub(rf"\b{two}\b", str(newer), changed)
            found.append(Text(origin=module, prompt=prompt, result=result))
    return in_turns(found)


def frequent_names(piece: str) -> list[str]:
    """Local names of some length that occur at least three times, the most frequent first."""
    return names_in(piece, min_chars=3, min_count=3, excluded=NEW_NAMES)


def origin_of(text: Text) -> str:
    """Where it is from."""
    return text.origin


def in_turns(texts: list[Text], key: Callable[[Text], str] = origin_of) -> list[Text]:
    """One of every origin, then the second of every origin, and so on."""
    rank: Counter[str] = Counter()
    ranked = []
    for text in texts:
        ranked.append((rank[key(text)], len(ranked), text))
        rank[key(text)] += 1
    return [text for _, _, text in sorted(ranked, key=lambda entry: entry[:2])]


def halves(texts: list[Text]) -> tuple[list[Text], list[Text]]:
    """To calibrate with and to test on: other prompts of the same modules."""
    seen: Counter[str] = Counter()
    found: tuple[list[Text], list[Text]] = [], []
    for text in texts:
        found[seen[text.origin] % 2].append(text)
        seen[text.origin] += 1
    return found
