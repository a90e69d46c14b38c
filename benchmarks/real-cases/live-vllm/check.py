"""Is what `forerun diagnose` reads of a live vLLM what vLLM counted?

    make -f benchmarks/Makefile live-vllm

Starts vLLM's server for the shipped pair on a loopback port, serves some requests, and reads it in
three ways: its /metrics URL sampled before and after them, the same URL when nothing happens any
more (totals since the start), and its log. Counters are taken from the page by four lines of this
file as well, and the tokens from the responses. Fails where they disagree.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from forerun.doctor.diagnosis import diagnose
from forerun.doctor.readers.sources import read_live
from forerun.models.catalog import held_out_prompts
from forerun.models.checkpoint import ModelFiles
from forerun.provenance import collect, content_hash

sys.path.insert(0, str(Path(__file__).parents[2] / "peers"))  # benchmarks are scripts
from client import KINDS

Counters = dict[str, float]
NAMES = {
    "num_drafts": "vllm:spec_decode_num_drafts_total",
    "num_drafted": "vllm:spec_decode_num_draft_tokens_total",
    "num_accepted": "vllm:spec_decode_num_accepted_tokens_total",
}
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
GENERATED = "vllm:generation_tokens_total"
LOG_INTERVAL_S = 10.0
START_S = 600.0


def counters_of(page: str) -> Counters:
    """Samples by name, positions by name and number; no code shared with what is checked."""
    found: Counters = {}
    for name, labels, value in re.findall(r"^(vllm:\w+)\{([^}]*)\} (\S+)$", page, re.MULTILINE):
        position = re.search(r'position="(\d+)"', labels)
        found[f"{name} {position.group(1)}" if position else name] = float(value)
    return found


def fetched(url: str) -> str:
    with urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


@contextmanager
def server(
    arguments: argparse.Namespace,
    log: Path,
    options: Sequence[str] = ("--max-num-seqs", "4"),
    more_variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[str]:
    """A running server's address; ended, with all that it started, on the way out."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculative = {"num_speculative_tokens": arguments.k}
    if arguments.draft == "ngram":
        speculative |= {"method": "ngram", "prompt_lookup_max": 4}
    else:
        folder = str(ModelFiles.find(arguments.draft).folder)
        speculative |= {"method": "draft_model", "model": folder}
    peers = arguments.environments.resolve()
    command = [
        *(str(peers / "vllm" / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", ModelFiles.find(arguments.target).folder, "--served-model-name", "target"),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"),
        *("--max-model-len", "512", "--enforce-eager", *options),
        *("--speculative-config", json.dumps(speculative)),
    ]
    variables = KINDS["vllm"].variables(peers, arguments.threads)
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]  # the server's engine is a process of its own
    with log.open("w") as out:
        process = subprocess.Popen(
            command,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **variables, **more_variables},
            start_new_session=True,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            await_start(process, url)
            yield url
        finally:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def await_start(process: subprocess.Popen[bytes], url: str) -> None:
    """Until it answers.

    Raises:
        RuntimeError: it ended, or takes too long.
    """
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended with {process.returncode}")
        try:
            fetched(f"{url}/health")
        except (URLError, OSError):
            time.sleep(1.0)
        else:
            return
    raise RuntimeError(f"vLLM did not answer within {START_S:g} s")


