"""Writes the recorded workloads: who comes when, with which shipped prompt, for how many tokens.

`python benchmarks/simulate/record.py` writes workloads/*.jsonl again, the same every time. They are
files so that what is served and what is simulated is one recording, not a distribution.
"""

from __future__ import annotations

import json
from pathlib import Path

from forerun.models.catalog import held_out_prompts
from forerun.plan.simulation.config import Phase, Workload
from forerun.plan.simulation.kinds import Bursty, Constant, Poisson, Uniform
from forerun.plan.simulation.traffic import traffic_of

FOLDER = Path(__file__).parent / "workloads"
RECORDED = {
    "busy": (40, Poisson(rate_per_s=16.0)),
    "bursty": (40, Bursty(rate_per_s=8.0, burst=5.0)),
    "light": (11, Poisson(rate_per_s=3.0)),
}
"""Requests and arrivals; plain decoding gets through some 15 such requests per second."""


def main() -> None:
    """Draw the arrivals and the lengths, take the prompts in order, write."""
    prompts = [prompt.name for prompt in held_out_prompts()]
    FOLDER.mkdir(exist_ok=True)
    for name, (count, arrivals) in RECORDED.items():
        traffic = traffic_of(
            Workload(
                requests=count,
                arrivals=arrivals,
                output_tokens=Uniform(least=32, most=128),
                phases=(Phase(share=1.0, acceptance=Constant(alpha=0.0)),),
            ),
            seed=1,
        )
        start_s = traffic.arrival_s[0]
        rows = zip(traffic.arrival_s, traffic.num_output, strict=True)
        lines = [
            {
                "at_s": round(at_s - start_s, 4),
                "prompt": prompts[number % len(prompts)],
                "max_tokens": length,
            }
            for number, (at_s, length) in enumerate(rows)
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (FOLDER / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
