"""Costs of a target on this machine with each of the shipped drafts, and of copying beside it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean

from served import LOOKAHEADS, Place, fixed_arms, items_of, serve, warm_up
from texts import edit_texts, halves

from forerun.engine.config import EngineConfig
from forerun.measure.profile import Profile, ProfileConfig, load_profile, write_profile
from forerun.measure.rigs import draft_of, estimates_of, facts_of, load_pair, measure_pair, widest
from forerun.theory.cost import DraftCosts, with_draft_cost

__all__ = ["measure_copying", "measure_profiles", "profile_path", "read_costs"]

NUM_COPIED = 24
"""Edits, of the half that nothing is tested on."""
CONFIG = ProfileConfig(
    rows=(*range(1, LOOKAHEADS[-1] + 2), EngineConfig().max_tree_nodes + 1),
    batches=(1,),
    contexts=(256, 768),  # steps are timed whole at the first: about where requests are
    drafted=(1, 2, 4, 8, LOOKAHEADS[-1]),
    read=(1, 64, 256, 640),
    target_error=0.005,
    budget_s=25.0,
)


def profile_path(place: Place, name: str) -> Path:
    """Where the profile with a draft lies, or what is known of copying."""
    return place.results / f"profile-{name}.json"


def measure_profiles(place: Place, num_threads: int, *, anew: bool) -> None:
    """Profile the target with each draft model.

    Args:
        place: whose target it is.
        num_threads: of the passes.
        anew: whether it is the first sitting; others add to what is there.
    """
    for name in ("domain", "shelf"):
        engine, config = load_pair(
            place.target,
            place.drafts[name],
            dtype="auto",
            device="cpu",
            engine=EngineConfig(num_threads=num_threads),
            config=CONFIG,
        )
        facts = (
            facts_of(place.target, engine.target),
            facts_of(place.drafts[name], draft_of(engine.drafter)),
        )
        profile = measure_pair(
            engine, facts, config, clock=time.perf_counter, notify=lambda rounds, error: None
        )
        if not anew:
            profile = joined(load_profile(profile_path(place, name)), profile)
        write_profile(profile, profile_path(place, name))
        print(name, "stable" if profile.stable else "not stable", flush=True)


def joined(before: Profile, after: Profile) -> Profile:
    """Two sittings as one: what the hour did to either is divided out round by round."""
    samples = {each.cell: list(each.samples_s) for each in before.measured}
    for each in after.measured:
        samples[each.cell] += each.samples_s
    stable = widest(samples) <= CONFIG.target_error
    return replace(after, stable=stable, **estimates_of(samples))


def measure_copying(place: Place, num_threads: int, *, anew: bool) -> None:
    """What copying takes, vain looks included: as a trace tells `forerun plan`."""
    target = place.load(num_threads)
    (arm,) = fixed_arms(place, target, "suffix", LOOKAHEADS[-1:])
    items = list(islice(items_of("edits, T=0", target, halves(edit_texts())[0]), NUM_COPIED))
    warm_up([arm], items[0])
    records = [record for item in items for record in serve(arm, item)["records"]]
    drafting = [record for record in records if record.depth_drafted]
    num_drafted = sum(record.depth_drafted for record in drafting)
    found = {
        "draft_s": sum(record.draft_s for record in records) / num_drafted,
        "overhead_s": sum(record.other_s for record in drafting) / len(drafting),
    }
    path = profile_path(place, "suffix")
    before = [] if anew else json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps([*before, found]) + "\n", encoding="utf-8")


def read_costs(place: Place, name: str) -> DraftCosts:
    """Costs of a drafter; of copying, those of a pair whose cycles take what copying took."""
    costs = load_profile(profile_path(place, "domain" if name == "suffix" else name)).costs
    if name != "suffix":
        return costs
    sittings = json.loads(profile_path(place, name).read_text(encoding="utf-8"))
    copying = {name: fmean(found[name] for found in sittings) for name in ("draft_s", "overhead_s")}
    return DraftCosts(
        greedy=with_draft_cost(costs.greedy, **copying),
        sampled=with_draft_cost(costs.sampled, **copying),
    )
