"""Speculative decoding for Hugging Face models: exact, fast, measured.

The names below are the public interface; `docs/` explains them. They are loaded on first use, so
that `import forerun` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.control.base import Chain, Controller, Plan, Tree
    from forerun.drafters.base import Drafter, DraftRequest, Pause, StepOutcome
    from forerun.engine.asynchronous import AsyncEngine
    from forerun.engine.config import EngineConfig, RequestTerms
    from forerun.engine.engine import Engine
    from forerun.engine.observing import EmittedRecords, ObservedStep, StepObserver
    from forerun.engine.results import Backend, RequestOutput
    from forerun.engine.thread import EngineThread
    from forerun.errors import ForerunError
    from forerun.sampling.config import SamplingParams
    from forerun.sampling.proposal import Proposal, Verdict
    from forerun.theory.record import StepRecord
    from forerun.theory.tree import TokenTree

__all__ = [
    "AsyncEngine",
    "Backend",
    "Chain",
    "Controller",
    "DraftRequest",
    "Drafter",
    "EmittedRecords",
    "Engine",
    "EngineConfig",
    "EngineThread",
    "ForerunError",
    "ObservedStep",
    "Pause",
    "Plan",
    "Proposal",
    "RequestOutput",
    "RequestTerms",
    "SamplingParams",
    "StepObserver",
    "StepOutcome",
    "StepRecord",
    "TokenTree",
    "Tree",
    "Verdict",
    "__version__",
    "errors",
]

__version__ = "0.1.0"

_MODULES = {
    "AsyncEngine": "forerun.engine.asynchronous",
    "Backend": "forerun.engine.results",
    "Chain": "forerun.control.base",
    "Controller": "forerun.control.base",
    "DraftRequest": "forerun.drafters.base",
    "Drafter": "forerun.drafters.base",
    "EmittedRecords": "forerun.engine.observing",
    "Engine": "forerun.engine.engine",
    "EngineConfig": "forerun.engine.config",
    "EngineThread": "forerun.engine.thread",
    "ForerunError": "forerun.errors",
    "ObservedStep": "forerun.engine.observing",
    "Pause": "forerun.drafters.base",
    "Plan": "forerun.control.base",
    "Proposal": "forerun.sampling.proposal",
    "RequestOutput": "forerun.engine.results",
    "RequestTerms": "forerun.engine.config",
    "SamplingParams": "forerun.sampling.config",
    "StepObserver": "forerun.engine.observing",
    "StepOutcome": "forerun.drafters.base",
    "StepRecord": "forerun.theory.record",
    "TokenTree": "forerun.theory.tree",
    "Tree": "forerun.control.base",
    "Verdict": "forerun.sampling.proposal",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("forerun.errors")
    if name not in _MODULES:
        raise AttributeError(f"module 'forerun' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
