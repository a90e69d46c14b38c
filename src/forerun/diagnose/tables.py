"""Reads the TOML files that define facts, causes and experiments."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

__all__ = ["load_table"]

FOLDER = Path(__file__).with_name("tables")


def load_table(name: str) -> dict[str, Any]:
    """Read a table.

    Args:
        name: of the file in the folder `tables`, without its suffix.
    """
    return tomllib.loads((FOLDER / f"{name}.toml").read_text("utf-8"))
