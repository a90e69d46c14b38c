"""Requests beside hostile ones: latency of a short request, and throughput of 64 clients.

A server with the shipped pair runs in a process of its own, and so does the hostile client, which
sends one kind of request again and again, at the lowest priority: what it computes itself should
not be measured. Short requests are sent alone and beside each kind, in
alternating blocks. Nothing else should run.

    python benchmarks/serve/hostile.py --out DIR
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forerun.provenance import collect

TEMPLATE = "{{ messages | map(attribute='content') | join('\\n') }}"
SHORT = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
BLOCKS = 2
BLOCK_S = 0.8
NUM_CLIENTS = 64
LOAD_S = 5.0
MIB = 1 << 20


def hostile_bodies() -> dict[str, tuple[str, bytes]]:
    """Return a path and a body by the name of the attack."""

    def form(**form: Any) -> dict[str, Any]:
        return {"prompt": "x", "max_tokens": 4, "structured_outputs": form}

    code = "def add(a, b):\n    return a + b\n"
    chain = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2900)) + '\nr2900: "a"\n'
    bodies: dict[str, tuple[str, Any]] = {
        "prompt of 4 MB": ("/v1/completions", {"prompt": "x" * (4 * MIB - 100)}),
        "prompt within the limit of length": ("/v1/completions", {"prompt": code * 9000}),
        "250,000 token ids": ("/v1/completions", {"prompt": [1] * 250_000}),
        "2,000,000 token ids": ("/v1/completions", {"prompt": [1] * 1_390_000}),
        "250,000 wrong ids": (
            "/v1/completions",
            {"prompt": "x", "stop_token_ids": ["a"] * 250_000},
        ),
        "330,000 unknown keys": ("/v1/completions", {f"k{i}": 1 for i in range(330_000)}),
        "texts to tokenise": ("/tokenize", {"prompt": code * 9000}),
        "conversation of 4 MB": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x" * (4 * MIB - 200)}]},
        ),
        "20,000 messages": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}] * 20_000, "max_tokens": 1},
        ),
        "biases": (
            "/v1/completions",
            {"prompt": "x", "logit_bias": {str(i): 1.0 for i in range(200_000)}},
        ),
        "rules": ("/v1/completions", form(grammar=chain)),
        "regular expression": ("/v1/completions", form(regex="a?" * 4000)),
        "schema": ("/v1/completions", form(json={"enum": [f"a{i}" for i in range(20_000)]})),
    }
    return {name: (path, json.dumps(body).encode()) for name, (path, body) in bodies.items()}


def send(connection: http.client.HTTPConnection, path: str, content: bytes) -> int:
    """Send one request and return the status of its answer, which is read whole."""
    connection.request("POST", path, content, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.read()
    return response.status


def attack(port: int, path: str, content: bytes, counts: Any) -> None:
    """Send a request again and again until the process ends."""
    os.nice(19)
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            while True:
                counts[0] = send(connection, path, content)
                counts[1] += 1
        except (OSError, http.client.HTTPException):
            connection.close()


@contextmanager
def attacked(port: int, path: str, content: bytes) -> Iterator[Any]:
    """Run the hostile client; yields the status of its last answer and how many it got."""
    counts = multiprocessing.Array("i", [0, 0], lock=False)
    process = multiprocessing.Process(target=attack, args=(port, path, content, counts))
    process.start()
    try:
        time.sleep(0.3)
        yield counts
    finally:
        process.kill()
        process.join()


def latencies_ms(port: int) -> list[float]:
    """Return the latencies of short requests that follow each other for a while."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    content, found = json.dumps(SHORT).encode(), []
    ends_s = time.perf_counter() + BLOCK_S
    while time.perf_counter() < ends_s:
        started_s = time.perf_counter()
        assert send(connection, "/v1/completions", content) == 200
        found.append(1000 * (time.perf_counter() - started_s))
    connection.close()
    return found


def requests_per_s(port: int) -> float:
    """Return the rate of 64 clients that send short requests for a while."""
    content = json.dumps({**SHORT, "max_tokens": 16}).encode()
    ends_s = time.perf_counter() + LOAD_S

    def client(_: int) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        number = 0
        while time.perf_counter() < ends_s:
            assert send(connection, "/v1/completions", content) == 200
            number += 1
        return number

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return sum(pool.map(client, range(NUM_CLIENTS))) / LOAD_S


def measure(port: int, names: list[str] | None) -> dict[str, Any]:
    """Return latencies beside each attack, and throughput with and without one."""
    latencies_ms(port)
    rows = []
    for name, (path, content) in hostile_bodies().items():
        if names is not None and name not in names:
            continue
        alone: list[float] = []
        beside: list[float] = []
        answers = status = 0
        for _ in range(BLOCKS):
            alone += latencies_ms(port)
            with attacked(port, path, content) as counts:
                beside += latencies_ms(port)
                status, answers = counts[0], answers + counts[1]
        row = {"attack": name, "status": status, "answers": answers}
        for arm, values in (("alone", alone), ("beside", beside)):
            row |= {f"{arm}_median_ms": statistics.median(values), f"{arm}_max_ms": max(values)}
        row["longer_ms"] = row["beside_median_ms"] - row["alone_median_ms"]
        row["longest_ms"] = row["beside_max_ms"] - row["alone_median_ms"]
        rows.append(row)
        print(
            f"{name:<36} {status} x{answers:<5} alone {row['alone_median_ms']:6.1f} ms, "
            f"beside {row['longer_ms']:+6.1f} median, {row['longest_ms']:+7.1f} longest",
            flush=True,
        )
    if names:
        return {"latencies": rows}  # for a look at some attacks
    path, content = hostile_bodies()["prompt of 4 MB"]
    rates: dict[str, list[float]] = {"alone": [], "beside": []}
    for _ in range(BLOCKS):
        rates["alone"].append(requests_per_s(port))
        with attacked(port, path, content):
            rates["beside"].append(requests_per_s(port))
    share = sum(rates["beside"]) / sum(rates["alone"])
    print(
        f"64 clients beside one that sends prompts of 4 MB: {share:.2f} of the requests/s, {rates}"
    )
    return {"latencies": rows, "requests_per_s": rates, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="zoo:code-40m")
    parser.add_argument("--draft", default="zoo:code-2m-for-40m")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--only", nargs="*", help="names of attacks; none: the throughput")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    template = Path("/dev/shm") / "forerun-lines.jinja"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "forerun", "serve", options.model, "--draft", options.draft]
    command += ["--port", "0", "--threads", options.threads, "--chat-template", str(template)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split()[-1].rsplit(":", 1)[1].rstrip("/"))
        found = measure(port, options.only)
    finally:
        process.terminate()
        process.wait()
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        content = {"command": sys.argv, "provenance": asdict(collect({})), **found}
        (options.out / "hostile.json").write_text(json.dumps(content, indent=1, default=str) + "\n")


if __name__ == "__main__":
    main()
