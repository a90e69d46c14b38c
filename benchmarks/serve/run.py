"""Tokens/s and time to first token through HTTP streaming, over the engine's own.

The server runs in a process of its own, the engine in this one, with the same settings; blocks of
both alternate. Within a block both answer the same prompts, all at once. Nothing else should run.

    python benchmarks/serve/run.py --model zoo:code-11m --draft zoo:code-2m --out build/serve.json

With `--before SRC`, the source folder of another version, its server is a third arm.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.models.catalog import held_out_prompts
from forerun.sampling.config import SamplingParams
from forerun.theory.intervals import bootstrap_ratio

BATCHES = (1, 8)


@dataclass(frozen=True, slots=True)
class Block:
    """One measurement: emitted tokens over wall seconds, and seconds to each first token."""

    num_tokens: int
    wall_s: float
    ttft_s: tuple[float, ...]


def settings(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        num_speculative_tokens=options.k,
        controller="fixed",
        max_batch=max(BATCHES),
        max_context=2048,
        num_threads=options.threads,
    )


def start_server(
    options: argparse.Namespace, source: Path | None = None
) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "forerun", "serve", options.model, "--port", "0"]
    command += ["--draft", options.draft, "--controller", "fixed", "--k", str(options.k)]
    command += ["--max-batch", str(max(BATCHES)), "--max-context", "2048"]
    if options.threads:
        command += ["--threads", str(options.threads)]
    other = {} if source is None else {"PYTHONPATH": str(source.resolve())}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, **other}
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()[-1]


def by_engine(engine: Engine, prompts: list[str], params: SamplingParams) -> Block:
    started_s = time.perf_counter()
    outputs = engine.generate(prompts, params)
    wall_s = time.perf_counter() - started_s
    ttft_s = tuple(output.completions[0].ttft_s or 0.0 for output in outputs)
    return Block(sum(len(output.token_ids) for output in outputs), wall_s, ttft_s)


async def by_http(address: tuple[str, int], prompts: list[str], params: dict[str, object]) -> Block:
    """Read the streams as bytes: a client that parses every event takes a core of its own."""

    async def one(prompt: str) -> tuple[int, float]:
        asked_s = time.perf_counter()
        body = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}}
        content = json.dumps(body | params).encode()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(content)
        )
        writer.write(content)
        found, first_s = b"", 0.0
        while part := await reader.read(1 << 16):
            found += part
            if not first_s and b"data: " in found:
                first_s = time.perf_counter() - asked_s
        writer.close()
        usage = found[found.rindex(b'"completion_tokens":') :]
        return int(usage.split(b":")[1].split(b",")[0]), first_s

    started_s = time.perf_counter()
    found = await asyncio.gather(*(one(prompt) for prompt in prompts))
    wall_s = time.perf_counter() - started_s
    return Block(sum(n for n, _ in found), wall_s, tuple(ttft_s for _, ttft_s in found))


async def measure(options: argparse.Namespace) -> list[dict[str, object]]:
    params: dict[str, object] = {
        "temperature": 0.0,
        "max_tokens": options.max_tokens,
        "ignore_eos": True,
    }
    texts = [prompt.text for prompt in held_out_prompts()]
    sources = {"http": None} if options.before is None else {"http": None, "before": options.before}
    processes, addresses = [], {}
    rows = []
    try:
        for name, source in sources.items():
            process, url = start_server(options, source)
            processes.append(process)
            addresses[name] = urlsplit(url).hostname or "", urlsplit(url).port or 0
        engine = Engine.load(options.model, options.draft, config=settings(options))
        for batch in options.batches:
            arms: dict[str, list[Block]] = {name: [] for name in ("engine", *addresses)}
            for block in range(options.blocks + 1):  # the first one warms up
                prompts = [texts[(block * batch + n) % len(texts)] for n in range(batch)]
                order = list(arms)[block % len(arms) :] + list(arms)[: block % len(arms)]
                found = {}
                for name in order:
                    if name == "engine":
                        found[name] = by_engine(engine, prompts, SamplingParams(**params))
                    else:
                        found[name] = await by_http(addresses[name], prompts, params)
                assert len({each.num_tokens for each in found.values()}) == 1
                for name, each in found.items() if block else ():
                    arms[name].append(each)
            rows.append(row_of(batch, arms))
            print(json.dumps(rows[-1]))
    finally:
        for process in processes:
            process.terminate()
            process.wait(60)
    return rows


def row_of(batch: int, arms: dict[str, list[Block]]) -> dict[str, object]:
    rates = {
        name: sum(b.num_tokens for b in blocks) / sum(b.wall_s for b in blocks)
        for name, blocks in arms.items()
    }
    # Both arms emit the same tokens, so the ratio of rates is that of the walls.
    ratio = bootstrap_ratio(
        [b.wall_s for b in arms["engine"]], [b.wall_s for b in arms["http"]], seed=0
    )
    ttft_ms = {
        name: 1e3 * statistics.median(t for b in blocks for t in b.ttft_s)
        for name, blocks in arms.items()
    }
    found: dict[str, object] = {}
    if "before" in arms:
        walls = [[b.wall_s for b in arms[name]] for name in ("before", "http")]
        change = bootstrap_ratio(*walls, seed=0)
        found = {
            "before_tokens_per_s": rates["before"],
            "http_over_before": change.estimate,
            "http_over_before_95": [change.low, change.high],
            "before_ttft_ms": ttft_ms["before"],
        }
    return found | {
        "batch": batch,
        "engine_tokens_per_s": rates["engine"],
        "http_tokens_per_s": rates["http"],
        "ratio": ratio.estimate,
        "ratio_95": [ratio.low, ratio.high],
        "engine_ttft_ms": ttft_ms["engine"],
        "http_ttft_ms": ttft_ms["http"],
        "ttft_difference_ms": ttft_ms["http"] - ttft_ms["engine"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--before", type=Path, help="source folder of another version")
    parser.add_argument("--batches", nargs="+", type=int, choices=BATCHES, default=BATCHES)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    if options.out is not None:
        shown = {k: v for k, v in vars(options).items() if k not in ("out", "before")}
        options.out.write_text(json.dumps({"options": shown, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
