"""Time of one pass of two source trees by batch and context, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/speed/passes.py --before /tmp/before

Every sequence of a batch feeds one row (`--rows`: more) behind a context of the same length. Each
tree runs in a process of its own, which waits while the other is measured; a figure is the median
over rounds of the median of `REPEATS` passes, a ratio the geometric mean over rounds with its
bootstrap interval (95%).
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
REPEATS = 7
CELLS = ((1, 64), (1, 192), (1, 512), (8, 64), (8, 192), (8, 512))  # sequences, context


def worker(job: dict[str, Any]) -> None:
    """Answer every [sequences, context, rows] with the milliseconds of such a pass."""
    import torch

    from forerun.models.base import Context, pack
    from forerun.models.load import load_model

    model = load_model(
        job["model"], max_context=640, num_threads=job["threads"], weights=job["weights"]
    )
    generator = torch.Generator().manual_seed(0)
    print("ready", flush=True)
    for line in sys.stdin:
        num_sequences, context, num_rows = json.loads(line)
        ids = torch.empty(context + num_rows, dtype=torch.int64)
        ids.random_(model.vocab_size, generator=generator)
        sequences = [Context(model.store, ids.tolist()) for _ in range(num_sequences)]
        for sequence in sequences:
            span = sequence.span(context)
            model.forward(pack([span], ids[:context], [0], model.device))
            sequence.commit(range(context))
        spans = [sequence.span(num_rows) for sequence in sequences]
        rows = range(num_rows * num_sequences)
        batch = pack(spans, ids[context:].repeat(num_sequences), rows, model.device)
        model.forward(batch)
        times = []
        for _ in range(REPEATS):
            started_s = time.perf_counter()
            model.forward(batch)
            times.append(time.perf_counter() - started_s)
        for sequence in sequences:
            sequence.close()
        print(json.dumps(1e3 * statistics.median(times)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--model", default="zoo:code-40m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1, help="per sequence")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    job = {"model": options.model, "weights": options.weights, "threads": options.threads}
    trees = [PausedProcess(__file__, tree, job) for tree in (options.before, options.after)]
    for cell in CELLS:
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(options.rounds):
            for place in (0, 1) if number % 2 else (1, 0):
                found[place].append(trees[place].tokens_per_s(*cell, options.rows))
        before, after = map(statistics.median, found)
        ratio, low, high = mean_ratio(found[1], found[0])
        print(
            f"batch {cell[0]}, context {cell[1]}: {before:.2f} -> {after:.2f} ms, "
            f"{ratio:.3f} ({low:.3f}-{high:.3f})",
            flush=True,
        )
    for tree in trees:
        tree.process.kill()


if __name__ == "__main__":
    main()
