"""Run a sound engine 200 times, diagnose every trace, and count the verdicts.

    python benchmarks/verdicts/sound.py --runs build/verdicts --out sound.json

A trace that is there is not made again, so that it can be called until nothing is left. Every
other run has a busy loop beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from forerun.control.base import Tree
from forerun.doctor.diagnosis import diagnose
from forerun.doctor.readers.trace import read_trace_evidence
from forerun.doctor.words import headline
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import request_records
from forerun.provenance import collect, trace_header
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord
from forerun.trace.files import open_trace

TARGET = "zoo:code-40m"
DRAFT = "zoo:code-2m-for-40m"
SHAPES = {
    "chain of 4": (DRAFT, {"num_speculative_tokens": 4, "controller": "fixed"}),
    "chosen K": (DRAFT, {"num_speculative_tokens": 8}),
    "tree of 7": (DRAFT, {"tree": Tree.of_nodes(7)}),
    "self in 4 bits": ("self:int4", {"num_speculative_tokens": 3, "controller": "fixed"}),
    "self, 6 layers": ("self:6", {"num_speculative_tokens": 4}),
    "head": ("zoo:eagle3-for-40m", {"num_speculative_tokens": 3, "controller": "fixed"}),
    "suffix": ("suffix", {"num_speculative_tokens": 8}),
}
LOADS = ((1, 60), (1, 150), (4, 60), (32, 24), (200, 12))
"""Requests of a run, and tokens of each."""
TEMPERATURES = (0.0, 0.7, 1.0)
NUM_RUNS = 200
PROMPT_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of the grid."""

    number: int
    shape: str
    temperature: float
    is_seeded: bool
    load: tuple[int, int]

    @property
    def is_busy(self) -> bool:
        """Whether another process computes beside it."""
        return self.number % 2 == 1


def runs() -> list[Run]:
    """Return the first 200 of the grid, the loads last, so that all shapes have all of them."""
    grid = product(LOADS, SHAPES, TEMPERATURES, (True, False))
    ordered = [
        Run(number=number, shape=shape, temperature=t, is_seeded=seeded, load=load)
        for number, (load, shape, t, seeded) in enumerate(grid)
    ]
    return ordered[:NUM_RUNS]


def main() -> None:
    """Make the traces that are missing, then diagnose all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    every, started_s = runs(), time.monotonic()
    for shape in SHAPES:
        missing = [r for r in every if r.shape == shape and not path_of(options.runs, r).exists()]
        if missing:
            make_traces(missing, options.runs, options.seed)
    made_s = time.monotonic() - started_s
    judged = [judge(run, path_of(options.runs, run)) for run in every]
    for result in judged:
        if result["verdict"] != "healthy":
            print(result["run"], result["verdict"], result["headline"], result["causes"])
    counts = Counter(str(result["verdict"]) for result in judged)
    print(dict(counts), f"{made_s:.0f} s")
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        summary = {"num_runs": len(judged), "seed": options.seed, "verdicts": dict(counts)}
        document = {"provenance": collect({}).to_dict(), "summary": summary, "runs": judged}
        options.out.write_text(json.dumps(document, indent=1) + "\n")


def path_of(folder: Path, run: Run) -> Path:
    """Return where the trace of a run is."""
    return folder / f"run-{run.number:03}.jsonl"


def make_traces(missing: list[Run], folder: Path, seed: int) -> None:
    """Run all that have one shape on one engine."""
    draft, settings = SHAPES[missing[0].shape]
    config = EngineConfig(max_batch=32, max_context=512, num_threads=1, **settings)  # type: ignore[arg-type]
    engine = Engine.load(TARGET, draft, config=config)
    prompts = prompts_of(engine)
    for run in missing:
        with beside_busy_loop(run.is_busy):
            make_trace(engine, run, path_of(folder, run), prompts, seed)


def prompts_of(engine: Engine) -> list[list[int]]:
    """Return beginnings of functions of the standard library."""
    texts = []
    for path in sorted(Path(json.__file__).parents[1].glob("*.py")):
        text = path.read_text("utf-8", errors="ignore")
        texts += [part for part in text.split("\ndef ")[1:] if len(part) > 200]
    return [engine.tokenizer.encode(f"def {text}"[:400])[:PROMPT_TOKENS] for text in texts]


def make_trace(engine: Engine, run: Run, path: Path, prompts: list[list[int]], seed: int) -> None:
    """Run the requests of one run, all at once, and write the trace that `serve` would."""
    num_requests, num_tokens = run.load
    records: list[StepRecord] = []
    engine.reset()
    engine.observers[:] = [EmittedRecords(records.append)]
    scratch = path.with_suffix(".part.jsonl")
    with open_trace(scratch) as trace:
        draft = SHAPES[run.shape][0]
        trace.add(trace_header(TARGET, draft, "cpu", engine.config.controller))
        asked: dict[str, SamplingParams] = {}
        for index in range(num_requests):
            name = f"request-{index}"
            params = SamplingParams(
                temperature=run.temperature,
                max_tokens=num_tokens,
                seed=1000 * seed + index if run.is_seeded else None,
            )
            asked[name] = params
            place = (7919 * seed + 131 * run.number + index) % len(prompts)
            engine.add_request(prompts[place], params, request_id=name)
        while engine.has_unfinished:
            engine.step()
        for record in records:
            trace.add(record)
        for name, params in asked.items():
            for request in request_records(engine.take_output(name), params):
                trace.add(request)
    engine.observers.clear()
    scratch.rename(path)


@contextmanager
def beside_busy_loop(is_busy: bool) -> Iterator[None]:
    """Compute in another process meanwhile."""
    if not is_busy:
        yield
        return
    other = multiprocessing.get_context("spawn").Process(target=spin, daemon=True)
    other.start()
    try:
        yield
    finally:
        other.kill()
        other.join()


def spin() -> None:
    """Compute without end."""
    value = 1.0
    while True:
        value = value * 1.0000001 % 7.0


def judge(run: Run, path: Path) -> dict[str, object]:
    """Diagnose one trace."""
    found = diagnose(read_trace_evidence(path))
    return {
        "run": f"{run.shape}, T={run.temperature:g}, {'seeded' if run.is_seeded else 'no seed'}, "
        f"{run.load[0]} x {run.load[1]} tokens{', busy' if run.is_busy else ''}",
        "verdict": found.verdict,
        "headline": headline(found),
        "causes": [[r.scored.cause.label, round(r.scored.score, 2)] for r in found.causes[:3]],
    }


if __name__ == "__main__":
    main()
