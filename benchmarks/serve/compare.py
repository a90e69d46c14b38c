"""forerun serve beside the servers of vLLM and llama.cpp: requests/s, first token, time per token.

Clients send streamed completions, each its next one when the last has ended. Every server answers
the same number of requests of the same lengths at one concurrency before the next server does;
the order changes from round to round, and all servers but the one measured are stopped. The first
token of every prompt is another one for every arm and round, so that no server finds a prompt in
its cache. Nothing else should run.

    python benchmarks/serve/compare.py --target build/pairs/292m/target \\
      --draft build/pairs/292m/draft --out benchmarks/serve/2026-11-23-servers
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
from servers import Models, Server, arms_of

from forerun.client.connection import ClientConfig
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash
from forerun.sampling.config import SamplingParams
from forerun.tune.arms import Load
from forerun.tune.load import LoadBlock, compute_figures, measure_load
from forerun.tune.race import estimate_speedup
from forerun.tune.server import MeasuredServer

PEERS = ("vLLM", "llama.cpp")
REQUESTS = {1: 3, 4: 8, 8: 16, 16: 32}
"""Requests of a block, by concurrency."""
OURS = "forerun auto"


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Return held-out prompts of one length, as token ids."""
    tokenizer = ModelFiles.find(options.target).tokenizer
    found = [tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    return [ids[-options.prompt_tokens :] for ids in found if len(ids) >= options.prompt_tokens]


def measure(options: argparse.Namespace, models: Models, results: Results) -> None:
    """Measure blocks, and write them after every round, until the rounds or the time are over."""
    began_s = time.monotonic()
    arms, prompts = arms_of(models, options.peers), prompts_of(options)
    options.logs.mkdir(parents=True, exist_ok=True)
    serial = 0
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name in dict.fromkeys(arm.server for arm in arms):
            print(f"{time.monotonic() - began_s:.0f} s: starting {name}", flush=True)
            log = options.logs / (name.replace(" ", "-") + ".log")
            server = servers[name] = Server(name, models, log)
            stack.callback(server.end)
            server.signal(signal.SIGSTOP)
        for at in range(-1, options.rounds):  # the first round is short and not counted
            for concurrency in options.concurrency:
                shift = (at + 1) % len(arms)
                for arm in (*arms[shift:], *arms[:shift]):
                    if time.monotonic() - began_s > options.limit_s:
                        return
                    number = concurrency if at < 0 else options.requests[concurrency]
                    serial += 1
                    chosen = [
                        [serial + 1, *prompts[(at * 37 + n) % len(prompts)][1:]]
                        for n in range(number)
                    ]
                    server, tokens = servers[arm.server], 8 if at < 0 else options.max_tokens
                    with server.running(), backend_of(server, arm.extra) as backend:
                        block = measure_load(
                            backend,
                            chosen,
                            SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
                            arm=arm.name,
                            load=Load(clients=concurrency),
                            index=at,
                        )
                    check(block, backend, tokens)
                    if at >= 0:
                        results.blocks.append(block)
            results.write()
            print(f"{time.monotonic() - began_s:.0f} s: round {at + 1} is over", flush=True)


def backend_of(server: Server, extra: Mapping[str, Any]) -> MeasuredServer:
    """Return a client that keeps no connections, which a stopped server would have to end."""
    limits = httpx.Limits(max_keepalive_connections=0)
    transport = httpx.HTTPTransport(limits=limits)
    config = ClientConfig(url=server.url, model=server.model)
    return MeasuredServer(config, extra=extra, transport=transport)


def check(block: LoadBlock, backend: MeasuredServer, num_tokens: int) -> None:
    """Refuse a block with answers of another length, or with requests that were sent again."""
    wrong = [c.num_tokens for c in block.answers if c.num_tokens != num_tokens]
    if wrong:
        raise RuntimeError(f"{block.arm} returned {wrong} tokens, not {num_tokens}")
    if waits_s := backend.client.connection.waits_s:
        raise RuntimeError(f"{block.arm} failed {len(waits_s)} times")


class Results:
    """Blocks measured so far, and the files with them."""

    def __init__(self, options: argparse.Namespace, facts: dict[str, Any]) -> None:
        self.out: Path = options.out
        self.facts = facts
        self.blocks: list[LoadBlock] = []

    def write(self) -> str:
        """Write all blocks and the table, and return the table."""
        rows = rows_of(self.blocks)
        self.out.mkdir(parents=True, exist_ok=True)
        blocks = [asdict(block) for block in self.blocks]
        content = {**self.facts, "rows": rows, "blocks": blocks}
        (self.out / "serve.json").write_text(json.dumps(content, indent=1) + "\n")
        text = table(rows)
        (self.out / "table.md").write_text(text + "\n")
        return text


def rows_of(blocks: Sequence[LoadBlock]) -> list[dict[str, Any]]:
    """Return the figures of every arm at every concurrency, over the rounds that all arms have."""
    rows = []
    for load in sorted({block.load for block in blocks}):
        by_arm: dict[str, list[LoadBlock]] = {}
        for block in blocks:
            if block.load == load:
                by_arm.setdefault(block.arm, []).append(block)
        least = min(map(len, by_arm.values()))  # the last round may be of some arms alone
        by_arm = {arm: found[:least] for arm, found in by_arm.items()}
        for arm, found in sorted(by_arm.items()):
            row: dict[str, Any] = {
                "concurrency": load.clients,
                "arm": arm,
                "rounds": len(found),
            }
            row |= {name: figure.estimate for name, figure in compute_figures(found).items()}
            if len(found) > 1 and OURS in by_arm:
                # All answers have as many tokens, so that this is the ratio of requests/s too.
                ours, others = ([b.times for b in side] for side in (by_arm[OURS], found))
                ratio = estimate_speedup(ours, others)
                row["auto_over_this"] = [ratio.estimate, ratio.low, ratio.high]
            rows.append(row)
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = [
        "| concurrency | server | requests/s | tokens/s | TTFT, ms | TPOT, ms | auto/this (95%) |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = "–"
        if "auto_over_this" in row:
            ratio = "{:.2f} ({:.2f}–{:.2f})".format(*row["auto_over_this"])
        lines.append(
            f"| {row['concurrency']} | {row['arm']} | {row['requests_per_s']:.2f} "
            f"| {row['tokens_per_s']:.0f} | {1e3 * row['ttft_median_s']:.0f} "
            f"| {1e3 * row['tpot_median_s']:.1f} | {ratio} |"
        )
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, required=True)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=list(REQUESTS))
    parser.add_argument("--scale", type=float, default=1.0, help="times the requests of a block")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--limit-s", type=float, default=840.0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--gguf", default="bf16", help="type of llama.cpp's weights: bf16 or f16")
    parser.add_argument("--eager", action="store_true", help="vLLM uncompiled: no timing")
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--logs", type=Path, default=Path("build/serve-logs"))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    options.requests = {
        n: max(n, round(options.scale * REQUESTS.get(n, 2 * n))) for n in options.concurrency
    }
    return options


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the servers end too
    options = parsed()
    models = Models(
        target=options.target.resolve(),
        draft=options.draft.resolve(),
        k=options.k,
        threads=options.threads,
        places=max(options.concurrency),
        peers=options.environments.resolve(),
        gguf=options.gguf,
        eager=options.eager,
    )
    hashes = {name: content_hash(str(getattr(models, name))) for name in ("target", "draft")}
    facts = {
        "command": shlex.join(["python", *sys.argv]),
        "provenance": collect(hashes).to_dict(),
        "requests": options.requests,
    }
    results = Results(options, facts)
    try:
        measure(options, models, results)
    finally:
        print(results.write())


if __name__ == "__main__":
    main()
