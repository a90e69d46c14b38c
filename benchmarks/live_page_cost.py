"""What the live page costs: tokens per second without it, watched, and with a page that is open.

The three are interleaved in blocks, in turning order. A page that is open reads `/live` once a
second and a diagnosis every fifteen, on a thread of the same process; the browser itself is not
part of it.

python benchmarks/live_page_cost.py --blocks 24
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from itertools import pairwise

import msgspec

from forerun.engine.engine import Engine
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.server.live import LiveView
from forerun.theory.intervals import bootstrap_ratio

ARMS = ("without", "watched", "open")
PERIOD_S = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=16, help="of a block, which takes seconds")
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args()
    engine = Engine.load(
        options.target, draft=options.draft, controller=None, max_batch=options.batch
    )
    prompts = [prompt.text for prompt in held_out_prompts()]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    view = LiveView(engine, target=options.target)
    engine.generate(prompts[: options.prompts], params)
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for block in range(options.blocks):
        at = block * options.prompts
        chosen = [prompts[(at + n) % len(prompts)] for n in range(options.prompts)]
        shift = block % len(ARMS)
        for arm in (*ARMS[shift:], *ARMS[:shift]):
            seconds[arm].append(timed(engine, chosen, params, view, arm))
    tokens = options.prompts * options.max_tokens
    report = {"tokens_per_s": {arm: tokens * len(s) / sum(s) for arm, s in seconds.items()}}
    for before, after in pairwise(ARMS):
        interval = bootstrap_ratio(seconds[after], seconds[before], seed=0)
        report[f"time of {after} / {before}"] = [interval.low, interval.high]
    interval = bootstrap_ratio(seconds["open"], seconds["without"], seed=0)
    report["time of open / without"] = [interval.low, interval.high]
    print(json.dumps(report, indent=2))


def timed(
    engine: Engine, prompts: list[str], params: SamplingParams, view: LiveView, arm: str
) -> float:
    """Return the seconds that the prompts take."""
    over = threading.Event()
    reader = threading.Thread(target=read, args=(view, over))
    engine.observers[:] = [] if arm == "without" else [view]
    if arm == "open":
        reader.start()
    start_s = time.perf_counter()
    engine.generate(prompts, params)
    seconds = time.perf_counter() - start_s
    over.set()
    if arm == "open":
        reader.join()
    return seconds


def read(view: LiveView, over: threading.Event) -> None:
    """Do once a second what a server does for an open page."""
    while True:
        msgspec.json.encode(view.snapshot())
        view.diagnose()
        if over.wait(PERIOD_S):
            return


if __name__ == "__main__":
    main()
