"""The pages on theory hold: their blocks of Python run and assert, their links lead somewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[3] / "docs"
PAGES = tuple(DOCS / f"{name}.md" for name in ("understand", "exactness", "claims"))
CLAIMS = PAGES[-1]
PART = re.compile(
    r"^```python\n(?P<code>.*?)^```$|^#+ (?P<heading>[^\n]*)$", re.DOTALL | re.MULTILINE
)
"""A block, whose comments are no headings, or a heading."""


def blocks(text: str) -> list[tuple[str, str]]:
    """Heading and code of every block."""
    found, heading = [], ""
    for part in PART.finditer(text):
        if part["code"] is None:
            heading = part["heading"]
        else:
            found.append((heading, part["code"]))
    return found


def run(code: str) -> None:
    exec(compile(code, "page", "exec"), {"__name__": "page"})


BLOCKS = [block for page in PAGES for block in blocks(page.read_text())]


@pytest.mark.parametrize("code", [c for _, c in BLOCKS], ids=[heading for heading, _ in BLOCKS])
def test_blocks_run_and_claim_something(code):
    assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(code)))
    run(code)


def test_a_wrong_claim_would_be_noticed():
    assert len(BLOCKS) == sum(page.read_text().count("```python") for page in PAGES)
    ((heading, code),) = blocks(
        "# A\n\n## B\ntext\n```python\n# no heading\nassert 1 == 2\n```\n\n## C\n"
    )
    assert heading == "B"
    with pytest.raises(AssertionError):
        run(code)


def anchor(heading: str) -> str:
    """As renderers make it of a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.lower())
    return kept.replace(" ", "-")


def test_every_folk_claim_has_its_verdict_and_its_block():
    text = CLAIMS.read_text()
    claims = re.findall(r"^\| \[.*?\]\(#(.*?)\) \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    sections = [anchor(heading) for heading in re.findall(r"^## (.*)$", text, re.MULTILINE)]
    assert [target for target, _, _ in claims] == sections
    assert set(sections) <= {anchor(heading) for heading, _ in BLOCKS}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_to_pages(page):
    pages = {link.partition("#")[0] for link in re.findall(r"\]\(([^)#][^)]*)\)", page.read_text())}
    missing = {page for page in pages if page.endswith(".md") and not (DOCS / page).exists()}
    assert pages
    assert not missing
