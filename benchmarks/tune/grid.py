"""Does tune choose the best setting? Measures every arm in full, and replays the choice on parts.

    python benchmarks/tune/grid.py 'forerun serve zoo:smollm2-135m' --clients 1 4 --out grid

measures all arms that `forerun tune` would compare, without giving any up. Then the race of tune
chooses from the first half of the blocks, and from the second; each choice is judged by the other
half: right if it is the fastest arm there, or not shown to be slower than it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from forerun.provenance import collect
from forerun.tune.arms import Load
from forerun.tune.command_line import parse_command, plan_arms
from forerun.tune.config import TuneConfig
from forerun.tune.process import free_ports
from forerun.tune.race import BlockTimes, GivenUp, Race, estimate_speedup
from forerun.tune.run import Tuner


class FullGrid(Race):
    """A race that gives up no arm and ends after its rounds."""

    def is_decided(self, load: Load) -> bool:
        return self.count_rounds(load) >= self.max_rounds

    def finish_round(self, seconds_left: float, arm_s: float = 0.0) -> list[GivenUp]:
        return []


def replay(arms: Sequence[str], load: Load, blocks: Sequence[BlockTimes], num_rounds: int) -> str:
    """Return the arm that tune would choose from these blocks."""
    race = Race(arms, [load], max_rounds=num_rounds)
    indices = sorted({block.index for block in blocks})
    by_place = {(b.arm, indices.index(b.index)): b for b in blocks}
    while planned := race.plan_round():
        for arm, _, index in planned:
            block = by_place[arm, index]
            race.add(
                BlockTimes(
                    arm=arm,
                    load=load,
                    index=index,
                    num_tokens=block.num_tokens,
                    wall_s=block.wall_s,
                )
            )
        race.finish_round(1e9)
    return race.recommend(load).arm


def judge_choice(chosen: str, blocks: Sequence[BlockTimes]) -> dict[str, object]:
    """Compare a choice with the fastest arm of other blocks."""
    by_arm: dict[str, list[BlockTimes]] = {}
    for block in blocks:
        by_arm.setdefault(block.arm, []).append(block)
    ratios = {arm: estimate_speedup(own, by_arm[chosen]) for arm, own in by_arm.items()}
    best = max(ratios, key=lambda arm: ratios[arm].estimate)
    against_none = estimate_speedup(by_arm[chosen], by_arm["none"])
    return {
        "chosen": chosen,
        "best": best,
        "best_over_chosen": asdict(ratios[best]),
        "chosen_over_none": asdict(against_none),
        "is_right": chosen == best or ratios[best].low <= 1.0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command")
    parser.add_argument("--draft", nargs="*", default=[])
    parser.add_argument("--k", nargs="*", type=int, default=[])
    parser.add_argument("--clients", nargs="*", type=int, default=[1])
    parser.add_argument("--temperature", nargs="*", type=float, default=[0.0, 1.0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    loads = [Load(clients=c, temperature=t) for t in options.temperature for c in options.clients]
    arms = plan_arms(parse_command(options.command), options.draft, options.k, free_ports())
    config = TuneConfig(loads=tuple(loads), max_tokens=options.max_tokens, minutes=600.0)
    tuner = Tuner(
        arms,
        config,
        source=options.command,
        folder=options.out,
        notify=lambda text: print(text, flush=True),
    )
    tuner.race = FullGrid([arm.name for arm in arms], loads, max_rounds=options.blocks)
    with tuner.state, tuner.fleet:
        tuner._restore()
        tuner._choose()

    results = []
    for load in loads:
        living = tuner.race.living(load)
        blocks = [b.times for arm in living for b in tuner._blocks[arm, load, False]]
        half = options.blocks // 2
        halves = [b for b in blocks if b.index < half], [b for b in blocks if b.index >= half]
        by_arm = {arm: [b for b in blocks if b.arm == arm] for arm in living}
        results.append(
            {
                "load": load.label,
                "speedups": {
                    arm: asdict(estimate_speedup(own, by_arm["none"]))
                    for arm, own in by_arm.items()
                },
                "tokens_per_s_of_none": sum(b.num_tokens for b in by_arm["none"])
                / sum(b.wall_s for b in by_arm["none"]),
                "choices": [
                    judge_choice(replay(living, load, own, half), other)
                    for own, other in (halves, halves[::-1])
                ],
            }
        )
    given_up = {a.arm: a.reason for r in tuner.report().loads for a in r.arms if a.reason}
    report = {
        "command": options.command,
        "arms": {arm.name: arm.shown_command for arm in arms},
        "given_up": given_up,
        "blocks_per_arm": options.blocks,
        "loads": results,
        "provenance": collect({}).to_dict(),
    }
    options.out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    for result in results:
        print(result["load"])
        for arm, ratio in result["speedups"].items():
            print(f"  {arm:40} {ratio['estimate']:.2f} ({ratio['low']:.2f}-{ratio['high']:.2f})")
        for choice in result["choices"]:
            print(f"  chosen {choice['chosen']}, best {choice['best']}: {choice['is_right']}")


if __name__ == "__main__":
    main()
