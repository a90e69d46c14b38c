"""Controllers against every fixed K, on workloads that stay the same and on one that does not.

    python benchmarks/control/goodput.py measure --threads 2   # a minute of blocks; repeat
    python benchmarks/control/goodput.py model --seconds 600   # the same, no time is measured
    python benchmarks/control/goodput.py report

Costs are those that `prediction.py measure` has measured. Arms take turns request by request. The
controllers go on learning from request to request, and begin anew with every call. `model` runs the
same engine on the same texts, but the clock is the cost table: of what controllers are told, and of
what their plans took. What deciding itself costs is not in it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, cycle
from typing import Any

from msgspec.structs import replace
from profiles import read_costs
from served import (
    LOOKAHEADS,
    Arm,
    Item,
    Place,
    add_place,
    block_of,
    endless,
    fixed_arms,
    read_blocks,
    rounded,
    texts_of,
    warm_up,
)

from forerun.control.base import USUAL_WIDTH, Capacity, Controller, Plan, RequestState
from forerun.control.config import ControllerName
from forerun.control.goodput import GoodputController
from forerun.drafters.registry import tree_methods
from forerun.engine.engine import Engine
from forerun.plan.costs import DraftCosts
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord

MIXED = "mixed stream"
STREAM = ("code, T=0", "prose, T=1", "edits, T=0", "code, T=1")
WORKLOADS: Mapping[str, tuple[str, ...]] = {
    "code, T=0": ("domain",),
    "code, T=1": ("domain",),
    "prose, T=1": ("domain",),
    "edits, T=0": ("suffix",),
    "code, T=1, off the shelf": ("shelf",),
    MIXED: ("domain", "suffix"),
}
CONTROLLERS: tuple[ControllerName, ...] = ("goodput", "auto")
"""Arms that are no fixed K; `goodput` only in blocks of before it was `auto`."""
METHODS = {"domain": "draft_model", "shelf": "draft_model", "suffix": "suffix"}
NAMES = {False: "goodput-blocks.jsonl", True: "goodput-modelled.jsonl"}
"""Of files of blocks, by whether time is modelled."""
AIM = 0.97
LEAST_BLOCKS = 4


class ModelClock:
    """What steps of one request take by the tables.

    Args:
        costs: of drafters by their methods.
    """

    def __init__(self, costs: Mapping[str, DraftCosts]) -> None:
        self.costs = costs

    def seconds(self, record: StepRecord, temperature: float) -> tuple[float, float, float]:
        """Of drafting, of the pass, and of everything else."""
        context, depth, nodes = record.context_tokens, record.depth_drafted, record.num_drafted
        if not depth:
            plain_s = next(iter(self.costs.values())).at(temperature).plain_step_s(context)
            return 0.0, plain_s, 0.0
        table = self.costs[record.method].at(temperature)
        pass_s, other_s = table.verify_step_s(nodes + 1, context), table.overhead_s(depth, context)
        draft_s = depth * table.draft_token_s(context)
        if record.path_children is not None:
            draft_s = table.tree_cycle_s(nodes, depth, USUAL_WIDTH, context) - pass_s - other_s
        return draft_s, pass_s, other_s


class OnModelClock(Controller):
    """Another controller, told what steps take by the tables and not by this machine's clock."""

    def __init__(self, inner: Controller, clock: ModelClock) -> None:
        self.inner = inner
        self.clock = clock
        self._temperature = 0.0

    def decide(self, states: Sequence[RequestState], capacity: Capacity) -> list[Plan]:
        for state in states:
            self._temperature = state.temperature
        return self.inner.decide(states, capacity)

    def observe(self, records: Sequence[StepRecord]) -> None:
        times = [self.clock.seconds(record, self._temperature) for record in records]
        self.inner.observe(
            [
                replace(record, draft_s=draft_s, verify_s=pass_s, other_s=other_s)
                for record, (draft_s, pass_s, other_s) in zip(records, times, strict=True)
            ]
        )


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("phase", choices=("measure", "model", "report"))
    flags.add_argument("--threads", type=int, default=2, help="plain decoding's best")
    flags.add_argument("--seconds", type=float, default=60.0, help="of measuring, loading apart")
    flags.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    add_place(flags)
    options = flags.parse_args()
    if options.phase == "report":
        report(Place.of(options))
    else:
        measure(options.phase == "model", options)


