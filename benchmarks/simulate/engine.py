"""The simulator beside the engine: recorded workloads served by both, with the shipped draft.

`OMP_NUM_THREADS=1 python benchmarks/simulate/engine.py --profile FILE --out FILE`, nothing else
running; `forerun profile` made the profile just before, since the machine's speed differs by the
minute. What FILE holds of earlier rounds, each with its own profile, is kept and counted.

Requests come at an engine on a thread of its own, at the times that workloads/*.jsonl say. The
first time a workload is served, its trace is kept; `forerun plan --workload` repeats that trace
in simulated time, under the same controller, with the profile's costs. What comes of it is compared
with the other times the workload is served.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.observing import EmittedRecords
from forerun.engine.results import RequestOutput, request_records
from forerun.engine.thread import EngineThread
from forerun.measure.profile import load_profile
from forerun.models.catalog import held_out_prompts
from forerun.plan.simulation import simulate
from forerun.plan.workload import SimulatedServerConfig, Slo, workload_of
from forerun.provenance import collect, trace_header
from forerun.sampling.config import SamplingParams
from forerun.theory.cost import DraftCosts
from forerun.theory.intervals import bootstrap_mean
from forerun.theory.record import StepRecord
from forerun.trace.files import TraceWriter, open_trace, read_trace

DRAFT = "zoo:code-2m"
WORKLOADS = Path(__file__).parent / "workloads"
SHIPPED = {"target": "zoo:code-11m", "slower": 1.0}
MAX_BATCH = 8
MAX_CONTEXT = 1024
NUM_SEEDS = 5
"""A simulation draws which drafts are accepted; its figures are medians over so many draws."""

COMPARED = (
    "duration_s",
    "tokens_per_s",
    "ttft_mean_s",
    "ttft_p50_s",
    "tpot_mean_s",
    "tpot_p50_s",
)

Figures = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is served.

    Attributes:
        workload: name of its file.
        k: drafted tokens per step; 0 decodes plainly.
        temperature: of all requests.
    """

    workload: str
    k: int
    temperature: float


