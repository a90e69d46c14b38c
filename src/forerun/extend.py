"""Types for those who write a drafter, a controller, an observer or a backend of their own.

`docs/drafters.md` and `docs/control.md` show how; every type that the methods of these protocols
take or return is here. All are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forerun.control.base import Capacity, Chain, Controller, Plan, RequestState, Tree
    from forerun.control.costs import CostSource
    from forerun.drafters.base import (
        Drafter,
        DraftRequest,
        Pause,
        StepOutcome,
    )
    from forerun.drafters.registry import register_checkpoint
    from forerun.engine.observing import EmittedRecords, ObservedStep, StepObserver
    from forerun.engine.results import Backend
    from forerun.engine.scheduler import ScheduledSequence
    from forerun.engine.thread import EngineThread
    from forerun.models.base import Context
    from forerun.sampling.config import Choice, TokenSource
    from forerun.sampling.history import History, TokenMask
    from forerun.sampling.proposal import Assurance, Proposal, Verdict
    from forerun.theory.cost import CostTable
    from forerun.theory.record import StepRecord
    from forerun.theory.tree import TokenTree

__all__ = [
    "Assurance",
    "Backend",
    "Capacity",
    "Chain",
    "Choice",
    "Context",
    "Controller",
    "CostSource",
    "CostTable",
    "DraftRequest",
    "Drafter",
    "EmittedRecords",
    "EngineThread",
    "History",
    "ObservedStep",
    "Pause",
    "Plan",
    "Proposal",
    "RequestState",
    "ScheduledSequence",
    "StepObserver",
    "StepOutcome",
    "StepRecord",
    "TokenMask",
    "TokenSource",
    "TokenTree",
    "Tree",
    "Verdict",
    "register_checkpoint",
]

_NAMES = {
    "forerun.control.base": "Capacity Chain Controller Plan RequestState Tree",
    "forerun.control.costs": "CostSource",
    "forerun.drafters.base": "DraftRequest Drafter Pause StepOutcome",
    "forerun.drafters.registry": "register_checkpoint",
    "forerun.engine.observing": "EmittedRecords ObservedStep StepObserver",
    "forerun.engine.results": "Backend",
    "forerun.engine.scheduler": "ScheduledSequence",
    "forerun.engine.thread": "EngineThread",
    "forerun.models.base": "Context",
    "forerun.sampling.config": "Choice TokenSource",
    "forerun.sampling.history": "History TokenMask",
    "forerun.sampling.proposal": "Assurance Proposal Verdict",
    "forerun.theory.cost": "CostTable",
    "forerun.theory.record": "StepRecord",
    "forerun.theory.tree": "TokenTree",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