def complete(url: str, prompts: list[str], max_tokens: int) -> int:
    """Serve prompts one after another; how many tokens came."""
    total = 0
    for prompt in prompts:
        body = {"model": "target", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        request = Request(
            f"{url}/v1/completions",
            data=json.dumps({**body, "ignore_eos": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urlopen(request, timeout=300) as answer:
            total += json.load(answer)["usage"]["completion_tokens"]
    return total


def by_command(*sources: str) -> dict[str, Any]:
    """What the command says of sources."""
    command = [sys.executable, "-m", "forerun", "diagnose", *sources, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if done.returncode not in (0, 3, 4):
        raise RuntimeError(f"forerun diagnose ended with {done.returncode}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def difference(now: Mapping[str, float], before: Mapping[str, float]) -> Counters:
    return {name: value - before.get(name, 0.0) for name, value in now.items()}


def expected(counters: Mapping[str, float], k: int) -> dict[str, Any]:
    """What a reading has to say where these are the counters."""
    found: dict[str, Any] = {name: counters[counter] for name, counter in NAMES.items()}
    found["accepted_per_position"] = [counters[f"{PER_POSITION} {i}"] for i in range(k)]
    found["acceptance_length"] = 1.0 + found["num_accepted"] / found["num_drafts"]
    found["k"] = float(k)
    return found


def read(values: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """The same facts as read."""
    return {name: values[name]["value"] if name in values else None for name in names}


def agree(wanted: Mapping[str, Any], got: Mapping[str, Any], share: float) -> bool:
    """Whether all figures are the same, or within a share of each."""

    def same(one: Any, other: Any) -> bool:
        if isinstance(one, list):
            return len(one) == len(other or ()) and all(map(same, one, other))
        return other is not None and abs(one - other) <= share * abs(one)

    return all(same(value, got[name]) for name, value in wanted.items())


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    log = arguments.out / "server.log"
    prompts = [prompt.text[:400] for prompt in held_out_prompts()[: arguments.prompts + 1]]
    with server(arguments, log) as url:
        page = f"{url}/metrics"
        generated = complete(url, prompts[:1], arguments.max_tokens)  # before the first sample
        before = counters_of(fetched(page))
        served = 0

        def serve(_: float) -> None:
            nonlocal served
            served = complete(url, prompts[1:], arguments.max_tokens)

        live = diagnose(read_live(page, interval_s=1.0, sleep=serve)).to_dict()["evidence"]
        after = counters_of(fetched(page))
        idle = by_command(page, "--interval-s", "1")
        time.sleep(1.5 * LOG_INTERVAL_S)  # a log line says what was counted since the one before
    between, k = difference(after, before), arguments.k
    text = by_command(str(log))
    rows = {
        "URL, before and after the requests": (expected(between, k), live, 0.0),
        "URL, nothing in between: since the start": (expected(after, k), idle["evidence"], 0.0),
        "log lines": (expected(after, k), text["evidence"], 0.01),
    }
    compared = [
        {
            "source": name,
            "counted": wanted,
            "read": (got := read(evidence, wanted)),
            "allowed": share,
            "agrees": agree(wanted, got, share),
        }
        for name, (wanted, evidence, share) in rows.items()
    ]
    tokens = {"responses": served, "counter": between[GENERATED], "first": generated}
    return {
        "compared": compared,
        "tokens": tokens,
        "log": {name: text["sources"][0][name] for name in ("kinds", "num_lines", "num_unknown")},
        "verdicts": {"log": text["verdict"], "url": idle["verdict"]},
        "agrees": all(row["agrees"] for row in compared) and served == between[GENERATED],
    }


def table(result: Mapping[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| source | drafts | drafted | accepted | by position | tau | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["compared"]:
        for what in ("counted", "read"):
            value = row[what]
            places = ", ".join(f"{v:g}" for v in value["accepted_per_position"] or ())
            counts = " | ".join(f"{value[name]:g}" for name in NAMES)
            verdict = "" if what == "counted" else "agrees" if row["agrees"] else "DIFFERS"
            lines.append(
                f"| {row['source']}: {what} | {counts} | {places} "
                f"| {value['acceptance_length']:.4f} | {verdict} |"
            )
    return "\n".join(lines)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that the server is ended too
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="zoo:code-11m")
    parser.add_argument("--draft", default="zoo:code-2m")
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path("build/peers"))
    parser.add_argument("--out", type=Path, default=Path("build/live-vllm"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result = check(arguments)
    hashes = {name: content_hash(getattr(arguments, name)) for name in ("target", "draft")}
    result["provenance"] = collect(hashes).to_dict()
    (arguments.out / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result), result["tokens"], result["log"], result["verdicts"], sep="\n")
    if not result["agrees"]:
        raise SystemExit("what was read is not what was counted")


if __name__ == "__main__":
    main()
