"""Drafters by name and by the type of a checkpoint, and several drafters as one.

A new drafter is a `forerun.drafters.base.Drafter`. Code outside forerun gives an instance to
`Engine.with_draft`, or calls `register_checkpoint` so that `Engine.load` recognises its folder. A
method of forerun itself is a row of `METHODS` in `drafters/config.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from forerun.control.base import Plan
from forerun.drafters.base import (
    FAILURES,
    ChainDraft,
    Drafter,
    DraftRequest,
    Pause,
    StepOutcome,
)
from forerun.drafters.config import METHODS, DraftingMethod, Function, NamedDrafter
from forerun.errors import DrafterError, InvalidRequest
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.sampling.proposal import Proposal

logger = logging.getLogger("forerun.drafting")

MAX_FAILED = 4096
"""Latest failures that are remembered; a bound on memory alone."""


class SeveralDrafters(Drafter):
    """Passes every request on to the drafter that its plan names.

    A pause of one of them is not a pause of all, so it only means that it proposes nothing. One
    that fails for a single request is not asked for it again, and the others go on. A failure for a
    batch is raised, and the engine asks again request by request.
    """

    def __init__(self, drafters: Mapping[str, Drafter]) -> None:
        self.drafters = drafters
        self.method = next(iter(drafters))
        each = drafters.values()
        self.required_features = tuple(sorted({i for d in each for i in d.required_features}))
        self.required_top_k = max(drafter.required_top_k for drafter in each)
        self._drafted_by: dict[str, str] = {}
        self._failed: dict[tuple[str, str], None] = {}  # the engine forgets a request and retries

    def by_method(self) -> Mapping[str, Drafter]:
        return self.drafters

    def propose(
        self, requests: Sequence[DraftRequest], plans: Sequence[Plan]
    ) -> list[Proposal | None]:
        """Return every request's proposal from the drafter of its plan."""
        answers: list[Proposal | None] = [None] * len(requests)
        for method in dict.fromkeys(plan.method for plan in plans):
            if method not in self.drafters:
                raise DrafterError(
                    f"a plan names the drafter {method!r}; there are {', '.join(self.drafters)}"
                )
            places = [
                at
                for at, (request, plan) in enumerate(zip(requests, plans, strict=True))
                if plan.method == method and (request.request_id, method) not in self._failed
            ]
            if not places:
                continue
            asked, its_plans = [requests[at] for at in places], [plans[at] for at in places]
            try:
                found = self.drafters[method].propose(asked, its_plans)
            except FAILURES as error:
                if len(requests) > 1:
                    raise
                self._fail(requests[0].request_id, method, error)
                continue
            for at, answer in zip(places, found, strict=True):
                answers[at] = None if isinstance(answer, Pause) else answer
        for request, plan in zip(requests, plans, strict=True):
            self._drafted_by[request.request_id] = plan.method
        return answers

    def chain_draft(self, request_id: str, plan: Plan) -> ChainDraft | None:
        if plan.method not in self.drafters or (request_id, plan.method) in self._failed:
            return None
        return self.drafters[plan.method].chain_draft(request_id, plan)

    def note_chain(self, request_id: str, plan: Plan, tokens: Tensor, num_levels: int) -> Proposal:
        self._drafted_by[request_id] = plan.method
        return self.drafters[plan.method].note_chain(request_id, plan, tokens, num_levels)

    def observe(self, outcomes: Sequence[StepOutcome]) -> None:
        """Pass every outcome to every drafter, with the proposal to the one that made it."""
        drafted_by = [self._drafted_by.pop(outcome.request_id, None) for outcome in outcomes]
        layers = self.required_features
        for method, drafter in self.drafters.items():
            columns = [layers.index(layer) for layer in drafter.required_features]
            seen = [
                replace(
                    outcome,
                    proposal=outcome.proposal if by == method else None,
                    features=outcome.features[:, columns]
                    if columns and outcome.features is not None
                    else None,
                )
                for outcome, by in zip(outcomes, drafted_by, strict=True)
                if (outcome.request.request_id, method) not in self._failed
            ]
            try:
                drafter.observe(seen)
            except FAILURES as error:
                if len(outcomes) > 1:
                    raise
                self._fail(outcomes[0].request.request_id, method, error)

    def _fail(self, request_id: str, method: str, error: BaseException) -> None:
        if len(self._failed) >= MAX_FAILED:
            del self._failed[next(iter(self._failed))]
        self._failed[request_id, method] = None
        logger.warning("request %s drafts without %s, which failed: %s", request_id, method, error)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request in every drafter, even if one of them raises."""
        self._drafted_by.pop(request_id, None)
        with ExitStack() as others:
            for drafter in self.drafters.values():
                others.callback(drafter.forget, request_id)


def named_by_method(drafters: Sequence[Drafter]) -> dict[str, Drafter]:
    """Return drafters by their methods; the second of one method is called method-2, and so on."""
    named: dict[str, Drafter] = {}
    for drafter in drafters:
        name, count = drafter.method, 1
        while name in named:
            count += 1
            name = f"{drafter.method}-{count}"
        named[name] = drafter
    return named


def tree_methods(drafter: Drafter) -> tuple[str, ...]:
    """Return the methods that propose trees, of one drafter or of several behind one interface."""
    return tuple(name for name, each in drafter.by_method().items() if each.max_width > 1)


CheckpointTest = Callable[[Mapping[str, Any]], bool]
"""Returns whether a loader can read a checkpoint, from the contents of its config.json."""
CheckpointLoader = Callable[[Path, LanguageModel], Drafter]
"""Loads the drafter in a folder for a loaded target."""


def resolve(function: Function | None) -> Callable[..., Any]:
    """Return a function of a row, from the module where it is."""
    assert function is not None
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    found: Callable[..., Any] = getattr(import_module(module), name)
    return found


def _row_of(name: str) -> DraftingMethod:
    return next(row for row in METHODS if row.name == name and row.build is not None)


def check_named(wanted: NamedDrafter, num_target_layers: int) -> None:
    """Refuse an argument that the drafter cannot have, before a target is loaded.

    Raises:
        InvalidModel: the model of `mtp:MODEL` is missing or has no such module.
        InvalidRequest: the argument is of no use.
    """
    row = _row_of(wanted.name)
    if row.check is not None:
        resolve(row.check)(wanted.argument, num_target_layers)
    elif wanted.argument:
        raise InvalidRequest(f"{wanted.name}:{wanted.argument}: this drafter takes no argument")


def build_drafter(wanted: NamedDrafter, target: LanguageModel) -> Drafter:
    """Build a drafter by its name for a loaded target; raises as `check_named`."""
    check_named(wanted, target.num_layers)
    drafter: Drafter = resolve(_row_of(wanted.name).build)(wanted.argument, target)
    return drafter


def is_head(folder: Path) -> bool:
    """Whether a folder holds an attached drafter, such as an EAGLE-3 head or Medusa heads."""
    path = folder / "config.json"
    return path.is_file() and find_checkpoint(read_object(path)) is not None


def register_checkpoint(matches: CheckpointTest, load: CheckpointLoader) -> None:
    """Register a loader, so that `Engine.load(draft=FOLDER)` accepts a further checkpoint type.

    Types that were registered later are tried first.
    """
    METHODS.insert(0, DraftingMethod(name="checkpoint", matches=matches, load=load))


def find_checkpoint(config: Mapping[str, Any]) -> CheckpointLoader | None:
    """Return the loader for a checkpoint; None for an ordinary language model."""
    for row in METHODS:
        if row.matches is not None and resolve(row.matches)(config):
            return resolve(row.load)
    return None
