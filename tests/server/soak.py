"""Random traffic against a server: every answer is right or an error, and nothing is left behind.

Clients read whole or streamed answers, slowly or fast, leave in the middle, send oversized and
malformed bodies and wrong keys, while the drafter raises now and then. `python -m
tests.server.soak` runs 10,000 requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import time
from collections import Counter
from typing import Any

import httpx
import psutil
from tests import tiny
from tests.server.conftest import TIMEOUT_S, serving, tiny_engine, wait_until_idle

from forerun.drafters.base import Drafter
from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams
from forerun.server.config import ServerConfig
from forerun.server.guard import ApiKey

KEY = "s" * 32
MAX_BODY_BYTES = 20_000
CONCURRENCY = 12
MALFORMED = (b"{", b"\xff", b"[" * 5000, b'{"prompt": 1}', b'{"prompt": "x", "nothing": 1}', b"")


class Dying(Drafter):
    """A drafter that raises at every seventh call, and sometimes when it is told of a step."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.num_calls = 0

    method = "draft_model"
    required_features = ()

    def propose(self, requests: Any, plans: Any) -> Any:
        self.num_calls += 1
        if self.num_calls % 7 == 0:
            raise RuntimeError("the drafter died")
        return self.drafter.propose(requests, plans)

    def observe(self, outcomes: Any) -> None:
        if self.num_calls % 31 == 5:
            self.num_calls += 1
            raise RuntimeError("the drafter died")
        self.drafter.observe(outcomes)

    def forget(self, request_id: str) -> None:
        self.drafter.forget(request_id)


def bodies(rng: random.Random, number: int) -> list[dict[str, Any]]:
    found = []
    for _ in range(number):
        body: dict[str, Any] = {
            "prompt": rng.choice(tiny.PROMPTS),
            "seed": rng.randrange(1000),
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "n": rng.choice([1, 1, 1, 2]),
        }
        body |= rng.choice(
            [{}, {"ignore_eos": True}, {"stop": ["a", "xyz"]}, {"top_p": 0.8}, {"min_p": 0.05}]
        )
        found.append(body)
    return found


class Soak:
    def __init__(self, client: httpx.AsyncClient, seed: int, library: Engine) -> None:
        self.client = client
        self.rng = random.Random(seed)
        self.pool = bodies(self.rng, 24)
        self.texts = [
            [c.text for c in library.generate([b["prompt"]], params_of(b))[0].completions]
            for b in self.pool
        ]
        self.counts: Counter[str] = Counter()

    async def one(self) -> None:
        kind = self.rng.choice(
            "whole stream stream slow leave leave cancel oversized malformed key".split()
        )
        at = self.rng.randrange(len(self.pool))
        body = dict(self.pool[at])
        body["speculation"] = self.rng.choice(["auto", "off", {"num_speculative_tokens": 2}])
        status = await getattr(self, kind)(body, self.texts[at])
        self.counts[f"{kind} {status}"] += 1

    async def post(self, **parts: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        return await self.client.post("/v1/completions", headers=headers, **parts)

    async def whole(self, body: dict[str, Any], texts: list[str]) -> int:
        response = await self.post(json=body)
        if response.status_code == 200:
            assert [c["text"] for c in response.json()["choices"]] == texts, body
        else:
            check_error(response, 429)
        return response.status_code

    async def stream(self, body: dict[str, Any], texts: list[str], **how: Any) -> int:
        headers = {"Authorization": f"Bearer {KEY}"}
        found = [""] * len(texts)
        num_events = 0
        async with self.client.stream(
            "POST", "/v1/completions", json=body | {"stream": True}, headers=headers
        ) as response:
            if response.status_code != 200:
                await response.aread()
                check_error(response, 429)
                return response.status_code
            async for line in response.aiter_lines():
                if not line or line == "data: [DONE]":
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                found[choice["index"]] += choice["text"]
                num_events += 1
                if num_events == how.get("leave_after"):
                    break
                await asyncio.sleep(how.get("pause_s", 0.0))
        if "leave_after" in how:
            assert all(whole.startswith(part) for whole, part in zip(texts, found, strict=True))
        else:
            assert found == texts, body
        return 200

    async def slow(self, body: dict[str, Any], texts: list[str]) -> int:
        return await self.stream(body, texts, pause_s=0.01)

    async def leave(self, body: dict[str, Any], texts: list[str]) -> int:
        return await self.stream(body, texts, leave_after=self.rng.randrange(1, 6))

    async def cancel(self, body: dict[str, Any], texts: list[str]) -> int:
        asking = asyncio.ensure_future(self.whole(body, texts))
        await asyncio.sleep(self.rng.random() * 0.03)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        return 499

    async def oversized(self, body: dict[str, Any], texts: list[str]) -> int:
        content = b"x" * (MAX_BODY_BYTES + 1)

        async def parts() -> Any:
            for start in range(0, len(content), 4000):
                yield content[start : start + 4000]

        try:
            response = await self.post(content=self.rng.choice([content, parts()]))
        except httpx.NetworkError:  # refused while it was being sent; the reset may come first
            return 413
        check_error(response, 413)
        return 413

    async def malformed(self, body: dict[str, Any], texts: list[str]) -> int:
        response = await self.post(content=self.rng.choice(MALFORMED))
        check_error(response, 400)
        return 400

    async def key(self, body: dict[str, Any], texts: list[str]) -> int:
        headers = {"Authorization": f"Bearer {'w' * 32}"}
        response = await self.client.post("/v1/completions", json=body, headers=headers)
        check_error(response, 401)
        return 401


def check_error(response: httpx.Response, status: int) -> None:
    assert response.status_code == status, (response.status_code, response.text)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def params_of(body: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**{name: value for name, value in body.items() if name != "prompt"})


async def traffic(url: str, num_requests: int, seed: int) -> tuple[Counter[str], float, float]:
    """Returns the counts, and the resident MB after a third of the requests and at the end."""
    limits = httpx.Limits(max_connections=CONCURRENCY + 4)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=TIMEOUT_S) as client:
        soak = Soak(client, seed, tiny_engine(with_draft=False))
        left = iter(range(num_requests))
        sizes: list[float] = []

        async def worker() -> None:
            for number in left:
                if number == num_requests // 3:
                    sizes.append(resident_mb())
                await soak.one()

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(worker())
        return soak.counts, sizes[0], resident_mb()


def resident_mb() -> float:
    gc.collect()
    return psutil.Process().memory_info().rss / 2**20


def run(num_requests: int, seed: int) -> tuple[Counter[str], float, float]:
    """Send the requests and check that the engine ends idle."""
    engine = tiny_engine(max_waiting=10)
    engine.stepper.drafter.drafter = Dying(engine.stepper.drafter.drafter)
    config = ServerConfig(port=0, max_body_bytes=MAX_BODY_BYTES)
    with serving(engine, config, keys=[ApiKey.of("a", KEY)]) as client:
        found = asyncio.run(traffic(str(client.base_url), num_requests, seed))
        wait_until_idle(engine)
        assert not engine._requests and not client.app.state.server.engine._tickets
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    started_s = time.monotonic()
    counts, before_mb, after_mb = run(options.requests, options.seed)
    for kind, count in sorted(counts.items()):
        print(f"{kind:<16} {count}")
    print(f"{options.requests} requests in {time.monotonic() - started_s:.0f} s")
    print(f"resident: {before_mb:.0f} MB after a third, {after_mb:.0f} MB at the end")
    assert after_mb < 1.1 * before_mb + 20


if __name__ == "__main__":
    main()
