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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

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
from forerun.trace.files import open_trace, read_trace

TARGET, DRAFT = "zoo:target", "zoo:draft-domain"
MAX_BATCH = 8
WORKLOADS = (  # K, requests per second, requests, temperature
    (0, 4.0, 32, 0.0),
    (3, 4.0, 32, 0.0),
    (3, 1000.0, 32, 1.0),
)


def served(k: int, rate_per_s: float, count: int, temperature: float, path: Path) -> float:
    """Serve requests as they come, write the trace; seconds from the first arrival to the end."""
    engine = Engine.load(
        TARGET, DRAFT, config=EngineConfig(num_speculative_tokens=k, max_batch=MAX_BATCH)
    )
    prompts = [prompt.text for prompt in held_out_prompts()]
    params = SamplingParams(temperature=temperature, max_tokens=128, ignore_eos=True)
    engine.generate(prompts[:MAX_BATCH], replace(params, max_tokens=32))  # warm
    arrivals = gaps(key_of(1, Purpose.ARRIVALS), count, rate_per_s).cumsum().tolist()
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
        for index in range(count):
            for record in request_records(engine.take_output(str(index)), params):
                writer.add(record)
    return total_s


def simulated(k: int, temperature: float, costs: Costs, path: Path) -> Result:
    """Repeat a trace."""
    server = ServerConfig(max_batch=MAX_BATCH, max_k=max(k, 1))
    workload = workload_of(read_trace(path), str(path), server, Slo(), temperature)
    times = Times(costs.at(temperature))
    return simulate(workload, traffic_of(workload, 1), times, FixedController(k), f"fixed:{k}")


def quantile(values: Sequence[float], share: float) -> float:
    """Of sorted values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def compared(folder: Path, costs: Costs) -> list[dict[str, float]]:
    """Every workload, as served and as simulated."""
    rows = []
    for number, (k, rate_per_s, count, temperature) in enumerate(WORKLOADS):
        path = folder / f"{number}.jsonl"
        total_s = served(k, rate_per_s, count, temperature, path)
        found = simulated(k, temperature, costs, path)
        row = {
            "k": k,
            "rate_per_s": rate_per_s,
            "requests": count,
            "temperature": temperature,
            "served_s": total_s,
            "simulated_s": found.total_s,
            "ratio": found.total_s / total_s,
            **latencies(path, found),
        }
        print(row)
        rows.append(row)
    return rows


def latencies(path: Path, found: Result) -> dict[str, float]:
    """Mean decoding time per token, as recorded and as simulated."""
    cycles: dict[str, float] = {}
    tokens: dict[str, int] = {}
    for item in read_trace(path):
        if hasattr(item, "cycle_id") and item.step > 0:
            seconds = item.draft_s + item.verify_s + item.other_s
            cycles[item.request_id] = cycles.get(item.request_id, 0.0) + seconds
            tokens[item.request_id] = tokens.get(item.request_id, 0) + item.num_emitted
    served = sum(cycles.values()) / sum(tokens.values())
    repeated = found.decode_s / sum(phase.num_tokens for phase in found.phases)
    return {"served_tpot_s": served, "simulated_tpot_s": repeated, "tpot_ratio": repeated / served}


def main() -> None:
    """Serve, repeat, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    profile = load_profile(arguments.profile)
    costs = Costs(greedy=profile.greedy, sampled=profile.sampled)
    with tempfile.TemporaryDirectory() as folder:
        rows = compared(Path(folder), costs)
    content = {"rows": rows, "profile": str(arguments.profile), "provenance": collect({}).to_dict()}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
