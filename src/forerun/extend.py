"""Types for those who write a drafter, a controller, an observer or a backend of their own.

`docs/drafters.md` and `docs/control.md` show how. Every type that the methods of `Drafter`,
`Controller` and `StepObserver` take or return is here or in `forerun`. All are loaded on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a name that is imported "as" itself is public
    from forerun.control.base import Capacity as Capacity
    from forerun.control.base import Chain as Chain
    from forerun.control.base import Controller as Controller
    from forerun.control.base import Decision as Decision
    from forerun.control.base import MethodChoice as MethodChoice
    from forerun.control.base import Plan as Plan
    from forerun.control.base import RequestState as RequestState
    from forerun.control.base import Tree as Tree
    from forerun.control.costs import CostSource as CostSource
    from forerun.drafters.base import ChainDraft as ChainDraft
    from forerun.drafters.base import Drafter as Drafter
    from forerun.drafters.base import DraftRequest as DraftRequest
    from forerun.drafters.base import Pause as Pause
    from forerun.drafters.base import StepOutcome as StepOutcome
    from forerun.drafters.registry import register_checkpoint as register_checkpoint
    from forerun.engine.observing import EmittedRecords as EmittedRecords
    from forerun.engine.observing import ObservedStep as ObservedStep
    from forerun.engine.observing import StepObserver as StepObserver
    from forerun.engine.results import Backend as Backend
    from forerun.engine.scheduler import ScheduledSequence as ScheduledSequence
    from forerun.engine.thread import EngineThread as EngineThread
    from forerun.models.base import Context as Context
    from forerun.models.base import LanguageModel as LanguageModel
    from forerun.sampling.config import Choice as Choice
    from forerun.sampling.config import TokenSource as TokenSource
    from forerun.sampling.history import History as History
    from forerun.sampling.history import TokenMask as TokenMask
    from forerun.sampling.proposal import Assurance as Assurance
    from forerun.sampling.proposal import Proposal as Proposal
    from forerun.sampling.proposal import Verdict as Verdict
    from forerun.theory.cost import CostTable as CostTable
    from forerun.theory.record import StepRecord as StepRecord
    from forerun.theory.tree import TokenTree as TokenTree

_NAMES = {
    "forerun.control.base": (
        "Capacity Chain Controller Decision MethodChoice Plan RequestState Tree"
    ),
    "forerun.control.costs": "CostSource",
    "forerun.drafters.base": "ChainDraft DraftRequest Drafter Pause StepOutcome",
    "forerun.drafters.registry": "register_checkpoint",
    "forerun.engine.observing": "EmittedRecords ObservedStep StepObserver",
    "forerun.engine.results": "Backend",
    "forerun.engine.scheduler": "ScheduledSequence",
    "forerun.engine.thread": "EngineThread",
    "forerun.models.base": "Context LanguageModel",
    "forerun.sampling.config": "Choice TokenSource",
    "forerun.sampling.history": "History TokenMask",
    "forerun.sampling.proposal": "Assurance Proposal Verdict",
    "forerun.theory.cost": "CostTable",
    "forerun.theory.record": "StepRecord",
    "forerun.theory.tree": "TokenTree",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
