"""Every command and every snippet of the pages runs, on files that the page made before.

What a page shows of `zoo:code-40m` runs on weights of a quarter of its size under the same name;
the full grid runs it on its own, and the pages that take many seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import Block, PageRunner, blocks_of

from forerun.models import catalog

pytestmark = pytest.mark.usefixtures("unchecked")

ROOT = Path(__file__).parents[2]
FULL = pytest.mark.full
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


WITH_OWN_WEIGHTS = ("README.md", "attached-drafters.md")
LONG = ("choosing.md", "probe.md", "quantised.md", "trees.md")
SMALLER = {"code-40m": "code-11m", "code-2m-for-40m": "code-2m"}


def with_own_weights(page: Path) -> bool:
    return page.name in WITH_OWN_WEIGHTS or "code-40m" not in page.read_text("utf-8")


@pytest.fixture
def smaller_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Shipped models of which the larger ones have the weights of smaller ones."""
    folder = tmp_path / "zoo"
    folder.mkdir()
    for entry in catalog.FOLDER.iterdir():
        name = SMALLER.get(entry.name, entry.name)
        (folder / entry.name).symlink_to(catalog.FOLDER / name)
    monkeypatch.setattr(catalog, "FOLDER", folder)
    yield


@pytest.mark.usefixtures("smaller_models")
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=FULL) if page.name in LONG else page
        for page in PAGES
        if not with_own_weights(page)
    ],
    ids=lambda page: page.name,
)
def test_a_page_runs_on_smaller_weights(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_page(page, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "page",
    [page if with_own_weights(page) else pytest.param(page, marks=FULL) for page in PAGES],
    ids=lambda page: page.name,
)
def test_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run_page(page, tmp_path, monkeypatch)


def run_page(page: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")  # readers are in a checkout
    runner = PageRunner(page.name)
    for block in blocks_of(page.read_text("utf-8")):
        runner.run(block)


def test_models_that_pages_name_are_in_the_catalogue():
    for page in PAGES:
        for name in re.findall(r"zoo:([\w-]+\d+m\b)", page.read_text("utf-8")):
            assert name in {*catalog.ZOO, *catalog.ON_INDEX}, (page.name, name)


PAGE = """\
Text.

    forerun --version
    forerun explain missing.jsonl

- an item

      its continuation, not code

1. another

    still the item

Text again.

<!-- file: data.txt -->

    x = 1

```python
print("data.txt")
```

<!-- not run: sample output -->

    tokens/s 12

```yaml
a: 1
```

    a table of numbers
"""


def test_blocks_are_found_and_classified():
    found = [(block.kind, block.text.splitlines()[0]) for block in blocks_of(PAGE)]
    assert found == [
        ("shell", "forerun --version"),
        ("file", "x = 1"),
        ("python", 'print("data.txt")'),
        ("not run", "tokens/s 12"),
        ("unknown", "a: 1"),
        ("text", "a table of numbers"),
    ]
    assert [block.line for block in blocks_of(PAGE)][:2] == [3, 18]


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (Block(line=3, text="forerun explain missing.jsonl"), "exit code 2"),
        (Block(line=3, text="forerun nonsense"), "no command"),
        (Block(line=3, text="x = 1\nraise ValueError(x)"), "ValueError: 1"),
        (Block(line=3, text="ls missing-folder | cat && false"), "exit code 1"),
        (Block(line=3, text="a: 1", language="yaml"), "neither Python nor shell"),
    ],
)
def test_a_block_that_fails_is_named(block, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AssertionError, match=message) as failure:
        PageRunner("page.md").run(block)
    assert "page.md:3" in str(failure.value)


def test_blocks_share_files_and_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = PageRunner("page.md", {"Path": Path})
    runner.run(Block(line=1, text="3", file="three.txt"))
    runner.run(Block(line=2, text="n = int(Path('three.txt').read_text())", language="python"))
    runner.run(Block(line=3, text="Path('out.txt').write_text(str(n + 1))", language="python"))
    runner.run(Block(line=4, text="$ cat out.txt | grep 4\nforerun --version  # a comment"))
