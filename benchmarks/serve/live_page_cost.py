"""Cost of an open live page: tokens/s of a server with a page that is open, over without one.

The server runs in a process of its own. Blocks with and without an open page alternate, in an
order that changes from pair to pair; all answer the same prompts, whose KV is in the prefix cache
of the server. The page is a client that reads its files and then `/live` once a second, as the
browser does; what the browser itself takes is not part of it. Nothing else should run.

    python benchmarks/serve/live_page_cost.py --minutes 4 --out build/live-page.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.append(str(Path(__file__).resolve().parent))  # benchmarks are scripts
from run import start_server

from forerun.client.connection import ClientConfig
from forerun.models.catalog import held_out_prompts
from forerun.provenance import collect
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio
from forerun.tune.arms import Load
from forerun.tune.load import LoadBlock, measure_load
from forerun.tune.server import MeasuredServer

ARMS = ("closed", "open")
PERIOD_S = 1.0
"""Of the page's requests, as in page/main.js."""


@contextlib.contextmanager
def page(url: str, *, is_open: bool) -> Iterator[None]:
    """Keep the page open during the block."""
    if not is_open:
        yield
        return
    over = threading.Event()
    reader = threading.Thread(target=read, args=(url, over))
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()


def read(url: str, over: threading.Event) -> None:
    """Send the requests of a page until it is closed."""
    with httpx.Client(base_url=url) as client:
        for path in ("/", "/page/main.js", "/page/style.css"):
            client.get(path).raise_for_status()
        while True:
            client.get("/live").raise_for_status()
            if over.wait(PERIOD_S):
                return


def measure(options: argparse.Namespace, url: str) -> dict[str, list[LoadBlock]]:
    """Measure pairs of blocks until the time is over; the ratio is printed after every fifth."""
    prompts = [prompt.text for prompt in held_out_prompts()][: options.prompts]
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens, ignore_eos=True)
    blocks: dict[str, list[LoadBlock]] = {arm: [] for arm in ARMS}
    with MeasuredServer(ClientConfig(url=url)) as server:
        warm_up = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        for settings in (warm_up, params):
            for prompt in prompts:
                server.ask(prompt, settings)
        ends_s = time.monotonic() + 60 * options.minutes
        while len(blocks["open"]) < 2 or time.monotonic() < ends_s:
            index = len(blocks["open"])
            for arm in ARMS if index % 2 == 0 else ARMS[::-1]:
                with page(url, is_open=arm == "open"):
                    block = measure_load(
                        server,
                        prompts,
                        params,
                        arm=arm,
                        load=Load(clients=options.concurrency),
                        index=index,
                    )
                blocks[arm].append(block)
            if index % 5 == 4:
                print(json.dumps(summary(blocks)), flush=True)
    return blocks


def summary(blocks: dict[str, list[LoadBlock]]) -> dict[str, object]:
    """Return the rates of both arms, and their paired ratio with its 95% interval."""
    walls = {arm: [block.wall_s for block in found] for arm, found in blocks.items()}
    ratio = bootstrap_ratio(walls["closed"], walls["open"], seed=0)
    rates = {
        f"{arm}_tokens_per_s": sum(block.num_tokens for block in found) / sum(walls[arm])
        for arm, found in blocks.items()
    }
    interval = [ratio.low, ratio.high]
    return {
        "pairs": len(walls["open"]),
        **rates,
        "open_over_closed": ratio.estimate,
        "95": interval,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=8, help="of a block, which takes seconds")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    process, url = start_server(options)
    try:
        blocks = measure(options, url.rstrip("/"))
    finally:
        process.terminate()
        process.wait(60)
    if options.out is not None:
        content = {
            "command": shlex.join(["python", *sys.argv]),
            **summary(blocks),
            "walls_s": {arm: [block.wall_s for block in found] for arm, found in blocks.items()},
            "provenance": collect({}).to_dict(),
        }
        options.out.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
