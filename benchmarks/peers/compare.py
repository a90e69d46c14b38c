"""Our engine and its peers on the same weights and prompts, in turns, in one run.

python benchmarks/peers/compare.py --out build/peer-figures
python benchmarks/peers/compare.py --peers forerun openvino --sizes 29m --rounds 2 --out DIR
"""

from __future__ import annotations

import argparse
import shlex
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

from cells import OURS
from client import KINDS
from harness import Harness, Plan
from protocol import Setup
from report import write

from forerun.models.load import load_tokenizer
from forerun.provenance import collect, content_hash

K = 4
MAX_CONTEXT = 1024
PASSAGE = "os.py"
"""The module of the standard library that prompts are cut from, one after another."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--sizes", nargs="+", default=["29m", "292m"])
    parser.add_argument("--rounds", type=int, default=5, help="rounds of single prompts")
    parser.add_argument("--batch-rounds", type=int, default=3, help="rounds of batches; 0 for none")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--prompt-tokens", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=Path, default=Path("build/pairs"))
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def plan_of(options: argparse.Namespace) -> Plan:
    """Peers with ourselves among them, rounds and prompts."""
    peers = options.peers if OURS in options.peers else [OURS, *options.peers]
    rounds = {1: options.rounds, options.batch: options.batch_rounds}
    logs = options.out / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    return Plan(
        peers=tuple(peers),
        rounds={batch: num for batch, num in rounds.items() if num > 0},
        max_tokens=options.max_tokens,
        prompts=prompts_of(options.pairs / options.sizes[0] / "target", options.prompt_tokens),
        environments=options.environments.resolve(),
        logs=logs,
    )


def prompts_of(target: Path, num_tokens: int) -> list[list[int]]:
    """Passages of equal length, so that no peer pads."""
    text = Path(sysconfig.get_paths()["stdlib"], PASSAGE).read_text(encoding="utf-8")
    ids = load_tokenizer(target).encode(text)
    return [ids[i : i + num_tokens] for i in range(0, len(ids) - num_tokens + 1, num_tokens)]


def setup_of(options: argparse.Namespace, size: str) -> Setup:
    """What every worker loads."""
    pair = options.pairs.resolve() / size
    return Setup(
        target=str(pair / "target"),
        draft=str(pair / "draft"),
        k=K,
        threads=options.threads,
        max_batch=options.batch,
        max_context=MAX_CONTEXT,
        scratch=str(options.pairs.resolve()),
    )


def facts_of(options: argparse.Namespace, harness: Harness) -> dict[str, Any]:
    """Where the figures come from."""
    models = [
        str(options.pairs / size / name) for size in options.sizes for name in ("target", "draft")
    ]
    return {
        "command": shlex.join(["python", *sys.argv]),
        "method": (
            f"Greedy, bf16, {options.max_tokens} new tokens after {options.prompt_tokens} tokens "
            f"of Python's `{PASSAGE}`; tokens over wall time, prefill included; K={K}. Every peer "
            "and arm continues a prompt (or batch) before the next comes; all workers but the one "
            "measured are stopped. Intervals: bootstrap over rounds. Same tokens: share of "
            "positions with our token; bf16 is not token-exact across engines on random weights."
        ),
        "provenance": collect({name: content_hash(name) for name in models}).to_dict(),
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

    harness = Harness(plan=plan_of(options), tell=tell)
    try:
        for size in options.sizes:
            harness.measure(size, setup_of(options, size))
            write(options.out, harness.found, facts_of(options, harness))
    except KeyboardInterrupt:
        tell("interrupted; writing what there is")
        write(options.out, harness.found, facts_of(options, harness))
        return 130
    tell(f"written to {options.out}")
    return 1 if any(series.failure for series in harness.found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