def measure(is_modelled: bool, options: argparse.Namespace) -> None:
    """Blocks of the workloads in turns, after those that are there."""
    place, workloads, seconds = Place.of(options), options.workloads, options.seconds
    path, target = place.results / NAMES[is_modelled], place.load(options.threads)
    costs = {work: costs_of(place, WORKLOADS[work]) for work in workloads}
    done = [block["workload"] for block in read_blocks(path)]
    queues = {work: queue_of(work, target, done.count(work)) for work in workloads}
    arms = {
        work: arms_of(place, target, work, next(queues[work]), is_modelled=is_modelled)
        for work in workloads
    }
    clocks = {work: ModelClock(costs[work]) for work in workloads}
    start_s, longest_s = time.perf_counter(), 0.0
    with path.open("a", encoding="utf-8", buffering=1) as file:
        for workload in cycle(workloads):
            block_s = time.perf_counter()
            if block_s - start_s + longest_s > seconds:
                return
            block = block_of(arms[workload], next(queues[workload]), done.count(workload))
            add_modelled(block, clocks[workload])
            done.append(workload)
            file.write(json.dumps({"workload": workload, **rounded(block)}) + "\n")
            longest_s = max(longest_s, time.perf_counter() - block_s)


def add_modelled(block: dict[str, Any], clock: ModelClock) -> None:
    """Beside the seconds of every arm what its steps take by the tables."""
    temperature = float(block["kind"][-1])
    for served in block["arms"].values():
        times = [clock.seconds(record, temperature) for record in served.pop("records")]
        served["modelled_s"] = sum(map(sum, times))


def arms_of(
    place: Place, target: Engine, workload: str, first: Item, *, is_modelled: bool
) -> list[Arm]:
    """Plain decoding, every drafter at every K, and the controllers; the models are warm."""
    names = WORKLOADS[workload]
    fixed = [Arm(name="plain", engine=target)]
    fixed += chain.from_iterable(fixed_arms(place, target, name) for name in names)
    loaded = target.with_draft([place.drafts[name] for name in names], LOOKAHEADS[-1])
    costs = costs_of(place, names)
    warm_up([*fixed, Arm(name="the controllers' drafters", engine=loaded)], first)
    return [*fixed, *adaptive_arms(target, loaded, costs, is_modelled=is_modelled)]


def costs_of(place: Place, names: Sequence[str]) -> dict[str, DraftCosts]:
    """Of drafters by their methods."""
    return {METHODS[name]: read_costs(place, name) for name in names}


def adaptive_arms(
    target: Engine, loaded: Engine, costs: Mapping[str, DraftCosts], *, is_modelled: bool
) -> Iterator[Arm]:
    """Controllers over all the drafters, which they share as far as one request at a time does."""
    assert loaded.drafter is not None
    controller: Controller = GoodputController(
        costs,
        LOOKAHEADS[-1],
        tree_methods=tree_methods(loaded.drafter),
        max_tree_nodes=loaded.config.max_nodes,
    )
    if is_modelled:
        controller = OnModelClock(controller, ModelClock(costs))
    yield Arm(name="auto", engine=target.with_draft(loaded.drafter, controller=controller))


def kinds_of(workload: str) -> Sequence[str]:
    """Kinds of requests that take turns in a workload."""
    return STREAM if workload == MIXED else (workload.removesuffix(", off the shelf"),)


