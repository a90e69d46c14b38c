"""Tokens per second of two source trees on the same models, in turns.

    git worktree add /tmp/before 077b14d
    python benchmarks/pairs.py --out build/pairs
    python benchmarks/speed/before_after.py --before /tmp/before --pairs build/pairs --out F.json

Each tree runs in a process of its own, which waits while the other is measured. A round decodes the
same prompts in both, the order alternating; the ratio is the geometric mean over rounds with a
bootstrap interval over rounds (95%). K is fixed, two threads, prefill included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are scripts
from paused import PausedProcess, mean_ratio

HERE = Path(__file__).resolve().parents[2]
ZOO = HERE / "src" / "forerun" / "models" / "zoo"
SHIPPED = {"target": "zoo:code-11m", "draft": "zoo:code-2m"}
CELLS = {  # arm, temperature, batch, new tokens
    "code-11m": [
        *(("plain", 0, 1, 128), ("speculative", 0, 1, 128)),
        *(("plain", 1, 1, 128), ("speculative", 1, 1, 128)),
        *(("plain", 0, 8, 64), ("speculative", 0, 8, 64)),
    ],
    "29m": [("plain", 0, 1, 64), ("speculative", 0, 1, 64), ("speculative", 0, 8, 64)],
    "292m": [("plain", 0, 1, 32), ("speculative", 0, 1, 32), ("speculative", 0, 8, 32)],
    "code-40m": [
        *(("plain", 0, 1, 96), ("speculative", 0, 1, 96)),
        *(("plain", 1, 1, 96), ("speculative", 1, 1, 96), ("speculative", 0, 8, 48)),
    ],
}
K = 4


def worker(job: dict[str, str]) -> None:
    """Decode what standard input asks for and print tokens per second."""
    from forerun import Engine, EngineConfig, SamplingParams

    try:
        from forerun.models.catalog import held_out_prompts
    except ImportError:  # its place before 2026-11-23
        from forerun.models.zoo.catalog import held_out_prompts

    config = EngineConfig(
        num_threads=2,
        max_batch=8,
        sharing="none",
        num_speculative_tokens=K,
        controller="fixed",
    )
    engines = {
        "plain": Engine.load(job["target"], config=config),
        "speculative": Engine.load(job["target"], draft=job["draft"], config=config),
    }
    texts = [prompt.text for prompt in held_out_prompts()]
    print("ready", flush=True)
    for line in sys.stdin:
        arm, temperature, batch, max_tokens, first = json.loads(line)
        params = SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True)
        started = time.perf_counter()
        outputs = engines[arm].generate(texts[first : first + batch], params)
        seconds = time.perf_counter() - started
        num_tokens = sum(len(c.token_ids) for o in outputs for c in o.completions)
        print(json.dumps(num_tokens / seconds), flush=True)


def compare(
    before: PausedProcess, after: PausedProcess, cell: tuple[Any, ...], rounds: int
) -> dict[str, Any]:
    """One cell: medians of both trees and the ratio after / before with its interval."""
    for tree in (before, after):
        tree.tokens_per_s(*cell[:3], 8, 0)
    pairs = []
    for number in range(rounds):
        found = {}
        for tree in (before, after) if number % 2 else (after, before):
            found[tree] = tree.tokens_per_s(*cell, number * 3 % 50)
        pairs.append((found[before], found[after]))
    ratio, low, high = mean_ratio([b for _, b in pairs], [a for a, _ in pairs])
    return {
        "before_tokens_per_s": statistics.median(a for a, _ in pairs),
        "after_tokens_per_s": statistics.median(b for _, b in pairs),
        "ratio": ratio,
        "low": low,
        "high": high,
        "rounds": pairs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--pairs", type=Path, default=Path("build/pairs"))
    parser.add_argument("--sizes", nargs="+", choices=[*CELLS], default=[*CELLS])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    figures = {}
    for size in options.sizes:
        trees = []
        for tree in (options.before, options.after):
            folder = options.pairs / size
            job = dict(SHIPPED)
            if size == "code-40m":  # older trees do not ship it
                job = {"target": str(ZOO / size), "draft": str(ZOO / "code-2m-for-40m")}
            elif size != "code-11m":
                job = {"target": str(folder / "target"), "draft": str(folder / "draft")}
            trees.append(PausedProcess(__file__, tree, job))
        rounds = max(8, options.rounds // 2) if size == "292m" else options.rounds
        for cell in CELLS[size]:
            name = f"{size}, {cell[0]}, T={cell[1]}, batch {cell[2]}"
            found = figures[name] = compare(*trees, cell, rounds)
            print(
                f"{name}: {found['before_tokens_per_s']:.0f} -> {found['after_tokens_per_s']:.0f} "
                f"tokens/s, {found['ratio']:.3f} ({found['low']:.3f} to {found['high']:.3f})",
                flush=True,
            )
        for tree in trees:
            tree.process.kill()
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
