"""Time of one pass of two source trees by batch, context and rows, in turns.

    git worktree add /tmp/before COMMIT
    python benchmarks/speed/passes.py --before /tmp/before

Every sequence of a batch feeds the same number of rows behind a context of the same length. Each
tree runs in a process of its own, which waits while the other is measured; a figure is the median
over rounds of the median of `REPEATS` passes, a ratio the geometric mean over rounds with its
bootstrap interval (95%). Then of both trees what several rows of a sequence cost in rows: the mean
ratio of their time to that of one row, with its interval. With --threads 1 times are of the
processor, on which other processes have less influence.
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
REPEATS = 5
CELLS = ((1, 64), (1, 512), (8, 64), (8, 512))  # sequences, context
ROWS = (1, 2, 5, 8)  # of every sequence
CHUNK = 64  # rows of a prompt in one pass


def worker(job: dict[str, Any]) -> None:
    """Answer every [sequences, context, rows] with the milliseconds of such a pass."""
    import torch

    from forerun.models.base import Context, pack
    from forerun.models.load import load_model

    model = load_model(
        job["model"], max_context=640, num_threads=job["threads"], weights=job["weights"]
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(640, dtype=torch.int64)
    ids.random_(model.vocab_size, generator=generator)
    clock = time.thread_time if job["threads"] == 1 else time.perf_counter
    held: tuple[int, int] | None = None
    sequences: list[Context] = []
    print("ready", flush=True)
    for line in sys.stdin:
        num_sequences, context, num_rows = json.loads(line)
        if held != (num_sequences, context):
            held = num_sequences, context
            for sequence in sequences:
                sequence.close()
            text = ids[: context + max(ROWS)].tolist()
            sequences = [Context(model.store, text) for _ in range(num_sequences)]
            for sequence in sequences:
                for chunk in ids[:context].split(CHUNK):
                    span = sequence.span(len(chunk))
                    model.forward(pack([span], chunk, [0], model.device))
                    sequence.commit(range(len(chunk)))
        spans = [sequence.span(num_rows) for sequence in sequences]
        rows = range(num_rows * num_sequences)
        fed = ids[context : context + num_rows].repeat(num_sequences)
        batch = pack(spans, fed, rows, model.device)
        model.forward(batch)
        times = []
        for _ in range(REPEATS):
            started_s = clock()
            model.forward(batch)
            times.append(clock() - started_s)
        print(json.dumps(1e3 * statistics.median(times)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--after", type=Path, default=HERE)
    parser.add_argument("--model", default="zoo:code-40m")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--sequences", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--worker", type=json.loads)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.worker)
        return
    job = {"model": options.model, "weights": options.weights, "threads": options.threads}
    trees = [PausedProcess(__file__, tree, job) for tree in (options.before, options.after)]
    for cell in (cell for cell in CELLS if cell[0] in options.sequences):
        found: dict[int, tuple[list[float], list[float]]] = {rows: ([], []) for rows in ROWS}
        for number in range(options.rounds):
            for num_rows, times in found.items():
                for place in (0, 1) if number % 2 else (1, 0):
                    times[place].append(trees[place].tokens_per_s(*cell, num_rows))
        for num_rows, times in found.items():
            before, after = map(statistics.median, times)
            ratio, low, high = mean_ratio(times[1], times[0])
            print(
                f"batch {cell[0]}, context {cell[1]}, rows {num_rows}: {before:.2f} -> "
                f"{after:.2f} ms, {ratio:.3f} ({low:.3f}-{high:.3f})",
                flush=True,
            )
        for place, name in enumerate(("before", "after")):
            for num_rows in ROWS[1:]:
                ratio, low, high = mean_ratio(found[num_rows][place], found[1][place])
                print(f"{name}, {num_rows} rows in rows: {ratio:.2f} ({low:.2f}-{high:.2f})")
    for tree in trees:
        tree.process.kill()


if __name__ == "__main__":
    main()
