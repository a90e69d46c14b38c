"""Registry of drafters: builders by name, and loaders by the type of a checkpoint.

A new drafter is a `forerun.drafters.base.Drafter`. Code outside forerun gives an instance to
`Engine.with_draft`, or calls `register_checkpoint` so that `Engine.load` recognises its folder.
Only drafters of forerun itself have a name, which is an entry in `DRAFTERS`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
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
from forerun.drafters.config import DrafterName, NamedDrafter
from forerun.drafters.draft_model import SelfDraft
from forerun.drafters.eagle3.head import is_eagle3
from forerun.drafters.recycling import RecyclingDrafter
from forerun.drafters.suffix import SuffixDrafter
from forerun.errors import DrafterError, InvalidRequest
from forerun.models.architecture import QUANTISED
from forerun.models.base import LanguageModel
from forerun.models.checkpoint import read_object
from forerun.models.mtp_layout import open_module
from forerun.sampling.proposal import Proposal

logger = logging.getLogger("forerun.drafting")

MAX_DIGITS = 12
"""Most digits of a number after a colon."""
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


def suffix(argument: str, target: LanguageModel) -> Drafter:
    """Build `suffix`, which copies from a request itself."""
    _refuse_argument("suffix", argument)
    return SuffixDrafter()


def recycling(argument: str, target: LanguageModel) -> Drafter:
    """Build `recycling`, which drafts from the target's own most likely tokens."""
    _refuse_argument("recycling", argument)
    return RecyclingDrafter()


def _self_draft(argument: str, target: LanguageModel) -> Drafter:
    """Build `self:N`, the target's first N layers, or `self:int4`, all of it in fewer bits."""
    name = f"self:{argument}"
    weights = next((weights for weights in QUANTISED if weights == argument), None)
    if weights is not None:
        model, missing = target.in_fewer_bits(weights), "the native runner, to quantise its weights"
    else:
        first = parse_num_layers(argument, target.num_layers)
        model, missing = target.first_layers(first), "a runner that can run its first layers alone"
    if model is None:
        raise InvalidRequest(
            f"{name} needs {missing}; {type(target).__name__} cannot: choose another runner or "
            "another draft"
        )
    return SelfDraft(model, target.vocab_size, name)


def parse_num_layers(argument: str, num_target_layers: int) -> int:
    """Return N of the draft `self:N`; raises InvalidRequest where the target has no more layers."""
    name = f"self:{argument:.40}"
    if not (argument.isascii() and argument.isdigit()) or len(argument) > MAX_DIGITS:
        raise InvalidRequest(
            f"there is no draft {name}; give {', '.join(f'self:{w}' for w in QUANTISED)} "
            "for all of the target in fewer bits, or self:N for its first N layers"
        )
    number = int(argument)
    if not 0 < number < num_target_layers:
        raise InvalidRequest(
            f"{name} drafts with {number} of the target's {num_target_layers} layers; give a "
            f"number from 1 to {num_target_layers - 1}, as in self:{max(1, num_target_layers // 4)}"
        )
    return number


def mtp(argument: str, target: LanguageModel) -> Drafter:
    """Build `mtp:FOLDER`, the module that ships in the target's folder; see `load_mtp`."""
    from forerun.drafters.mtp import load_mtp  # imports transformers, which takes seconds

    return load_mtp(argument, target)


DRAFTERS: Mapping[DrafterName, Callable[[str, LanguageModel], Drafter]] = MappingProxyType(
    {"suffix": suffix, "self": _self_draft, "recycling": recycling, "mtp": mtp}
)
"""Builders by name; a new name is added here and to `DrafterName` in `drafters/config.py`."""


def check_named(wanted: NamedDrafter, num_target_layers: int) -> None:
    """Refuse an argument that the drafter cannot have, before a target is loaded.

    Raises:
        InvalidModel: the model of `mtp:MODEL` is missing or has no such module.
        InvalidRequest: the argument is of no use.
    """
    argument = wanted.argument
    if wanted.name in ("suffix", "recycling"):
        _refuse_argument(wanted.name, argument)
    elif wanted.name == "self" and argument not in QUANTISED:
        parse_num_layers(argument, num_target_layers)
    elif wanted.name == "mtp":
        open_module(argument)


def build_drafter(wanted: NamedDrafter, target: LanguageModel) -> Drafter:
    """Build a drafter by its name for a loaded target."""
    return DRAFTERS[wanted.name](wanted.argument, target)


def _refuse_argument(name: str, argument: str) -> None:
    if argument:
        raise InvalidRequest(f"{name}:{argument}: this drafter takes no argument")


def eagle3(folder: Path, target: LanguageModel) -> Drafter:
    """Load the EAGLE-3 head in a folder; see `load_eagle3`."""
    from forerun.drafters.eagle3.load import load_eagle3  # costs a second, and few engines need it

    return load_eagle3(folder, target)


def medusa(folder: Path, target: LanguageModel) -> Drafter:
    """Load the Medusa heads in a folder; see `load_medusa`."""
    from forerun.drafters.medusa import load_medusa  # as above

    return load_medusa(folder, target)


def _is_medusa(config: Mapping[str, Any]) -> bool:
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def is_head(folder: Path) -> bool:
    """Whether a folder holds an attached drafter: an EAGLE-3 head or Medusa heads."""
    path = folder / "config.json"
    config = read_object(path) if path.is_file() else {}
    return is_eagle3(config) or _is_medusa(config)


_checkpoints: list[tuple[CheckpointTest, CheckpointLoader]] = [
    (is_eagle3, eagle3),
    (_is_medusa, medusa),
]


def register_checkpoint(matches: CheckpointTest, load: CheckpointLoader) -> None:
    """Register a loader, so that `Engine.load(draft=FOLDER)` accepts a further checkpoint type.

    Types that were registered later are tried first. A folder that no registered type matches is
    loaded as a draft model.
    """
    _checkpoints.insert(0, (matches, load))


def find_checkpoint(config: Mapping[str, Any]) -> CheckpointLoader | None:
    """Return the loader for a checkpoint; None for an ordinary language model."""
    return next((load for matches, load in _checkpoints if matches(config)), None)