CASES = tuple(
    Case(workload=workload, k=k, temperature=temperature)
    for workload, temperature in (("busy", 0.0), ("bursty", 1.0), ("light", 0.0))
    for k in (0, 3)
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line of a workload: when it comes, with what, for how long."""

    at_s: float
    ids: Sequence[int]
    params: SamplingParams


class Service:
    """One case on a loaded engine.

    Args:
        case: what.
        target: that is served.
        num_threads: that carry passes.
        slower: times as much time between requests as the workload says.
    """

    def __init__(self, case: Case, target: str, num_threads: int, slower: float) -> None:
        config = EngineConfig(
            controller="fixed",
            num_speculative_tokens=case.k,
            max_batch=MAX_BATCH,
            max_context=MAX_CONTEXT,
            sharing="none",  # the simulator reads every prompt
            num_threads=num_threads,
        )
        self.target = target
        self.engine = Engine.load(target, DRAFT, config=config)
        self.requests = requests_of(case, self.engine, slower)
        longest = max(self.requests, key=lambda request: len(request.ids))
        self.engine.generate([longest.ids] * MAX_BATCH, longest.params)  # warm

    def serve(self, trace: TraceWriter) -> Figures:
        """Serve all requests as they come, write every step and request."""
        records: list[StepRecord] = []
        before_s = others_s()
        self.engine.observers[:] = [EmittedRecords(records.append)]
        with EngineThread(self.engine) as running:
            started_s = time.monotonic()
            submitted_s, tickets = [], []
            for request in self.requests:
                time.sleep(max(0.0, started_s + request.at_s - time.monotonic()))
                submitted_s.append(time.monotonic())
                tickets.append(running.submit(request.ids, request.params))
            outputs = [ticket.result() for ticket in tickets]
        disturbed_s = others_s() - before_s
        trace.add(trace_header(self.target, DRAFT, str(self.engine.target.device)))
        for record in records:
            trace.add(record)
        for request, output in zip(self.requests, outputs, strict=True):
            for end in request_records(output, request.params):
                trace.add(end)
        return {**served_figures(submitted_s, outputs), "others_s": disturbed_s}


def others_s() -> float:
    """Seconds of processors that went to others since the start: other processes, other guests."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    ticks = user + nice + system + irq + softirq + steal
    return ticks / os.sysconf("SC_CLK_TCK") - time.process_time()


def requests_of(case: Case, engine: Engine, slower: float) -> list[Request]:
    """The lines of a workload."""
    texts = {prompt.name: prompt.text for prompt in held_out_prompts()}
    lines = (WORKLOADS / f"{case.workload}.jsonl").read_text().splitlines()
    return [
        Request(
            at_s=line["at_s"] * slower,
            ids=engine.tokenizer.encode(texts[line["prompt"]]),
            params=SamplingParams(
                temperature=case.temperature, max_tokens=line["max_tokens"], ignore_eos=True
            ),
        )
        for line in map(json.loads, lines)
    ]


def served_figures(submitted_s: Sequence[float], outputs: Sequence[RequestOutput]) -> Figures:
    """What requests waited, and what all of them took."""
    ends = [output.completions[0] for output in outputs]
    finished_s = [at_s + end.total_s for at_s, end in zip(submitted_s, ends, strict=True)]
    total_s = max(finished_s) - submitted_s[0]
    ttft_s = [end.ttft_s for end in ends if end.ttft_s is not None]
    tpot_s = [
        (end.total_s - first_s) / (len(end.token_ids) - 1)
        for end, first_s in zip(ends, ttft_s, strict=True)
    ]
    return {
        "duration_s": total_s,
        "tokens_per_s": sum(len(end.token_ids) for end in ends) / total_s,
        "ttft_mean_s": fmean(ttft_s),
        "ttft_p50_s": median(ttft_s),
        "tpot_mean_s": fmean(tpot_s),
        "tpot_p50_s": median(tpot_s),
    }


def simulated(case: Case, costs: DraftCosts, path: Path) -> Figures:
    """Repeat a trace."""
    server = SimulatedServerConfig(
        max_batch=MAX_BATCH, max_context=MAX_CONTEXT, max_k=max(case.k, 1)
    )
    workload = workload_of(read_trace(path), str(path), server, Slo(), case.temperature)
    found = [simulate(workload, costs, f"fixed:{case.k}", seed=seed) for seed in range(NUM_SEEDS)]
    return {
        "duration_s": median(result.total_s for result in found),
        "tokens_per_s": median(result.tokens_per_s for result in found),
        "ttft_mean_s": median(result.ttft_s.mean for result in found),
        "ttft_p50_s": median(result.ttft_s.p50 for result in found),
        "tpot_mean_s": median(result.tpot_s.mean for result in found),
        "tpot_p50_s": median(result.tpot_s.p50 for result in found),
    }


def one_round(
    services: Sequence[Service], costs: DraftCosts, repeats: int, keep: Path
) -> list[dict[str, Any]]:
    """Every case simulated once and served often, in turns."""
    paths = [keep / f"{case.workload}-{case.k}.jsonl" for case in CASES]
    for service, path in zip(services, paths, strict=True):
        with open_trace(path) as trace:
            service.serve(trace)
    predicted = [
        {"simulated": simulated(case, costs, path)} for case, path in zip(CASES, paths, strict=True)
    ]
    served: list[list[Figures]] = [[] for _ in CASES]
    for repeat in range(repeats):
        for number, service in enumerate(services):
            with open_trace(keep / f"{number}-{repeat}.jsonl") as trace:
                served[number].append(service.serve(trace))
    return [
        {**prediction, "served": found} for prediction, found in zip(predicted, served, strict=True)
    ]


def summary(rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, object]]:
    """Simulated over served by case, with intervals over all the times it was served."""
    rows = []
    for case, found in zip(CASES, zip(*rounds, strict=True), strict=True):
        row: dict[str, object] = asdict(case)
        ratios = {}
        for name in COMPARED:
            each = [r["simulated"][name] / served[name] for r in found for served in r["served"]]
            ratios[name] = asdict(bootstrap_mean(each, seed=1)) | {"samples": each}
        row["simulated"] = ratios
        rows.append(row)
    return rows


def main() -> None:
    """Serve, repeat, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", default=SHIPPED["target"])
    parser.add_argument(
        "--slower", type=float, default=SHIPPED["slower"], help="stretches the time of requests"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--keep", type=Path, help="folder for the traces; default: nowhere")
    arguments = parser.parse_args()
    costs = load_profile(arguments.profile).costs
    target, num_threads = arguments.target, arguments.threads
    served = {"target": target, "slower": arguments.slower}
    rounds = earlier_rounds(arguments.out, served)
    services = [Service(case, target, num_threads, arguments.slower) for case in CASES]
    with tempfile.TemporaryDirectory() as folder:
        keep = arguments.keep or Path(folder)
        found = one_round(services, costs, arguments.repeats, keep)
    rounds.append({"cases": found, **served, "provenance": collect({}).to_dict()})
    rows = summary([entry["cases"] for entry in rounds])
    show(rows)
    arguments.out.write_text(json.dumps({"rows": rows, "rounds": rounds}, indent=1) + "\n")


def earlier_rounds(path: Path, served: Mapping[str, object]) -> list[dict[str, Any]]:
    """What the file holds, if the same was served; the first ones do not say so."""
    rounds = json.loads(path.read_text())["rounds"] if path.exists() else []
    for entry in rounds:
        if {name: entry.get(name, SHIPPED[name]) for name in served} != served:
            raise SystemExit(
                f"{path} has rounds of something else than {served}: name another file"
            )
    return list(rounds)


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """One line per case."""
    for row in rows:
        figures = " ".join(
            f"{name} {ratio['estimate']:.3f} [{ratio['low']:.3f}, {ratio['high']:.3f}]"
            for name, ratio in row["simulated"].items()
        )
        print(row["workload"], f"K={row['k']}", f"T={row['temperature']:g}", figures)


if __name__ == "__main__":
    main()
