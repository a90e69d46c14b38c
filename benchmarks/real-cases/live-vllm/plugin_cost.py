"""What the plug-in adds to a step of vLLM, in the environment of `peers-vllm`.

    build/peers/vllm/bin/python benchmarks/real-cases/live-vllm/plugin_cost.py

Steps of 1, 8 and 128 sequences in vLLM's own classes, filled by their own methods. Times per step,
the least of several repetitions: of record(), which vLLM's event loop waits for, and of counting,
which a thread does once a second, for many steps together or for one. The sum of the first two is
to stay below 50 microseconds.
"""

from __future__ import annotations

import argparse
import json
import timeit
from collections.abc import Sequence
from types import SimpleNamespace

from prometheus_client import CollectorRegistry
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from forerun.vllm_plugin.observer import MAX_QUEUED_STEPS, VllmObserver

K = 4
MOST_S = 50e-6
CONFIG = SimpleNamespace(  # what the plug-in reads of a VllmConfig
    speculative_config=SimpleNamespace(method="ngram", num_speculative_tokens=K),
    model_config=SimpleNamespace(served_model_name="m", max_model_len=512),
    scheduler_config=SimpleNamespace(max_num_seqs=128),
)


def step_of(num_sequences: int) -> tuple[SchedulerStats, IterationStats]:
    """A step in which every fourth sequence found no draft and one was at its end before."""
    drafted = SpecDecodingStats.new(K)
    iteration = IterationStats()
    for n in range(num_sequences):
        depth = 0 if n % 4 == 3 else K - n % 2
        accepted = n * 7 % (depth + 1)
        if depth:
            drafted.observe_draft(depth, accepted)
        iteration.num_generation_tokens += accepted + 1
        iteration.inter_token_latencies_iter.append(0.02)
    scheduler = SchedulerStats(
        num_running_reqs=num_sequences,
        prefix_cache_stats=PrefixCacheStats(requests=1, queries=100, hits=50),
        spec_decoding_stats=drafted,
    )
    return scheduler, iteration


def measure(num_sequences: int, repetitions: int) -> dict[str, float]:
    observer = VllmObserver(CONFIG, "0.32.0", CollectorRegistry(auto_describe=True))
    steps = [step_of(num_sequences) for _ in range(MAX_QUEUED_STEPS // 4)]
    recorded, counted, alone = [], [], []

    def record(steps: Sequence[tuple[SchedulerStats, IterationStats]]) -> None:
        for scheduler, iteration in steps:
            observer.record(scheduler, iteration)

    for _ in range(repetitions):
        recorded.append(timeit.timeit(lambda: record(steps), number=1))
        counted.append(timeit.timeit(observer.drain, number=1))
        record(steps[:1])
        alone.append(timeit.timeit(observer.drain, number=1))
    assert observer.num_cycles == repetitions * (len(steps) + 1) and observer.failure is None
    return {
        "sequences": num_sequences,
        "record_us": min(recorded) / len(steps) * 1e6,
        "count_us": min(counted) / len(steps) * 1e6,
        "count_one_us": min(alone) * 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=15)
    arguments = parser.parse_args()
    rows = [measure(n, arguments.repetitions) for n in (1, 8, 128)]
    print(json.dumps(rows, indent=1))
    if any(row["record_us"] + row["count_us"] > MOST_S * 1e6 for row in rows):
        raise SystemExit("the plug-in adds more than 50 microseconds to a step")


if __name__ == "__main__":
    main()
