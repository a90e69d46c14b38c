"""The simulator beside the engine: the same requests served by both, on the shipped pair.

`python benchmarks/simulate/engine.py --profile FILE --out FILE --threads 2`, nothing else running;
`forerun profile` made the profile just before, since the machine's speed differs by the hour.

Requests arrive by a Poisson process at the engine, which records a trace; the trace is then
repeated by `forerun simulate`'s own code with the profile's costs, at the same K.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

from forerun.control.fixed import FixedController
from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.engine.tracing import request_records
from forerun.models.zoo.catalog import held_out_prompts
from forerun.plan.costs import Costs
from forerun.plan.simulation.config import ServerConfig, Slo
from forerun.plan.simulation.draws import Purpose, key_of
from forerun.plan.simulation.recorded import workload_of
from forerun.plan.simulation.result import Result
from forerun.plan.simulation.simulate import simulate
from forerun.plan.simulation.times import Times
from forerun.plan.simulation.traffic import gaps, traffic_of
from forerun.probe.profile_file import load_profile
from forerun.provenance import collect, trace_header
from forerun.sampling.config import SamplingParams
from forerun.theory.record import StepRecord
from forerun.trace.files import open_trace, read_trace

TARGET, DRAFT = "zoo:target", "zoo:draft-domain"
MAX_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is served.

    Attributes:
        k: most drafted tokens per step.
        rate_per_s: requests per second.
        count: how many.
        temperature: of all of them.
    """

    k: int
    rate_per_s: float
    count: int
    temperature: float


CASES = (
    Case(k=0, rate_per_s=20.0, count=32, temperature=0.0),
    Case(k=3, rate_per_s=20.0, count=32, temperature=0.0),
    Case(k=3, rate_per_s=1000.0, count=24, temperature=1.0),
    Case(k=0, rate_per_s=6.0, count=24, temperature=0.0),  # idle in between
)


def served(case: Case, num_threads: int, path: Path) -> float:
    """Serve requests as they come, write the trace; seconds from the first arrival to the end."""
    config = EngineConfig(
        num_speculative_tokens=case.k,
        max_batch=MAX_BATCH,
        max_context=1024,
        sharing="none",  # the simulator reads every prompt
        num_threads=num_threads,
    )
    engine = Engine.load(TARGET, DRAFT, config=config)
    prompts = [prompt.text for prompt in held_out_prompts()]
    params = SamplingParams(temperature=case.temperature, max_tokens=128, ignore_eos=True)
    engine.generate(prompts[:MAX_BATCH], replace(params, max_tokens=32))  # warm
    gaps_s = gaps(key_of(1, Purpose.ARRIVALS), case.count, case.rate_per_s)
    arrivals: list[float] = gaps_s.cumsum().tolist()
    with open_trace(path) as writer:
        writer.add(trace_header(TARGET, DRAFT, str(engine.target.device)))
        engine.on_record = writer.add
        started_s = time.monotonic()
        waiting = list(enumerate(arrivals))
        while waiting or engine.has_unfinished:
            now_s = time.monotonic() - started_s
            while waiting and waiting[0][1] <= now_s:
                index, _ = waiting.pop(0)
                engine.add_request(prompts[index % len(prompts)], params, request_id=str(index))
            if engine.has_unfinished:
                engine.step()
            else:
                time.sleep(max(0.0, waiting[0][1] - now_s))
        total_s = time.monotonic() - started_s - arrivals[0]
        for index in range(case.count):
            for record in request_records(engine.take_output(str(index)), params):
                writer.add(record)
    return total_s


def simulated(case: Case, costs: Costs, path: Path) -> Result:
    """Repeat a trace."""
    server = ServerConfig(max_batch=MAX_BATCH, max_context=1024, max_k=max(case.k, 1))
    workload = workload_of(read_trace(path), str(path), server, Slo(), case.temperature)
    traffic, times = traffic_of(workload, 1), Times(costs.at(case.temperature))
    return simulate(workload, traffic, times, FixedController(case.k), f"fixed:{case.k}")


def compared(folder: Path, costs: Costs, num_threads: int, repeats: int) -> list[dict[str, object]]:
    """Every case, as served and as simulated, in turns; then their medians."""
    rows: list[list[dict[str, float]]] = [[] for _ in CASES]
    for repeat in range(repeats):
        for number, case in enumerate(CASES):
            path = folder / f"{number}-{repeat}.jsonl"
            total_s = served(case, num_threads, path)
            found = simulated(case, costs, path)
            times = {"served_s": total_s, "simulated_s": found.total_s, **latencies(path, found)}
            rows[number].append(times)
    return [
        {
            **asdict(case),
            "total_ratio": median(row["simulated_s"] / row["served_s"] for row in found),
            "tpot_ratio": median(row["simulated_tpot_s"] / row["served_tpot_s"] for row in found),
            "repeats": found,
        }
        for case, found in zip(CASES, rows, strict=True)
    ]


def latencies(path: Path, found: Result) -> dict[str, float]:
    """Mean decoding time per token, as recorded and as simulated."""
    cycles: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for item in read_trace(path):
        if isinstance(item, StepRecord) and item.step > 1:
            seconds = item.draft_s + item.verify_s + item.other_s
            cycles[item.request_id] = cycles.get(item.request_id, 0.0) + seconds
            tokens[item.request_id] = tokens.get(item.request_id, 0) + item.num_emitted
    recorded = sum(cycles.values()) / sum(tokens.values())
    repeated = found.decode_s / sum(phase.num_tokens for phase in found.phases)
    return {"served_tpot_s": recorded, "simulated_tpot_s": repeated}


def main() -> None:
    """Serve, repeat, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    costs = Costs(greedy=profile.greedy, sampled=profile.sampled)
    with tempfile.TemporaryDirectory() as folder:
        rows = compared(Path(folder), costs, arguments.threads, arguments.repeats)
    for row in rows:
        print({name: value for name, value in row.items() if name != "repeats"})
    content = {"rows": rows, "profile": str(arguments.profile), "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
