"""Engines under the controller that the flags name, with the costs of profiles if any are given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from forerun.cli.flags import PairFlags
from forerun.control.step_times import CostSource
from forerun.drafters.base import Drafter
from forerun.drafters.config import parse_drafter
from forerun.drafters.draft_model import DraftModel
from forerun.drafters.several import SeveralDrafters
from forerun.engine.controlling import default_controller
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.plan.costs import DraftCosts, with_draft_cost
from forerun.probe.pair import LoadedPair, facts_of, setup_of
from forerun.probe.profile import ProfileSetup
from forerun.probe.profile_file import check_setup, load_profile

__all__ = ["controlled", "drafters_of"]

COPIER = "suffix"
"""Copies; beside passes of a model that takes next to nothing."""


def controlled(engine: Engine, pair: PairFlags) -> Engine:
    """The same engine with another controller.

    Raises:
        InvalidProfile: a profile is of another machine, pair or set-up.
        InvalidRequest: there is nothing to control, or a controller lacks what it needs.
    """
    if engine.drafter is None:
        raise InvalidRequest("--controller and --profile need a draft: plain decoding has no K")
    costs = costs_of(engine, pair) if pair.profile else {}
    drafter = engine.drafter
    config = replace(engine.config, controller=pair.controller)
    return engine.with_draft(drafter, controller=default_controller(config, drafter, costs))


def drafters_of(engine: Engine) -> Mapping[str, Drafter]:
    """Drafters by the names that plans call them, in the order they were asked for."""
    if engine.drafter is None:
        return {}
    drafter = engine.drafter
    return drafter.drafters if isinstance(drafter, SeveralDrafters) else {drafter.method: drafter}


def costs_of(engine: Engine, pair: PairFlags) -> dict[str, CostSource]:
    """Costs by drafter, from profiles that were made here, of this pair."""
    named = dict(zip(drafters_of(engine), pair.draft_names, strict=True))
    setups = setups_of(engine, pair)
    if not setups:
        raise InvalidRequest(
            "--profile is of a target and a draft model, and the draft is "
            f"{' and '.join(pair.draft_names)}"
        )
    found: dict[str, DraftCosts] = {}
    for path in pair.profile:
        profile = load_profile(path)
        same = [m for m, setup in setups.items() if setup.draft_hash == profile.setup.draft_hash]
        method = same[0] if same else next(iter(setups))
        check_setup(profile, setups[method])
        if method in found:
            raise InvalidRequest(f"{path} is a second profile of {named[method]}")
        found[method] = profile.costs
    beside = next(iter(found.values()))
    free = DraftCosts(
        greedy=with_draft_cost(beside.greedy, draft_s=0.0),
        sampled=with_draft_cost(beside.sampled, draft_s=0.0),
    )
    return {**found, **{method: free for method, name in named.items() if copies(name)}}


def copies(name: str) -> bool:
    """Whether a draft is no model and none of the target's layers."""
    drafter = parse_drafter(name)
    return drafter is not None and drafter.name == COPIER


def setups_of(engine: Engine, pair: PairFlags) -> dict[str, ProfileSetup]:
    """Of every draft model beside the target, as they are loaded."""
    target = facts_of(pair.target, engine.target, pair.dtype)
    found = {}
    for (method, drafter), name in zip(drafters_of(engine).items(), pair.draft_names, strict=True):
        if isinstance(drafter, DraftModel):
            loaded = LoadedPair(
                target=engine.target,
                draft=drafter.model,
                tokenizer=engine.tokenizer,
                engine=engine.config,
            )
            draft = facts_of(name, drafter.model, pair.dtype)
            found[method] = setup_of(loaded, target, draft)
    return found
