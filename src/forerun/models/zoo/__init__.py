"""The pair that ships with the package; see `catalog`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.models.zoo.catalog import ZOO, HeldOutPrompt, held_out_prompts, zoo_path

__all__ = ["ZOO", "HeldOutPrompt", "held_out_prompts", "zoo_path"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'forerun.models.zoo' has no attribute {name!r}")
    return getattr(import_module("forerun.models.zoo.catalog"), name)
