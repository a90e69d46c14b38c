"""Are the page, the metrics and the watch of the plug-in right inside a vLLM with 128 clients?

    make -f benchmarks/Makefile vllm-plugin

Starts vLLM's server with the plug-in and a key. 128 clients each send their next request when the
last one is answered; half way their prompts change from code to noise, so that acceptance falls.
The page is read once a second meanwhile. At the end everything that the plug-in counted is compared
with vLLM's own counters, and the tokens with the responses. Fails where anything differs, a route
answers without the key, or the plug-in is off.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from check import GENERATED, NAMES, PER_POSITION, counters_of, fetched, server

from forerun.models.catalog import held_out_prompts

KEY = "a key of this check"
VARIABLES = {
    "VLLM_PLUGINS": "forerun",
    # One thread and no binding: what else runs on this machine does not stop a step.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "NUMBA_NUM_THREADS": "1",
    "NUMBA_THREADING_LAYER": "workqueue",
}


def ask(url: str, body: object = None, key: str | None = KEY) -> Any:
    headers = {"Content-Type": "application/json"}
    headers |= {"Authorization": f"Bearer {key}"} if key else {}
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data=data, headers=headers), timeout=600) as answer:
        return json.load(answer)


def status_of(url: str, body: object, key: str | None) -> int:
    try:
        ask(url, body, key)
    except HTTPError as error:
        return error.code
    except ValueError:
        pass  # metrics are no JSON
    return 200


class Clients:
    """Threads that send requests until they are told to stop."""

    def __init__(self, url: str, number: int, max_tokens: int) -> None:
        self.url, self.max_tokens = url, max_tokens
        self.prompts = [prompt.text[:200] for prompt in held_out_prompts()]
        self.is_over = False
        self.num_tokens = self.num_requests = 0
        self.errors: list[str] = []
        self.lock = threading.Lock()
        self.threads = [threading.Thread(target=self.send, args=(n,)) for n in range(number)]

    def send(self, number: int) -> None:
        while not self.is_over:
            number += len(self.threads)
            body = {
                "model": "target",
                "prompt": self.prompts[number % len(self.prompts)],
                "max_tokens": self.max_tokens,
                "temperature": 0,
                "ignore_eos": True,
            }
            try:
                found = ask(f"{self.url}/v1/completions", body)
            except OSError as error:
                self.errors.append(str(error))
                return
            with self.lock:
                self.num_tokens += found["usage"]["completion_tokens"]
                self.num_requests += 1

    def change(self) -> None:
        """From now on prompts are noise."""
        self.prompts = [hashlib.sha512(bytes([n])).hexdigest()[:60] for n in range(64)]


def read_page(url: str, seconds: list[float], stop: threading.Event) -> None:
    while not stop.wait(1.0):
        started_s = time.monotonic()
        ask(f"{url}/forerun/live")
        seconds.append(time.monotonic() - started_s)


def samples_of(page: str) -> dict[str, float]:
    """The plug-in's counters by name and their one label besides the model's."""
    found = {}
    for name, labels, value in re.findall(r"^(forerun:\w+)\{(.*)\} (\S+)$", page, re.MULTILINE):
        labels = re.sub(r'model_name="[^"]*",?', "", labels).strip(",")
        found[f"{name} {labels}".strip()] = float(value)
    return found


def compare(url: str, clients: Clients, method: str) -> dict[str, list[float]]:
    """What must be equal, by name: vLLM's counter, the plug-in's metric, the page."""
    page = fetched(f"{url}/metrics")
    vllm, own, live = counters_of(page), samples_of(page), ask(f"{url}/forerun/live")
    positions = sum(own[f'forerun:drafted_per_position_total position="{i}"'] for i in range(4))
    steps = f'forerun:sequence_steps_total method="{method}",num_speculative_tokens="4"'
    totals = live["totals"]
    return {
        "drafts": [vllm[NAMES["num_drafts"]], own[steps]],
        "drafted": [
            vllm[NAMES["num_drafted"]],
            totals["num_drafted"],
            positions,
        ],
        "accepted": [
            vllm[NAMES["num_accepted"]],
            totals["num_accepted"],
            sum(vllm[f"{PER_POSITION} {i}"] for i in range(4)),
        ],
        "steps": [own["forerun:cycles_total"], totals["num_steps"]],
        "tokens": [vllm[GENERATED], totals["num_emitted"], clients.num_tokens],
    }


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    log = arguments.out / "server.log"
    options = ("--max-num-seqs", "128", "--api-key", KEY)
    with server(arguments, log, options, VARIABLES) as url:
        routes = {"live": None, "metrics": None, "live/answers": {"answers": {}}}
        statuses = {
            f"{path} {name}": status_of(f"{url}/forerun/{path}", body, key)
            for path, body in routes.items()
            for name, key in (("without", None), ("wrong", "other"), ("right", KEY))
        }
        clients = Clients(url, arguments.clients, arguments.max_tokens)
        seconds: list[float] = []
        stop = threading.Event()
        reader = threading.Thread(target=read_page, args=(url, seconds, stop))
        for thread in (*clients.threads, reader):
            thread.start()
        time.sleep(arguments.seconds)
        before = ask(f"{url}/forerun/live")
        clients.change()
        until_s = time.monotonic() + arguments.seconds
        while time.monotonic() < until_s and not ask(f"{url}/forerun/live")["last_change"]:
            time.sleep(5.0)
        during = ask(f"{url}/forerun/live")
        clients.is_over = True
        for thread in clients.threads:
            thread.join()
        stop.set()
        reader.join()
        time.sleep(2.0)  # a page may be half a second old
        compared = compare(url, clients, during["setup"]["methods"][0])
        after = ask(f"{url}/forerun/live")
    text = log.read_text()
    lines = [line for line in text.splitlines() if "endpoint.py" in line or "observer.py" in line]
    result = {
        "compared": compared,
        "statuses": statuses,
        "requests": clients.num_requests,
        "errors": clients.errors,
        "page_reads": len(seconds),
        "slowest_page_s": max(seconds, default=None),
        "running": during["load"],
        "acceptance_length": [before["acceptance_length"], after["acceptance_length"]],
        "last_change": after["last_change"],
        "diagnosis": after["diagnosis"],
        "log": lines[-20:],
    }
    result["agrees"] = (
        all(len(set(values)) == 1 for values in compared.values())
        and all((code == 200) == name.endswith("right") for name, code in statuses.items())
        and set(statuses.values()) == {200, 401}
        and not clients.errors
        and "is off" not in text
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m", help="or ngram")
    parser.add_argument("--k", type=int, default=4, choices=[4])
    parser.add_argument("--clients", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=420.0, help="of each kind of prompts")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/vllm-plugin"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = check(arguments)
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    json.dump(result, sys.stdout, indent=1)
    if not result["agrees"]:
        raise SystemExit("the plug-in and vLLM differ")


if __name__ == "__main__":
    main()
