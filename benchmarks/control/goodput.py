"""Controllers against every fixed K, on workloads that stay the same and on one that does not.

    python benchmarks/control/goodput.py measure --threads 2   # a minute of blocks; repeat
    python benchmarks/control/goodput.py report

Costs are those that `prediction.py profile` has measured. Arms take turns request by request. The
controllers go on learning from request to request, and begin anew with every call of `measure`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, count, cycle
from pathlib import Path
from typing import Any

from profiles import read_costs
from served import (
    DRAFTS,
    LOOKAHEADS,
    Arm,
    Item,
    block_of,
    fixed_arms,
    items_of,
    load_target,
    rounded,
    warm_up,
)
from texts import Text, code_texts, edit_texts, prose_texts

from forerun.control.base import Controller
from forerun.control.goodput import GoodputController
from forerun.control.safety import SafeController
from forerun.engine.engine import Engine
from forerun.theory.intervals import Interval, bootstrap_ratio

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
CONTROLLERS: Mapping[str, Callable[[GoodputController], Controller]] = {
    "goodput": lambda goodput: goodput,
    "auto": SafeController,
}
METHODS = {"domain": "draft_model", "shelf": "draft_model", "suffix": "suffix"}
BLOCKS = Path(__file__).parent / "results" / "goodput-blocks.jsonl"
AIM = 0.97


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    flags.add_argument("phase", choices=("measure", "report"))
    flags.add_argument("--threads", type=int, default=2, help="plain decoding's best")
    flags.add_argument("--seconds", type=float, default=60.0, help="of measuring, loading apart")
    flags.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    options = flags.parse_args()
    if options.phase == "report":
        report()
    else:
        measure(load_target(options.threads), options.workloads, options.seconds)


def measure(target: Engine, workloads: Sequence[str], seconds: float) -> None:
    """Blocks of the workloads in turns, after those that are there."""
    done = [block["workload"] for block in read_blocks()]
    arms = {workload: arms_of(target, workload) for workload in workloads}
    queues = {work: queue_of(work, target, done.count(work)) for work in workloads}
    for workload in workloads:
        warm_up(
            [arm for arm in arms[workload] if arm.name not in CONTROLLERS], next(queues[workload])
        )
    start_s, longest_s = time.perf_counter(), 0.0
    with BLOCKS.open("a", encoding="utf-8") as file:
        for workload in cycle(workloads):
            block_s = time.perf_counter()
            if block_s - start_s + longest_s > seconds:
                return
            block = block_of(arms[workload], next(queues[workload]), done.count(workload))
            done.append(workload)
            file.write(json.dumps({"workload": workload, **rounded(block)}) + "\n")
            longest_s = max(longest_s, time.perf_counter() - block_s)


def arms_of(target: Engine, workload: str) -> list[Arm]:
    """Plain decoding, every drafter at every K, and the controllers."""
    names = WORKLOADS[workload]
    fixed = [Arm(name="plain", engine=target)]
    fixed += chain.from_iterable(fixed_arms(target, name) for name in names)
    return [*fixed, *adaptive_arms(target, names)]


def adaptive_arms(target: Engine, names: Sequence[str]) -> Iterator[Arm]:
    """Controllers over all the drafters, which they share as far as one request at a time does."""
    loaded = target.with_draft([DRAFTS[name] for name in names], LOOKAHEADS[-1])
    assert loaded.drafter is not None
    costs = {METHODS[name]: read_costs(name) for name in names}
    for name, wrapped in CONTROLLERS.items():
        controller = wrapped(GoodputController(costs, LOOKAHEADS[-1]))
        yield Arm(
            name=name, engine=target.with_draft(loaded.drafter.drafter, controller=controller)
        )


def queue_of(workload: str, target: Engine, num_done: int) -> Iterator[Item]:
    """Requests of a workload without end, from where the last run stopped."""
    kinds = STREAM if workload == MIXED else (workload.removesuffix(", off the shelf"),)
    sources = [endless(kind, target, num_done // len(kinds)) for kind in kinds]
    return chain.from_iterable(zip(*sources, strict=True))


def texts_of(kind: str) -> list[Text]:
    """All there are."""
    return {"code": code_texts, "prose": prose_texts, "edits": edit_texts}[kind.partition(",")[0]]()


def endless(kind: str, target: Engine, num_done: int) -> Iterator[Item]:
    """Texts of a kind, again from the first when they run out."""
    texts = texts_of(kind)
    for at in count(num_done):
        yield from items_of(kind, target, [texts[at % len(texts)]])


def read_blocks() -> list[dict[str, Any]]:
    """Blocks measured so far."""
    if not BLOCKS.exists():
        return []
    return [json.loads(line) for line in BLOCKS.read_text(encoding="utf-8").splitlines()]


def report() -> None:
    """Every workload: its arms, and the controllers beside the best fixed K."""
    blocks = read_blocks()
    for workload in WORKLOADS:
        own = [block["arms"] for block in blocks if block["workload"] == workload]
        if len(own) < 4:
            continue
        print(f"{workload}, {len(own)} requests")
        fixed = [name for name in own[0] if name not in CONTROLLERS]
        for name in own[0]:
            print(
                f"  {name:14} {rate(own, name):7.0f} tokens/s decoding, "
                f"{rate(own, name, 'total_s'):7.0f} in all, tau {tau(own, name):.2f}"
            )
        for name in CONTROLLERS:
            for seconds in ("decode_s", "total_s"):
                winners, ratio = beside_best(own, fixed, name, seconds)
                print(
                    f"  {name:8} / best of the other half ({winners[0]}, {winners[1]}): "
                    f"{ratio.estimate:.3f} ({ratio.low:.3f}-{ratio.high:.3f}), {seconds}"
                )


def rate(own: Sequence[Mapping[str, Any]], name: str, seconds: str = "decode_s") -> float:
    """Tokens per second; the first token of a request comes before its decoding."""
    first = seconds == "decode_s"
    num_tokens = sum(block[name]["num_tokens"] - first for block in own)
    return num_tokens / sum(block[name][seconds] for block in own)


def tau(own: Sequence[Mapping[str, Any]], name: str) -> float:
    """Tokens per step, plain ones included."""
    num_tokens = sum(block[name]["num_tokens"] - 1 for block in own)
    return num_tokens / sum(block[name]["num_steps"] for block in own)


def beside_best(
    own: Sequence[Mapping[str, Any]], fixed: Sequence[str], name: str, seconds: str = "decode_s"
) -> tuple[tuple[str, str], Interval]:
    """Rate of a controller over that of the fixed K which was best on the half it is not scored on.

    Every request has a fixed number of tokens, so rates of a request compare as its seconds do.
    """
    halves = own[0::2], own[1::2]
    winners = [max(fixed, key=lambda arm: rate(half, arm, seconds)) for half in halves]
    scored = [(block, winners[1 - at % 2]) for at, block in enumerate(own)]
    ratio = bootstrap_ratio(
        [block[winner][seconds] for block, winner in scored],
        [block[name][seconds] for block, _ in scored],
        seed=0,
    )
    return (winners[0], winners[1]), ratio


if __name__ == "__main__":
    main()
