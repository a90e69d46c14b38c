"""Time of a pass over 256 rows of a prompt beside torch.mm in fp32 of the same matrices, in turns.

python benchmarks/speed/prefill.py --rounds 10
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from forerun.models.base import Context, pack
from forerun.models.checkpoint import ModelFiles
from forerun.models.load import load_model
from forerun.provenance import collect
from forerun.theory.intervals import median_interval

NUM_ROWS = 256


def shapes_of(config: dict[str, int]) -> list[tuple[int, int]]:
    """Inputs and outputs of the matrices that every row of a prompt is multiplied with."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // config["num_attention_heads"]
    queries = width * config["num_attention_heads"]
    keys = width * config["num_key_value_heads"]
    layer = [(hidden, queries + 2 * keys), (queries, hidden), (hidden, 2 * inner), (inner, hidden)]
    return layer * config["num_hidden_layers"]


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="zoo:code-40m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load_model(
        options.model,
        max_context=NUM_ROWS,
        num_threads=options.threads,
        dtype=options.dtype,
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.empty(NUM_ROWS, dtype=torch.int64)
    ids.random_(model.vocab_size, generator=generator)
    sequence = Context(model.store, ids.tolist())
    batch = pack([sequence.span(NUM_ROWS)], ids, [NUM_ROWS - 1], model.device)
    shapes = shapes_of(
        json.loads((ModelFiles.find(options.model).folder / "config.json").read_text())
    )
    matrices = {shape: torch.empty(shape).normal_(generator=generator) for shape in set(shapes)}
    rows = {size: torch.ones(NUM_ROWS, size) for size, _ in matrices}

    def multiply() -> None:
        for shape in shapes:
            torch.mm(rows[shape[0]], matrices[shape])

    pairs = []
    for index in range(-2, options.rounds):
        passed, multiplied = timed(lambda: model.forward(batch)), timed(multiply)
        if index >= 0:
            pairs.append((passed, multiplied))
    share = median_interval([multiplied / passed for passed, multiplied in pairs])
    operations = 2 * NUM_ROWS * sum(a * b for a, b in shapes)
    passed, multiplied = (median(times) for times in zip(*pairs, strict=True))
    print(
        json.dumps(
            {
                "rows": NUM_ROWS,
                "dtype": options.dtype,
                "threads": options.threads,
                "pass_ms": round(1e3 * passed, 3),
                "mm_ms": round(1e3 * multiplied, 3),
                "pass_gflops": round(operations / passed / 1e9, 1),
                "mm_gflops": round(operations / multiplied / 1e9, 1),
                "mm_over_pass": [round(v, 3) for v in (share.estimate, share.low, share.high)],
            }
        )
    )
    print(collect({"target": options.model}).line)


if __name__ == "__main__":
    main()
