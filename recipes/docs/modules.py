"""Write the module list of docs/architecture.md from the first lines of the modules' docstrings.

`python recipes/docs/modules.py` rewrites the list, `--check` only says whether it is up to date.
Packages come in the order of the layers contract, from the bottom up.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "forerun"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: make docs -->\n", "<!-- end of modules -->\n"


def layers() -> list[str]:
    """Package names from the bottom layer up."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    (ordered,) = (entry["layers"] for entry in contracts if entry["type"] == "layers")
    return [name for layer in reversed(ordered) for name in re.findall(r"\w+", layer)]


def lines(name: str) -> Iterator[str]:
    """One table row per module of a layer that has anything in it."""
    single = PACKAGE / f"{name}.py"
    for path in [single] if single.exists() else sorted((PACKAGE / name).rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text()))
        if docstring and path.name != "__init__.py":
            yield f"| `{path.relative_to(PACKAGE)}` | {docstring.splitlines()[0]} |\n"


def module_list() -> str:
    """The whole list, as it stands between the markers."""
    rows = [row for name in layers() for row in lines(name)]
    return "".join(["| module | what it is |\n", "|---|---|\n", *rows])


def main() -> int:
    """Rewrite or compare; 1 if a comparison failed."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    current, _, after = rest.partition(END)
    if current == module_list():
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.relative_to(ROOT)} does not list the modules as they are: run `make docs`")
        return 1
    PAGE.write_text(before + BEGIN + module_list() + END + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
