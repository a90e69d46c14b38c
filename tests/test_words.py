"""Names, docstrings, comments and texts use the field's words, not invented ones.

`docs/glossary.md` has the words to use. A banned word may appear where it quotes another system.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src" / "forerun"
# Packages (or top-level modules) whose sources hold to the list.
CLEAN: tuple[str, ...] = (
    "__init__.py",
    "__main__.py",
    "align",
    "atomic_write.py",
    "bounded_read.py",
    "cache.py",
    "cli",
    "client",
    "control",
    "doctor",
    "drafters",
    "engine",
    "errors.py",
    "extend.py",
    "loop",
    "measure",
    "models",
    "native",
    "plan",
    "provenance.py",
    "record_file.py",
    "sampling",
    "server",
    "terminal_text.py",
    "testing",
    "theory",
    "trace",
    "tune",
    "vllm_plugin",
)
BANNED = re.compile(
    r"(?<![a-z])(law|laws|lawful|lawless|glances?|glanced|glancing|wish|wishes|wished|landmarks?|loyalty|loyal|"
    r"hurry|weather|suspects?|unasked|punctual|punctuality|crowd|crowds|whoever|whomever|whosever|somebody|"
    r"anybody|nobody|everybody|owes?|owed|dear|dearer|dearest|twins?|scenes?|borrowed|curiosity|"
    r"reluctance|reluctant|promises?d?)(?![a-z])",
    re.IGNORECASE,
)
CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def banned_words(path: Path) -> list[str]:
    """Banned words of one file with their lines: in names, comments, docstrings and other texts."""
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type not in (tokenize.NAME, tokenize.COMMENT, tokenize.STRING):
            continue
        text = CAMEL.sub("_", token.string).replace("_", " ")
        found += [f"{path.name}:{token.start[0]}: {m[0]}" for m in BANNED.finditer(text)]
    return found


@pytest.mark.parametrize("package", CLEAN)
def test_no_banned_words(package):
    root = SOURCES / package
    files = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    found = [word for path in files for word in banned_words(path)]
    assert not found, "\n".join(found)


def test_a_banned_word_is_found(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        '"""Whoever drafts."""\nclass ShapedLaws: ...\nwish_s = 1  # a glance\nlawn = 2\n'
    )
    assert [line.split(": ")[1] for line in banned_words(path)] == [
        "Whoever",
        "Laws",
        "wish",
        "glance",
    ]


def duplicate_classes() -> dict[str, list[str]]:
    """Public class names that more than one module defines."""
    homes = defaultdict(list)
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCES)))
    return {name: paths for name, paths in homes.items() if len(paths) > 1}


def test_class_names_are_unique():
    assert not duplicate_classes()


def test_every_package_is_checked():
    found = {path.relative_to(SOURCES).parts[0] for path in SOURCES.rglob("*.py")}
    assert found == set(CLEAN)