def queue_of(workload: str, target: Engine, num_done: int) -> Iterator[Item]:
    """Requests of a workload without end, from where the last run stopped."""
    kinds = kinds_of(workload)
    sources = [endless(kind, target, texts_of(kind), num_done // len(kinds)) for kind in kinds]
    return chain.from_iterable(zip(*sources, strict=True))


def report(place: Place) -> None:
    """Every workload: its arms, and the controllers beside the best fixed K."""
    found: dict[str, Any] = {"asked": AIM, "provenance": place.provenance()}
    for is_modelled, blocks in NAMES.items():
        kinds = ("modelled_s",) if is_modelled else ("decode_s", "total_s", "modelled_s")
        name = "modelled" if is_modelled else "measured"
        print(name)
        found[name] = report_of(read_blocks(place.results / blocks), kinds)
    path = place.results / "goodput.json"
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def report_of(blocks: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> dict[str, Any]:
    """The same of one file."""
    found = {}
    for workload in WORKLOADS:
        own = [block["arms"] for block in blocks if block["workload"] == workload]
        if len(own) < LEAST_BLOCKS:
            continue
        fixed = [name for name in own[0] if name not in CONTROLLERS]
        arms = {
            name: {
                "tau": tau(own, name),
                **{f"tokens_per_s by {kind}": rate(own, name, kind) for kind in kinds},
            }
            for name in own[0]
        }
        beside = {
            f"{name} by {kind}": beside_best(own, fixed, name, kind, len(kinds_of(workload)))
            for name in CONTROLLERS
            if name in own[0]
            for kind in kinds
        }
        found[workload] = {"num_requests": len(own), "arms": arms, "beside_best": beside}
        show(workload, found[workload])
    return found


def show(workload: str, found: Mapping[str, Any]) -> None:
    """For people."""
    print(f"{workload}, {found['num_requests']} requests")
    for name, figures in found["arms"].items():
        print(f"  {name:12}", ", ".join(f"{key} {value:.2f}" for key, value in figures.items()))
    for name, beside in found["beside_best"].items():
        print(
            f"  {name:22} / best of the other half ({', '.join(beside['best'])}): "
            f"{beside['ratio']:.3f} ({beside['ci'][0]:.3f}-{beside['ci'][1]:.3f})"
        )


def rate(own: Sequence[Mapping[str, Any]], name: str, seconds: str = "decode_s") -> float:
    """Tokens per second; the first token of a request comes before its decoding."""
    first = seconds != "total_s"
    num_tokens = sum(block[name]["num_tokens"] - first for block in own)
    return num_tokens / sum(block[name][seconds] for block in own)


def tau(own: Sequence[Mapping[str, Any]], name: str) -> float:
    """Tokens per step, plain ones included."""
    num_tokens = sum(block[name]["num_tokens"] - 1 for block in own)
    return num_tokens / sum(block[name]["num_steps"] for block in own)


def beside_best(
    own: Sequence[Mapping[str, Any]],
    fixed: Sequence[str],
    name: str,
    seconds: str = "decode_s",
    num_kinds: int = 1,
) -> dict[str, Any]:
    """Rate of a controller over that of the fixed K which was best on the half it is not scored on.

    Every request has a fixed number of tokens, so rates of a request compare as its seconds do.
    Where kinds of requests take turns, either half has all of them.
    """
    halves: tuple[list[Mapping[str, Any]], ...] = ([], [])
    half_of = [at // num_kinds % 2 for at in range(len(own))]
    for block, half in zip(own, half_of, strict=True):
        halves[half].append(block)
    winners = [max(fixed, key=lambda arm: rate(half, arm, seconds)) for half in halves]
    scored = [(block, winners[1 - half]) for block, half in zip(own, half_of, strict=True)]
    ratio = bootstrap_ratio(
        [block[winner][seconds] for block, winner in scored],
        [block[name][seconds] for block, _ in scored],
        seed=0,
    )
    return {"best": winners, "ratio": ratio.estimate, "ci": [ratio.low, ratio.high]}


if __name__ == "__main__":
    main()
