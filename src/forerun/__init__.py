"""Speculative decoding for Hugging Face models: exact, fast, measured.

The public names load on first use, so that `import forerun` costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.engine.config import EngineConfig, RequestTerms
    from forerun.engine.engine import Engine
    from forerun.engine.thread import EngineThread
    from forerun.sampling.config import SamplingParams

__all__ = [
    "Engine",
    "EngineConfig",
    "EngineThread",
    "RequestTerms",
    "SamplingParams",
    "__version__",
]

__version__ = "0.1.0"

_HOMES = {
    "Engine": "forerun.engine.engine",
    "EngineConfig": "forerun.engine.config",
    "EngineThread": "forerun.engine.thread",
    "RequestTerms": "forerun.engine.config",
    "SamplingParams": "forerun.sampling.config",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
