"""What writing a trace costs: the same requests with and without, in turns, on the shipped pair.

    python benchmarks/speed/trace_overhead.py --threads 2 [--blocks 20] [--out FILE.json]

Two figures per arm. The share of the time spent in the trace is read off a clock around
it. The ratio of wall times, traced over untraced and paired by prompt, contains whatever else a
trace could slow down. One trace takes all requests of an arm, as that of a server would, and is
flushed by its own rule; the flush that is left for the end is counted too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.cli.session import Session
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.results import StreamChunk
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect, content_hash, trace_header
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio
from forerun.theory.record import StepRecord
from forerun.trace.files import TraceWriter, open_trace

TARGET, DRAFT = "zoo:code-11m", "zoo:code-2m"
KS = (0, 3)
NUM_TOKENS = 192


class TimedSession(Session):
    """A session that knows how long it spent on its trace."""

    trace_s = 0.0

    def _trace_steps(self, records: Sequence[StepRecord], chunks: Sequence[StreamChunk]) -> None:
        start_s = time.perf_counter()
        super()._trace_steps(records, chunks)
        self.trace_s += time.perf_counter() - start_s


@dataclass(frozen=True)
class Run:
    """One request."""

    wall_s: float
    trace_s: float
    num_records: int


def run_once(engine: Engine, prompt: list[int], trace: TraceWriter | None) -> Run:
    """One greedy request."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    session = TimedSession(engine, trace=trace, drafter_hash="0" * 16)
    start_s = time.perf_counter()
    for _ in session.run(prompt, params):
        pass
    wall_s = time.perf_counter() - start_s
    return Run(wall_s=wall_s, trace_s=session.trace_s, num_records=len(session.records))


Cell = tuple[int, str]
"""K and what is traced into."""


def measure(
    engines: dict[int, Engine], traces: dict[Cell, TraceWriter | None], num_blocks: int
) -> dict[Cell, list[Run]]:
    """Every cell on every prompt, in an order that rotates; then the last flushes."""
    found: dict[Cell, list[Run]] = {cell: [] for cell in traces}
    cells = list(found)
    prompts = [engines[0].tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    for block in range(-2, num_blocks):
        if block == 0:  # the blocks before warmed up, the first flush included
            for trace in filter(None, traces.values()):
                trace.flush()
        shift = block % len(cells)
        order = [*cells[shift:], *cells[:shift]]
        # Backwards every other time, so that no cell always follows the same one.
        for cell in order if block % 2 else reversed(order):
            run = run_once(engines[cell[0]], prompts[block % len(prompts)], traces[cell])
            if block >= 0:
                found[cell].append(run)
    for cell, trace in traces.items():
        if trace is not None:
            start_s = time.perf_counter()
            trace.flush()
            last = found[cell].pop()
            flush_s = time.perf_counter() - start_s
            found[cell].append(
                replace(last, trace_s=last.trace_s + flush_s, wall_s=last.wall_s + flush_s)
            )
    return found


def figures(runs: list[Run], untraced: list[Run]) -> dict[str, object]:
    """Microseconds per record, and the time of all of them beside that of the run.

    Without a trace the clock finds what reading it costs, which is no cost of tracing.
    """
    num_records = sum(run.num_records for run in runs)
    probe_s = sum(r.trace_s for r in untraced) / sum(r.num_records for r in untraced)
    spent = [r.trace_s - probe_s * r.num_records for r in runs]
    ratio = bootstrap_ratio([r.wall_s for r in runs], [r.wall_s for r in untraced], seed=0)
    share = bootstrap_ratio(spent, [r.wall_s for r in runs], seed=0)
    return {
        "num_records": num_records,
        "record_us": 1e6 * sum(spent) / num_records,
        "step_us": 1e6 * sum(run.wall_s for run in runs) / num_records,
        "share": [share.estimate, share.low, share.high],
        "wall_ratio": [ratio.estimate, ratio.low, ratio.high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    config = EngineConfig(
        controller="fixed", num_threads=options.threads, max_batch=1, sharing="none"
    )
    target = Engine.load(TARGET, config=config)
    engines = {k: target if k == 0 else target.with_draft(DRAFT, k) for k in KS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        traces: dict[Cell, TraceWriter | None] = {(k, "none"): None for k in KS}
        for k in KS:
            trace = stack.enter_context(open_trace(Path(folder) / f"{k}.jsonl"))
            trace.add(trace_header(TARGET, DRAFT, "cpu"))
            traces[k, ".jsonl"] = trace
        found = measure(engines, traces, options.blocks)
    rows = {f"K={k} {kind}": figures(runs, found[k, "none"]) for (k, kind), runs in found.items()}
    for name, row in rows.items():
        print(f"{name:14} {json.dumps(row)}")
    if options.out is not None:
        hashes = {name: content_hash(name) for name in (TARGET, DRAFT)}
        provenance = collect(hashes, options.threads).to_dict()
        content = {"rows": rows, "num_blocks": options.blocks, "provenance": provenance}
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
