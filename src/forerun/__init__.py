"""Speculative decoding for Hugging Face models: exact, fast, measured.

The names below are what users need; `docs/` explains them, and `forerun.extend` has what drafters,
controllers and observers of your own need. All are loaded on first use, so that `import forerun`
does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.control.base import Tree
    from forerun.engine.config import EngineConfig, RequestTerms
    from forerun.engine.custom_generate import speculate
    from forerun.engine.engine import Engine
    from forerun.engine.results import Completion, RequestOutput, StreamChunk
    from forerun.engine.thread import AsyncEngine
    from forerun.errors import ForerunError
    from forerun.sampling.config import SamplingParams

__all__ = [
    "AsyncEngine",
    "Completion",
    "Engine",
    "EngineConfig",
    "ForerunError",
    "RequestOutput",
    "RequestTerms",
    "SamplingParams",
    "StreamChunk",
    "Tree",
    "__version__",
    "errors",
    "speculate",
]

__version__ = "0.1.0"

_MODULES = {
    "AsyncEngine": "forerun.engine.thread",
    "Completion": "forerun.engine.results",
    "Engine": "forerun.engine.engine",
    "EngineConfig": "forerun.engine.config",
    "ForerunError": "forerun.errors",
    "RequestOutput": "forerun.engine.results",
    "RequestTerms": "forerun.engine.config",
    "SamplingParams": "forerun.sampling.config",
    "StreamChunk": "forerun.engine.results",
    "Tree": "forerun.control.base",
    "speculate": "forerun.engine.custom_generate",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("forerun.errors")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
