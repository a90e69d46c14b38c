"""Engines under the controller that the flags name, with the costs of a profile if one is given."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from forerun.cli.flags import PairFlags
from forerun.control.step_times import Costs as AnyCosts
from forerun.drafters.draft_model import DraftModel
from forerun.engine.controlling import default_controller
from forerun.engine.engine import Engine
from forerun.errors import InvalidRequest
from forerun.plan.costs import Costs
from forerun.probe.pair import Pair, facts_of, setup_of
from forerun.probe.profile_file import load_profile

__all__ = ["controlled"]


def controlled(engine: Engine, pair: PairFlags) -> Engine:
    """The same engine with another controller.

    Raises:
        InvalidProfile: the profile is of another machine, pair or set-up.
        InvalidRequest: there is nothing to control, or a controller lacks what it needs.
    """
    if engine.drafter is None:
        raise InvalidRequest("--controller and --profile need a draft: plain decoding has no K")
    drafter = engine.drafter.drafter
    costs: dict[str, AnyCosts] = {}
    if pair.profile is not None:
        if not isinstance(drafter, DraftModel) or pair.draft_name is None:
            raise InvalidRequest(
                f"--profile is of a target and a draft model, and the draft is {pair.draft_name}"
            )
        costs[drafter.method] = costs_of(pair.profile, engine, drafter, pair)
    config = replace(engine.config, controller=pair.controller)
    return engine.with_draft(drafter, controller=default_controller(config, drafter, costs))


def costs_of(path: Path, engine: Engine, drafter: DraftModel, pair: PairFlags) -> Costs:
    """Costs from a profile that was made here, of this pair."""
    assert pair.draft_name is not None
    loaded = Pair(
        target=engine.target,
        draft=drafter.model,
        tokenizer=engine.tokenizer,
        engine=engine.config,
    )
    target = facts_of(pair.target, engine.target, pair.dtype)
    draft = facts_of(pair.draft_name, drafter.model, pair.dtype)
    profile = load_profile(path, expect=setup_of(loaded, target, draft))
    return Costs(greedy=profile.greedy, sampled=profile.sampled)
