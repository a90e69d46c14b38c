"""Write docs/models.md from the tables of supported models and of the contract tests.

`python recipes/docs/models.py` rewrites it; `--check` only says whether it is up to date.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests import tiny  # noqa: E402 (the tests are no installed package)
from tests.contract.test_more_families import MORE  # noqa: E402
from tests.mtp_folders import FAMILIES as WITH_MTP  # noqa: E402

from forerun.models.architecture import ROPE_TYPES  # noqa: E402
from forerun.models.families import FAMILIES  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
INTRODUCTION = f"""# Supported models

`forerun generate "text" --model MODEL` runs any model of the classes below, with `--draft suffix`,
`recycling`, `self:N` or a draft model of any of these classes, in chains and trees. `config.json`
names the class under `architectures`; other classes are refused before a weight is read. Rotary
embeddings: {", ".join(ROPE_TYPES)}.

Where the column "state" says recurrent, a commit chooses the state after the last accepted token
([how](families.md)); `forerun align` and `forerun profile` refuse these classes.

The last column names the settings with which `tests/contract` compares text and logits in fp32 with
transformers' own, on random weights. Where the column "module" has a yes, `--draft mtp` drafts with
the multi-token-prediction module in the checkpoint
([which tensors](drafters.md#the-module-that-ships-with-a-model)). Written by
`python recipes/docs/models.py`.

| class in transformers | runners | state | module | settings tested |
|---|---|---|---|---|
"""


def variants(name: str) -> Iterator[Mapping[str, Any]]:
    """The settings of every random network of a class that the tests make."""
    yield from (changes for other, changes in tiny.FAMILIES.values() if other == name)
    family = name.removesuffix("ForCausalLM")
    if family in MORE:
        yield MORE[family]


def row(name: str) -> str:
    """The line of one class."""
    family, runners = FAMILIES[name], "eager"
    if family.variant is not None:
        runners = "native, graphs, eager" if family.variant.is_plain else "native, eager"
    state = "latent attention" if family.heads == "latent" else ""
    state = "recurrent" if family.states else state
    settings = sorted({key for changes in variants(name) for key in changes})
    module = "yes" if name.removesuffix("ForCausalLM") in WITH_MTP else ""
    tested = ", ".join(settings) or "defaults"
    return f"| {name} | {runners} | {state} | {module} | {tested} |\n"


def page() -> str:
    """The whole page."""
    return INTRODUCTION + "".join(row(name) for name in sorted(FAMILIES, key=str.lower))


def main() -> int:
    """Rewrite or compare; 1 if a comparison failed."""
    if PAGE.exists() and PAGE.read_text() == page():
        return 0
    if "--check" in sys.argv[1:]:
        print(f"{PAGE.name} is stale: run `python recipes/docs/models.py`")
        return 1
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
