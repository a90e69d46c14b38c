"""Cost of a row of the target's distribution: rerun, or from cached hidden states.

    python benchmarks/align/teachers.py --threads 2 [--seconds 30] [--out FILE.json]

The same packed batches of program text go to every teacher, which gives the distributions of all
learned rows as training needs them, 256 at a time. What lies between is measured too: the target's
body for the one, reading states from disk for the other.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from forerun.align.config import TeacherConfig, TeacherKind
from forerun.align.samples import PackedBatch, Packing, Sample, prompt_hash
from forerun.align.target import TeacherSource
from forerun.align.teachers import Teacher, make_teacher
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_mean, bootstrap_ratio

MODULES = ("argparse", "ast", "configparser", "dataclasses", "inspect", "subprocess", "tarfile")
WINDOW, ROWS_PER_PASS, CHUNK_ROWS = 512, 8, 256
PROMPT_TOKENS, SAMPLE_TOKENS = 48, 176
KINDS: tuple[TeacherKind, ...] = ("model", "hidden")


def samples_of(target: str) -> list[Sample]:
    """Pieces of the standard library; all but the beginning of a piece is learned."""
    tokenizer = ModelFiles.find(target).tokenizer
    found = []
    for name in MODULES:
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        ids = tokenizer.encode(Path(spec.origin).read_text(encoding="utf-8"))
        for start in range(0, len(ids) - SAMPLE_TOKENS, SAMPLE_TOKENS):
            piece = tuple(ids[start : start + SAMPLE_TOKENS])
            found.append(
                Sample(
                    prompt_hash=prompt_hash(piece[:PROMPT_TOKENS]),
                    token_ids=piece,
                    spans=((PROMPT_TOKENS, len(piece)),),
                )
            )
    return found


def all_distributions(teacher: Teacher, batch: PackedBatch) -> None:
    """Every learned row's distribution, a chunk at a time."""
    rows = teacher.rows(batch)
    for start in range(0, len(rows), CHUNK_ROWS):
        rows.distribution(slice(start, min(start + CHUNK_ROWS, len(rows))))


def seconds(call: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    call()
    return time.perf_counter() - start_s


def measure(
    teachers: dict[TeacherKind, Teacher], batches: list[PackedBatch], budget_s: float
) -> dict[str, list[float]]:
    """Seconds per batch of every arm, in an order that rotates."""
    arms: dict[str, Callable[[PackedBatch], object]] = {}
    for kind, teacher in teachers.items():
        arms[kind] = lambda batch, teacher=teacher: all_distributions(teacher, batch)
        arms[f"{kind}, no distributions"] = lambda batch, teacher=teacher: teacher.rows(batch)
    found: dict[str, list[float]] = {name: [] for name in arms}
    for call in arms.values():
        call(batches[0])
    names, block, start_s = list(arms), 0, time.perf_counter()
    while time.perf_counter() - start_s < budget_s:
        batch = batches[block % len(batches)]
        for place in range(len(names)):
            name = names[(place + block) % len(names)]
            found[name].append(seconds(lambda name=name, batch=batch: arms[name](batch)))
        block += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=None, help="write JSON here too")
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    packing = Packing(samples_of(options.target), window=WINDOW, seed=0)
    num_batches = packing.rows_per_epoch // ROWS_PER_PASS
    batches = [packing.batch(i * ROWS_PER_PASS, ROWS_PER_PASS) for i in range(num_batches)]
    with tempfile.TemporaryDirectory() as folder:
        report(options, packing, batches, Path(folder))


def report(
    options: argparse.Namespace, packing: Packing, batches: list[PackedBatch], folder: Path
) -> None:
    """Prepare, measure, print, write."""
    source = TeacherSource(
        target=ModelFiles.open(options.target),
        sampling=SamplingParams(temperature=options.temperature),
        cache_dir=folder,
    )
    teachers, filled_s, taken = {}, {}, {}
    for kind in KINDS:
        config = TeacherConfig(teacher=kind)
        teachers[kind] = make_teacher(config, source, packing.num_learned)
        filled_s[kind] = seconds(lambda kind=kind: teachers[kind].prepare(packing.samples))
        files = folder.glob(f"{kind}-*/rows-*.safetensors")
        taken[kind] = sum(path.stat().st_size for path in files) / packing.num_learned
    found = measure(teachers, batches, options.seconds)
    learned = [int(batch.predicts.sum()) for batch in batches]
    rows = [learned[block % len(batches)] for block in range(len(found["model"]))]
    per_row = {
        name: bootstrap_mean([1e6 * s / n for s, n in zip(times, rows, strict=True)], seed=0)
        for name, times in found.items()
    }
    for name, cost in per_row.items():
        print(f"{name:18} {cost.estimate:7.1f} us a row ({cost.low:.1f}-{cost.high:.1f})")
    ratios = {kind: bootstrap_ratio(found["model"], found[kind], seed=0) for kind in KINDS[1:]}
    for kind, ratio in ratios.items():
        print(f"model / {kind:8} {ratio.estimate:.2f} ({ratio.low:.2f}-{ratio.high:.2f})")
    for kind in KINDS[1:]:
        print(f"{kind}: {taken[kind]:.0f} bytes a row, filled in {filled_s[kind]:.1f} s")
    if options.out is None:
        return
    content = {
        "arguments": sys.argv[1:],
        "num_learned": packing.num_learned,
        "rows_of_block": rows,
        "us_per_row": {name: vars_of(cost) for name, cost in per_row.items()},
        "model_over": {kind: vars_of(ratio) for kind, ratio in ratios.items()},
        "bytes_per_row": taken,
        "filled_s": filled_s,
        "samples_s": found,
        "provenance": collect({options.target: content_hash(options.target)}).to_dict(),
    }
    options.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def vars_of(interval: object) -> dict[str, float]:
    return {name: getattr(interval, name) for name in ("estimate", "low", "high")}


if __name__ == "__main__":
    main()
