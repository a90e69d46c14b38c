"""Our engine and its peers on the same weights and prompts, in turns, in one run.

python benchmarks/peers/compare.py --target zoo:code-40m --draft zoo:code-2m-for-40m --out DIR
python benchmarks/peers/compare.py --pair 292m --out DIR
python benchmarks/peers/compare.py --pair 292m --peers openvino --ks 2 4 --rounds 2 --out DIR

Runs with the same DIR share one page and one picture.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from cells import OURS
from client import KINDS, Kind
from harness import Harness, Plan
from protocol import PLAIN, SPECULATIVE, Setup
from report import write

from forerun.models.catalog import PREFIX, held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash

MAX_CONTEXT = 512
RANDOM_PAIR = (
    "The target has random weights and the draft is its first two layers, so these figures show "
    "the speed of the engines at a given acceptance, and no speed on real text."
)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or shipped model")
    parser.add_argument("--draft", help="of every engine; without it they decode plainly")
    parser.add_argument("--pair", help="instead of the two: a pair of benchmarks/pairs.py")
    parser.add_argument("--name", help="of the cell; default: the target's name")
    parser.add_argument("--own-draft", help="drafter for one more row of ours, such as a head")
    parser.add_argument("--peers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ks", nargs="+", type=int, default=[2, 3, 4, 6])
    parser.add_argument("--rounds", type=int, default=6, help="rounds of single prompts")
    parser.add_argument("--batch-rounds", type=int, default=3, help="rounds of batches; 0 for none")
    parser.add_argument("--choice-rounds", type=int, default=3, help="single prompts for every K")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=Path, default=Path("build/pairs"))
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    if (options.pair is None) == (options.target is None):
        parser.error("give either --pair, or --target and --draft")
    if options.pair is not None:
        options.target = str(options.pairs / options.pair / "target")
        options.draft = str(options.pairs / options.pair / "draft")
    options.name = options.name or options.pair or Path(options.target.removeprefix(PREFIX)).name
    return options


def kinds_of(options: argparse.Namespace) -> dict[str, Kind]:
    """The peers to run, ourselves always among them, and our row with another drafter."""
    names = options.peers if OURS in options.peers else [OURS, *options.peers]
    kinds = {name: KINDS[name] for name in names}
    if options.draft is None:
        kinds = {name: replace(kind, arms_per_worker=((PLAIN,),)) for name, kind in kinds.items()}
    if options.own_draft is not None:
        kinds[f"{OURS}, {Path(options.own_draft).name}"] = Kind(
            script=KINDS[OURS].script,
            arms_per_worker=((SPECULATIVE,),),
            draft=options.own_draft,
        )
    return kinds


def plan_of(options: argparse.Namespace, peers: tuple[str, ...]) -> Plan:
    """Rounds and prompts; one half of the prompts chooses K, the other is measured."""
    rounds = {1: options.rounds, options.batch: options.batch_rounds}
    logs = options.environments / "logs" / options.name
    logs.mkdir(parents=True, exist_ok=True)
    options.out.mkdir(parents=True, exist_ok=True)
    prompts = prompts_of(ModelFiles.find(options.target).folder, options.prompt_tokens)
    return Plan(
        peers=peers,
        rounds={batch: num for batch, num in rounds.items() if num > 0},
        choice_rounds={options.batch: 1, 1: options.choice_rounds},
        max_tokens=options.max_tokens,
        prompts=prompts[1::2],
        choice_prompts=prompts[::2],
        environments=options.environments.resolve(),
        logs=logs,
    )


def prompts_of(target: Path, num_tokens: int) -> list[list[int]]:
    """Held-out prompts, cut to equal length so that no peer pads; shorter ones are left out."""
    tokenizer = ModelFiles.find(target).tokenizer
    found = [tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    return [ids[-num_tokens:] for ids in found if len(ids) >= num_tokens]


def setup_of(options: argparse.Namespace) -> Setup:
    """What every worker loads."""
    scratch = options.environments.resolve() / "models"
    scratch.mkdir(parents=True, exist_ok=True)
    return Setup(
        target=str(ModelFiles.find(options.target).folder.resolve()),
        draft=str(ModelFiles.find(options.draft or options.target).folder.resolve()),
        ks=options.ks,
        threads=options.threads,
        max_batch=options.batch,
        max_context=MAX_CONTEXT,
        scratch=str(scratch),
    )


def facts_of(options: argparse.Namespace, harness: Harness) -> dict[str, Any]:
    """Where the figures come from."""
    pair = f"Target {options.target}, draft {options.draft or 'none'}, in every engine. K is one "
    pair += f"of {', '.join(map(str, options.ks))}. "
    return {
        "command": shlex.join(["python", *sys.argv]),
        "pair": pair + (RANDOM_PAIR if options.pair else ""),
        "method": (
            f"Greedy, 16-bit weights, {options.max_tokens} new tokens after "
            f"{options.prompt_tokens} tokens of code that the shipped models were not trained on; "
            "tokens over wall time, prefill included. Every engine drafts with the K that is its "
            "fastest, chosen on one half of the prompts and measured on the other. Every peer and "
            "arm continues a prompt (or batch) before the next comes; all workers but the one "
            "measured are stopped. Intervals: bootstrap over rounds. Same tokens: share of "
            "positions with our token; at 16 bits engines round differently, and texts seldom "
            "meet again after the first near tie."
        ),
        "provenance": collect(
            {name: content_hash(name) for name in (options.target, options.draft) if name}
        ).to_dict(),
        "workers": harness.descriptions,
        "idle_s": harness.idle_s,
        "rounds": harness.plan.rounds,
        "num_prompts": len(harness.plan.prompts),
    }


def main() -> int:
    options = parsed()
    started_s = time.perf_counter()

    def tell(stage: str) -> None:
        print(f"[{time.perf_counter() - started_s:6.1f} s] {stage}", file=sys.stderr, flush=True)

    kinds = kinds_of(options)
    harness = Harness(plan=plan_of(options, tuple(kinds)), tell=tell, kinds=kinds)
    status = 0
    try:
        harness.measure(setup_of(options))
    except KeyboardInterrupt:
        tell("interrupted; writing what there is")
        status = 130
    decode = ModelFiles.find(ModelFiles.find(options.target).folder).tokenizer.decode
    write(options.out, options.name, harness, facts_of(options, harness), decode)
    tell(f"written to {options.out}")
    return status or (1 if any(series.failure for series in harness.found.values()) else 0)


if __name__ == "__main__":
    sys.exit(main())
