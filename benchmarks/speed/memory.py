"""Peak memory against what was computed, and start to first token against reading the weights file.

Every measurement is a fresh process with the files in the page cache. Peak: the high-water mark
of the process (VmHWM, Linux) less what it was with everything imported and nothing loaded, after a
full batch has filled the KV to its last token; computed: weights, KV and logits as the check before
loading works them out. Start: from the first line of the program, imports included, to the first
token; beside it, reading every weights file.

    python benchmarks/speed/memory.py --target TARGET --draft build/pairs/292m/draft
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CHUNK_BYTES = 1 << 24
NUM_TOKENS = 64
"""Generated; the prompt fills the rest of the context."""


def measure_once(options: argparse.Namespace) -> dict[str, float]:
    """In a fresh process: load, generate, and say what it took."""
    started_s = time.perf_counter()
    from forerun.engine.config import EngineConfig
    from forerun.engine.engine import Engine
    from forerun.sampling.config import SamplingParams

    prompt = list(range(100, 100 + options.max_context - NUM_TOKENS))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    config = EngineConfig(
        controller="fixed",
        num_speculative_tokens=options.k,
        max_batch=options.max_batch,
        max_context=options.max_context,
        num_threads=options.threads,
    )
    imported_s = time.perf_counter()
    imported_bytes = high_water_bytes()
    engine = Engine.load(options.target, options.draft, config=config)
    loaded_s = time.perf_counter()
    loaded_bytes = high_water_bytes()
    chunks = engine.stream(prompt, params)
    next(chunks)
    first_s = time.perf_counter()
    chunks.close()
    engine.generate([prompt] * options.max_batch, params)
    return {
        "imports_s": imported_s - started_s,
        "load_s": loaded_s - imported_s,
        "first_token_s": first_s - started_s,
        "imported_bytes": imported_bytes,
        "load_bytes": loaded_bytes - imported_bytes,
        "peak_bytes": high_water_bytes() - imported_bytes,
    }


def high_water_bytes() -> int:
    """Most memory this process has had resident so far."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def computed_bytes(options: argparse.Namespace) -> dict[str, int]:
    """What the models need by their files."""
    from forerun.models.checkpoint import ModelFiles
    from forerun.models.load import choose_dtype
    from forerun.models.memory import KVGeometry, estimate

    total = {"weights_bytes": 0, "kv_bytes": 0, "logits_bytes": 0}
    for name in models_of(options):
        checkpoint = ModelFiles.open(name)
        architecture = checkpoint.sizes
        dtype = choose_dtype("auto", checkpoint)
        geometry = KVGeometry(
            num_layers=architecture.num_layers,
            num_kv_heads=architecture.num_kv_heads,
            head_dim=architecture.head_dim,
            num_slots=options.max_batch,
            capacity=min(options.max_context, architecture.max_positions),
            max_staged_rows=options.k + 1,
            dtype=dtype,
        )
        weights = sum(path.stat().st_size for path in checkpoint.weight_files)
        needed = estimate(weights // dtype.itemsize, architecture, geometry)
        total["weights_bytes"] += needed.weights_bytes
        total["kv_bytes"] += needed.kv_bytes
        total["logits_bytes"] += needed.logits_bytes
    return total


def reading_s(options: argparse.Namespace) -> float:
    """Reading every weights file from the page cache, in chunks of one buffer."""
    from forerun.models.checkpoint import ModelFiles

    buffer = bytearray(CHUNK_BYTES)
    start_s = time.perf_counter()
    for name in models_of(options):
        for path in ModelFiles.open(name).weight_files:
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass
    return time.perf_counter() - start_s


def models_of(options: argparse.Namespace) -> list[str]:
    return [name for name in (options.target, options.draft) if name is not None]


def in_fresh_process() -> dict[str, float]:
    """One measurement with the same arguments."""
    command = [sys.executable, *sys.argv, "--once"]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(run.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default=None)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--max-batch", type=int, default=8)
    parser.add_argument("--max-context", type=int, default=256)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here too")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure_once(options)))
        return
    report(options)


def report(options: argparse.Namespace) -> None:
    """Measure, print, write."""
    from forerun.provenance import collect, content_hash

    reading_s(options)  # the first reading fills the page cache
    read_s = statistics.median(reading_s(options) for _ in range(options.repeats))
    runs = [in_fresh_process() for _ in range(options.repeats)]
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    computed = computed_bytes(options)
    total = sum(computed.values())
    content = {
        "arguments": sys.argv[1:],
        "computed": computed,
        "measured": found,
        "runs": runs,
        "peak_over_computed": found["peak_bytes"] / total,
        "read_s": read_s,
        "first_token_after_read_s": found["first_token_s"] - read_s,
        "provenance": collect({name: content_hash(name) for name in models_of(options)}).to_dict(),
    }
    parts = ", ".join(f"{name[:-6]} {size / 1e6:.0f}" for name, size in computed.items())
    print(f"computed {total / 1e6:.0f} MB ({parts})")
    print(
        f"peak {found['peak_bytes'] / 1e6:.0f} MB above imports "
        f"({content['peak_over_computed']:.2f}x), {found['load_bytes'] / 1e6:.0f} MB after loading"
    )
    print(
        f"first token {found['first_token_s']:.2f} s after start (imports {found['imports_s']:.2f} "
        f"s, loading {found['load_s']:.2f} s); reading the files {read_s:.2f} s"
    )
    if options.out is not None:
        options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
