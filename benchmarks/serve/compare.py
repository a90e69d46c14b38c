"""forerun serve beside the servers of vLLM and llama.cpp: requests/s, first token, time per token.

Clients send streamed completions, each its next one when the last has ended. Every server answers
the same number of requests of the same lengths at one concurrency before the next server does;
the order changes from round to round, and all servers but the one measured are stopped. The first
token of every prompt is another one for every arm and round, so that no server finds a prompt in
its cache. Nothing else should run.

    python benchmarks/serve/compare.py --target build/pairs/292m/target \\
      --draft build/pairs/292m/draft --out benchmarks/2026-11-23-serve
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from servers import Arm, Models, Server, arms_of

from forerun.models.load import load_tokenizer
from forerun.models.zoo.catalog import held_out_prompts
from forerun.provenance import collect, content_hash
from forerun.theory.intervals import bootstrap_ratio

PEERS = ("vLLM", "llama.cpp")
REQUESTS = {1: 3, 4: 8, 8: 16, 16: 32}
"""Requests of a block, by concurrency."""


@dataclass(frozen=True, kw_only=True)
class Reply:
    """One streamed answer: seconds to its first event with a choice, and to its last."""

    first_s: float
    last_s: float
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Block:
    """One measurement of one arm at one concurrency."""

    arm: str
    concurrency: int
    round: int
    wall_s: float
    replies: Sequence[Reply]


async def asked(server: Server, body: dict[str, Any]) -> Reply:
    """Send one request and read its stream as bytes, which takes little of the processor."""
    content = json.dumps(body).encode()
    asked_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(content), content)
    )
    found, first_s, last_s = b"", 0.0, 0.0
    while part := await reader.read(1 << 16):
        found += part
        if b'"text"' in part:
            last_s = time.perf_counter() - asked_s
            first_s = first_s or last_s
    writer.close()
    if b'"completion_tokens":' not in found:
        raise RuntimeError(f"no usage in the answer: {found[-300:]!r}")
    usage = found[found.rindex(b'"completion_tokens":') :]
    number = usage.split(b":")[1].split(b",")[0].rstrip(b"} \r\n")
    return Reply(first_s=first_s, last_s=last_s, num_tokens=int(number))


async def block_of(
    arm: Arm,
    server: Server,
    concurrency: int,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    at: int,
) -> Block:
    """Answer all prompts, so many at once."""
    bodies: Iterator[dict[str, Any]] = iter(
        [
            {
                "model": server.model,
                "prompt": list(prompt),
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                **arm.extra,
            }
            for prompt in prompts
        ]
    )
    replies: list[Reply] = []

    async def client() -> None:
        for body in bodies:
            replies.append(await asked(server, body))

    started_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(concurrency)))
    wall_s = time.perf_counter() - started_s
    wrong = [reply.num_tokens for reply in replies if reply.num_tokens != max_tokens]
    if wrong:
        raise RuntimeError(f"{arm.name} returned {wrong} tokens where {max_tokens} were asked for")
    return Block(arm=arm.name, concurrency=concurrency, round=at, wall_s=wall_s, replies=replies)


def prompts_of(options: argparse.Namespace) -> list[list[int]]:
    """Return held-out prompts of one length, as token ids."""
    tokenizer = load_tokenizer(options.target)
    found = [tokenizer.encode(prompt.text) for prompt in held_out_prompts()]
    return [ids[-options.prompt_tokens :] for ids in found if len(ids) >= options.prompt_tokens]


def measure(options: argparse.Namespace, models: Models, blocks: list[Block]) -> None:
    """Append blocks until the rounds or the time are over."""
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
                    server = servers[arm.server]
                    tokens = 8 if at < 0 else options.max_tokens
                    with server.running():
                        found = asyncio.run(block_of(arm, server, concurrency, chosen, tokens, at))
                    if at >= 0:
                        blocks.append(found)
            print(f"{time.monotonic() - began_s:.0f} s: round {at + 1} is over", flush=True)


def rows_of(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return the figures of every arm at every concurrency, over the rounds that all arms have."""
    rows = []
    for concurrency in sorted({block.concurrency for block in blocks}):
        here = [block for block in blocks if block.concurrency == concurrency]
        arms = list(dict.fromkeys(sorted(block.arm for block in here)))
        by_arm = {arm: {b.round: b for b in here if b.arm == arm} for arm in arms}
        shared = sorted(set.intersection(*(set(found) for found in by_arm.values())))
        for arm in arms if shared else ():
            found = [by_arm[arm][at] for at in shared]
            rows.append(row_of(found) | ratios_of(found, by_arm, shared))
    return rows


def row_of(blocks: Sequence[Block]) -> dict[str, Any]:
    """Return the figures of one arm at one concurrency."""
    replies = [reply for block in blocks for reply in block.replies]
    wall_s = sum(block.wall_s for block in blocks)
    tpot_s = [(r.last_s - r.first_s) / (r.num_tokens - 1) for r in replies]
    return {
        "concurrency": blocks[0].concurrency,
        "arm": blocks[0].arm,
        "rounds": len(blocks),
        "requests_per_s": len(replies) / wall_s,
        "tokens_per_s": sum(reply.num_tokens for reply in replies) / wall_s,
        "ttft_ms": 1e3 * statistics.median(reply.first_s for reply in replies),
        "tpot_ms": 1e3 * statistics.median(tpot_s),
    }


def ratios_of(
    blocks: Sequence[Block], by_arm: dict[str, dict[int, Block]], rounds: Sequence[int]
) -> dict[str, Any]:
    """Return how many times the requests/s of this arm forerun's controller reaches.

    Empty where the time was over before the controller was measured twice.
    """
    ours = by_arm.get("forerun auto")
    if ours is None or len(rounds) < 2:
        return {}
    ratio = bootstrap_ratio(
        [block.wall_s for block in blocks], [ours[at].wall_s for at in rounds], seed=0
    )
    return {"auto_over_this": [ratio.estimate, ratio.low, ratio.high]}


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
            f"| {row['tokens_per_s']:.0f} | {row['ttft_ms']:.0f} | {row['tpot_ms']:.1f} "
            f"| {ratio} |"
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
    blocks: list[Block] = []
    try:
        measure(options, models, blocks)
    finally:
        rows = rows_of(blocks)
        options.out.mkdir(parents=True, exist_ok=True)
        content = {**facts, "rows": rows, "blocks": [asdict(block) for block in blocks]}
        (options.out / "serve.json").write_text(json.dumps(content, indent=1) + "\n")
        text = table(rows)
        (options.out / "table.md").write_text(text + "\n")
        print(text)


if __name__ == "__main__":
    main()
