"""Time of one pass in bf16, int8 and int4, over 8 layers of the 292M shape, random weights.

    python -m benchmarks.quantised.passes

The formats take turns; the figure is the second fastest of seven.
"""

from __future__ import annotations

import time

import torch
from tests.natives import decoder_of, geometry_for, load_kernels, random_parameters

from forerun.models.base import Context, pack
from forerun.models.runner.native import NativeModel, build_native_model

ROWS = (1, 2, 3, 4, 5, 6, 8, 16, 32)
FORMATS = ("auto", "int8", "int4")


def timed(model: NativeModel, num_rows: int) -> float:
    ids = torch.arange(num_rows)
    context = Context(model.store, ids.tolist())
    batch = pack([context.span(num_rows)], ids, [num_rows - 1], model.device)
    start_s = time.perf_counter()
    model.forward(batch)
    model.forward(batch)
    found = (time.perf_counter() - start_s) / 2
    context.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    decoder = decoder_of(
        hidden_size=1024,
        num_heads=16,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2816,
        vocab_size=8192,
        num_layers=8,
        tied=True,
    )
    parameters = {n: p.bfloat16() for n, p in random_parameters(decoder).items()}
    geometry = geometry_for(decoder, torch.bfloat16, 4, None)
    models = {
        name: build_native_model(decoder, parameters.__getitem__, geometry, load_kernels(2), name)
        for name in FORMATS
    }
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(7):
        for name, model in models.items():
            for rows in ROWS:
                times.setdefault((name, rows), []).append(timed(model, rows))
    for name, model in models.items():
        figures = " ".join(f"{n}: {sorted(times[name, n])[1] * 1e3:.2f}" for n in ROWS)
        print(f"{name} {model.bytes_read / 1e6:.0f} MB, ms by rows {figures}", flush=True)


if __name__ == "__main__":
    main()
