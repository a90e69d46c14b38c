"""Speed of decoding with and without drafts by batch, context and temperature; parts of a step.

OUT=benchmarks/speed/2026-11-26-tiles/zen3.json
python benchmarks/speed/decoding.py --out $OUT --minutes 12

Arms take turns in every round, each round has prompts of its own (text of the standard library),
and a round that was not finished is left out: the command goes on from what the file holds.
Decode-only figures count from the step in which every request of the batch has its first token.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are scripts
from paused import mean_ratio

from forerun.atomic_write import atomic_write
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import median_interval
from forerun.theory.record import StepRecord

TARGET, DRAFT = "zoo:code-40m", "zoo:code-2m-for-40m"
BATCHES, CONTEXTS, TEMPERATURES = (1, 4, 8, 16), (64, 512), (0.0, 1.0)
NUM_TOKENS = 48
ARMS = {"plain": None, "K=4": "fixed", "auto": "auto"}
MODULES = ("argparse.py", "inspect.py", "tarfile.py", "typing.py", "pathlib.py", "subprocess.py")


def engines_of(base: Engine, batch: int) -> dict[str, Engine]:
    """Return an engine per arm over the same target and draft."""
    found = {}
    for name, controller in ARMS.items():
        config = EngineConfig(
            num_speculative_tokens=4 if name == "K=4" else 8,
            controller=controller or "fixed",
            max_batch=batch,
            max_context=base.config.max_context,
            sharing="none",
        )
        found[name] = Engine(
            target=base.target,
            tokenizer=base.tokenizer,
            drafter=base.drafter if controller else None,
            config=config,
            eos_token_ids=base.eos_token_ids,
        )
    return found


def timed(engine: Engine, prompts: list[list[int]], temperature: float, seed: int) -> dict:
    """Decode a batch; tokens per second, and the mean milliseconds of a step and of its parts."""
    cycles: dict[int, StepRecord] = {}
    watch = EmittedRecords(lambda record: cycles.setdefault(record.cycle_id, record))
    engine.observers.append(watch)
    for place, ids in enumerate(prompts):
        params = SamplingParams(
            temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, seed=seed + place
        )
        engine.add_request(ids, params)
    counts: dict[str, int] = {}
    began_s, num_first, first_s, num_before = time.perf_counter(), 0, 0.0, 0
    while engine.has_unfinished:
        for chunk in engine.step():
            counts[chunk.request_id] = counts.get(chunk.request_id, 0) + len(chunk.token_ids)
        if not first_s and len(counts) == len(prompts) and all(counts.values()):
            first_s, num_first = time.perf_counter(), sum(counts.values())
            num_before = engine.stepper.cycle_id
            cycles.clear()
    ended_s = time.perf_counter()
    engine.observers.remove(watch)
    for request_id in counts:
        engine.take_output(request_id)
    step_ms = 1e3 * (ended_s - first_s) / (engine.stepper.cycle_id - num_before)
    draft_ms, pass_ms = (
        1e3 * fmean(getattr(record, name) for record in cycles.values())
        for name in ("draft_s", "verify_s")
    )
    return {
        "tokens_per_s": sum(counts.values()) / (ended_s - began_s),
        "decode_only": (sum(counts.values()) - num_first) / (ended_s - first_s),
        "step_ms": step_ms,
        "draft_ms": draft_ms,
        "pass_ms": pass_ms,
        "rest_ms": step_ms - draft_ms - pass_ms,
    }


def prompts_of(text: list[int], batch: int, context: int, number: int) -> list[list[int]]:
    starts = ((number * 16 + place) * 577 % (len(text) - context) for place in range(batch))
    return [text[start : start + context] for start in starts]


def cells(options: argparse.Namespace) -> Iterator[tuple[int, int, float]]:
    for batch in options.batches:
        for context in options.contexts:
            for temperature in TEMPERATURES:
                yield batch, context, temperature


def run(options: argparse.Namespace, samples: list[dict[str, Any]]) -> None:
    ends_s = time.monotonic() + 60 * options.minutes
    config = EngineConfig(max_batch=max(options.batches), max_context=640)
    base = Engine.load(options.target, draft=options.draft, config=config)
    folder = Path(argparse.__file__).parent
    text = base.tokenizer.encode("\n".join((folder / name).read_text() for name in MODULES))
    engines = {batch: engines_of(base, batch) for batch in options.batches}
    for arm in ARMS:  # a warm-up
        timed(engines[options.batches[0]][arm], prompts_of(text, 1, 64, 99), 0.0, 0)
    number = 1 + max((sample["round"] for sample in samples), default=-1)
    took_s = 0.0
    while number < options.rounds and time.monotonic() + took_s < ends_s:
        began_s, found = time.monotonic(), []
        for batch, context, temperature in cells(options):
            prompts = prompts_of(text, batch, context, number)
            order = list(ARMS)
            order = order[number % len(order) :] + order[: number % len(order)]
            for arm in order:
                cell = {"round": number, "batch": batch, "context": context}
                times = timed(engines[batch][arm], prompts, temperature, 100 * number)
                found.append({**cell, "temperature": temperature, "arm": arm, **times})
        samples += found
        save(options, samples)
        number, took_s = number + 1, time.monotonic() - began_s
        print(f"round {number}: {took_s:.0f} s", flush=True)


def summary(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    keys = ("batch", "context", "temperature")
    rows = []
    for cell in dict.fromkeys(tuple(sample[key] for key in keys) for sample in samples):
        of_arm = {
            arm: [s for s in samples if tuple(s[k] for k in keys) == cell and s["arm"] == arm]
            for arm in ARMS
        }
        for arm, own in of_arm.items():
            row: dict[str, Any] = {**dict(zip(keys, cell, strict=True)), "arm": arm}
            for name in ("tokens_per_s", "decode_only"):
                values, plain = ([s[name] for s in of] for of in (own, of_arm["plain"]))
                interval = median_interval(values)
                row[name] = [round(v) for v in (interval.estimate, interval.low, interval.high)]
                row[f"{name}_ratio"] = [round(v, 2) for v in mean_ratio(values, plain)]
            for name in ("step_ms", "draft_ms", "pass_ms", "rest_ms"):
                row[name] = round(median(s[name] for s in own), 3)
            rows.append(row)
    return rows


def save(options: argparse.Namespace, samples: list[dict[str, Any]]) -> None:
    made = collect({"target": options.target, "draft": options.draft}).to_dict()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    found = {"made": made, "summary": summary(samples), "samples": samples}
    with atomic_write(options.out) as path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: list[dict[str, Any]]) -> str:
    """Return the summary as Markdown."""
    lines = [
        "| batch | context | T | arm | tokens/s | decode only | speedup | decode only | step, ms | "
        "draft | pass | rest |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        rates = [
            f"{middle} ({low}–{high})"
            for name in ("tokens_per_s", "decode_only", "tokens_per_s_ratio", "decode_only_ratio")
            for middle, low, high in [row[name]]
        ]
        times = [str(row[name]) for name in ("step_ms", "draft_ms", "pass_ms", "rest_ms")]
        head = [str(row["batch"]), str(row["context"]), f"{row['temperature']:.0f}", row["arm"]]
        lines.append("| " + " | ".join([*head, *rates, *times]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=12)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--target", default=TARGET)
    parser.add_argument("--draft", default=DRAFT)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args()
    samples = json.loads(options.out.read_text())["samples"] if options.out.exists() else []
    run(options, samples)
    print(table(summary(samples)))


if __name__ == "__main__":
    main()
