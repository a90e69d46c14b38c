"""Arms of a comparison over one loaded target: plain decoding, and every draft, K and tree.

The baseline runs on the number of threads with which plain decoding is fastest. A small model waits
longer at every barrier between two threads than the second one saves, and where another process
uses a core the wait becomes the whole step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from forerun.bench.compare import BenchArm, Generator
from forerun.bench.config import DraftArms
from forerun.control.base import Tree
from forerun.control.config import ControllerName
from forerun.control.fixed import FixedController
from forerun.engine.engine import Engine
from forerun.engine.loading import default_controller, tree_method
from forerun.plan.costs import DraftCosts
from forerun.sampling.config import SamplingParams

__all__ = ["adaptive_arms", "draft_arms", "on_best_threads", "plain_arm", "warm_up"]

WARM_UP_TOKENS = 8


def plain_arm(target: Engine) -> BenchArm:
    """Return the baseline arm, plain decoding."""
    return BenchArm(name="plain", method="plain", num_speculative_tokens=0, engine=target)


def draft_arms(target: Engine, wanted: DraftArms, *, dtype: str = "auto") -> tuple[BenchArm, ...]:
    """Return one arm per K and per tree with the same loaded target and draft.

    Raises:
        InvalidRequest: a tree is wanted of a drafter that proposes chains only.
    """
    drafter = target.with_draft(wanted.draft, wanted.max_nodes, dtype=dtype).drafter
    assert drafter is not None
    for tree in wanted.trees:
        tree_method(drafter, tree)  # refuses a drafter of chains before an engine is made
    shapes: list[tuple[str, int, Tree | None]] = [(f"K={k}", k, None) for k in wanted.ks]
    shapes += [(f"tree={tree}", tree.num_nodes, tree) for tree in wanted.trees]
    return tuple(
        BenchArm(
            name=f"{wanted.name} {label}",
            method=drafter.method,
            num_speculative_tokens=num_nodes,
            engine=target.with_draft(
                drafter, num_nodes, controller=FixedController(tree or num_nodes, drafter.method)
            ),
            draft=wanted.draft,
            tree=tree,
        )
        for label, num_nodes, tree in shapes
    )


def adaptive_arms(
    target: Engine,
    arms: Sequence[BenchArm],
    controllers: Sequence[ControllerName],
    costs: Mapping[str, DraftCosts],
) -> tuple[BenchArm, ...]:
    """Return one arm per draft and controller, up to the draft's largest K.

    It goes on learning from prompt to prompt and from cell to cell, as it would in service.

    Raises:
        InvalidRequest: a controller needs costs that are not known.
    """
    ascending = sorted(arms, key=lambda arm: arm.num_speculative_tokens)
    largest = {arm.draft: arm for arm in ascending if arm.draft is not None}
    return tuple(
        replace(
            arm,
            name=f"{arm.name.rpartition(' ')[0]} {name}",
            engine=under(target, arm, name, costs),
            tree=None,
            adaptive=True,
        )
        for arm in largest.values()
        for name in controllers
    )


def under(
    target: Engine, arm: BenchArm, name: ControllerName, costs: Mapping[str, DraftCosts]
) -> Engine:
    """Return the engine of an arm with another controller."""
    assert isinstance(arm.engine, Engine) and arm.engine.drafter is not None
    assert arm.draft is not None
    config = replace(arm.engine.config, controller=name)
    drafter = arm.engine.drafter
    known = {arm.method: costs[arm.draft]} if arm.draft in costs else {}
    controller = default_controller(config, drafter, known)
    return target.with_draft(drafter, arm.num_speculative_tokens, controller=controller)


def warm_up(arms: Sequence[BenchArm], text: str, clock: Callable[[], float]) -> float:
    """Generate twice with every arm, so that no measurement includes initialisation.

    Returns:
        Seconds per token of all arms together, from the second time.
    """
    params = SamplingParams(temperature=0, max_tokens=WARM_UP_TOKENS, ignore_eos=True)
    seconds = 0.0
    for arm in arms:
        arm.engine.generate([text], params)
        start_s = clock()
        arm.engine.generate([text], params)
        seconds += clock() - start_s
    return seconds / WARM_UP_TOKENS


Loaded = TypeVar("Loaded", bound=Generator)

NUM_TOKENS = 8


def on_best_threads(
    load: Callable[[int], Loaded],
    text: str,
    clock: Callable[[], float],
    num_threads: int | None = None,
) -> tuple[Loaded, float]:
    """Load with one thread and with all threads, and keep the engine that decodes faster.

    A runner may fix its threads when it loads; torch has its own number, which is set for the whole
    process and which a runner may lower while it loads.

    Args:
        load: an engine that decodes plainly, for a number of threads.
        text: what it continues.
        clock: seconds.
        num_threads: the only number to use; None tries one thread and all.

    Returns:
        The engine, and its seconds per token, prefill included.
    """
    found: list[tuple[float, int, Loaded]] = []
    candidates = {1, torch.get_num_threads()} if num_threads is None else {num_threads}
    for candidate in sorted(candidates):
        torch.set_num_threads(candidate)
        engine = load(candidate)
        pace_s = seconds_per_token(engine, text, clock)
        found.append((pace_s, torch.get_num_threads(), engine))
    pace_s, num_torch_threads, best = min(found, key=lambda entry: entry[0])
    torch.set_num_threads(num_torch_threads)
    return best, pace_s


def seconds_per_token(plain: Generator, text: str, clock: Callable[[], float]) -> float:
    """Measure seconds per token of a short completion, excluding a first warm-up run."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain.generate([text], params)
    start_s = clock()
    plain.generate([text], params)
    return (clock() - start_s) / NUM_TOKENS
