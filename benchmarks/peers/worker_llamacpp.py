"""llama.cpp's server behind the protocol; runs in the environment of `peers-llamacpp`.

    python worker_llamacpp.py f16

The argument is the type of the converted weights. A server has one K, so every K gets a server of
its own, started at its first call; a server that waits for requests uses no processor time.
"""

from __future__ import annotations

import atexit
import json
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from http.client import HTTPConnection, HTTPException
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gguf_weights import write_gguf
from llama_server import kernel_folder, model_arguments, server_command
from protocol import SPECULATIVE, Setup, conversion_name, serve

SYSTEM = Path(sys.prefix).parent / "debian"
"""The Debian system whose package holds the server."""
START_TIMEOUT_S = 60.0


class LlamaCpp:
    """Servers by K, over the same converted weights."""

    def __init__(self, kind: str, setup: Setup) -> None:
        self.setup = setup
        self.target = converted(Path(setup.target), Path(setup.scratch), kind)
        self.draft = None
        if SPECULATIVE in setup.arms:
            self.draft = converted(Path(setup.draft), Path(setup.scratch), kind)
        self.kind = kind
        self.decode_rates: defaultdict[int, list[float]] = defaultdict(list)
        self.servers = {0: Server(self.arguments(0))}

    @property
    def settings(self) -> str:
        text = (
            f"llama-server, {self.setup.threads} threads, {self.kind} weights, "
            f"{self.setup.max_batch} places, prompt cache off"
        )
        rates = [
            f"{'plain' if k == 0 else f'K={k}'} {statistics.median(found):.0f}"
            for k, found in sorted(self.decode_rates.items())
        ]
        if rates:
            text += f", one prompt without prefill by its own clock: {', '.join(rates)} tokens/s"
        return text

    @property
    def versions(self) -> dict[str, str]:
        status = (SYSTEM / "var/lib/dpkg/status").read_text(encoding="utf-8")
        fields = status.partition("\nPackage: llama.cpp-tools\n")[2].partition("\n\n")[0]
        lines = [line for line in fields.splitlines() if line.startswith("Version: ")]
        return {
            "llama.cpp-tools (Debian)": lines[0].removeprefix("Version: "),
            "gguf": version("gguf"),
        }

    def arguments(self, k: int) -> list[str]:
        """What a server is started with, its port left out."""
        return model_arguments(
            self.target,
            self.draft,
            k=k,
            threads=self.setup.threads,
            places=self.setup.max_batch,
            max_context=self.setup.max_context,
        )

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        if k not in self.servers:  # the first call of every K is not counted
            self.servers[k] = Server(self.arguments(k))
        answers = self.servers[k].completed(prompts, max_tokens)
        if len(answers) == 1:
            self.decode_rates[k].append(answers[0]["timings"]["predicted_per_second"])
        return [answer["tokens"] for answer in answers]


class Server:
    """A running llama-server."""

    def __init__(self, arguments: Sequence[str]) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.process = subprocess.Popen(
            server_command(SYSTEM, arguments, port), cwd=kernel_folder(SYSTEM)
        )
        atexit.register(self.stop)
        self.port = port
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not self.is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"llama-server ended with code {self.process.returncode}")
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"llama-server is not ready after {START_TIMEOUT_S:.0f} s")
            time.sleep(0.1)

    def is_ready(self) -> bool:
        """Whether it has loaded its models."""
        try:
            return self.answer("GET", "/health")[0] == 200
        except (OSError, HTTPException):
            return False

    def completed(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Its answers, one per prompt, in the order of the prompts."""
        body = {
            "prompt": prompts,
            "n_predict": max_tokens,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
            "ignore_eos": True,
            "cache_prompt": False,
            "return_tokens": True,
        }
        status, content = self.answer("POST", "/completion", json.dumps(body))
        if status != 200:
            raise RuntimeError(f"llama-server answered {status}: {content}")
        answers = content if isinstance(content, list) else [content]
        return sorted(answers, key=lambda answer: answer["index"])

    def answer(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        """Status and content; over a new connection, because the server closes idle ones."""
        connection = HTTPConnection("127.0.0.1", self.port)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()


def converted(model: Path, scratch: Path, kind: str) -> Path:
    """The model as a GGUF file, made once."""
    file = scratch / "gguf" / f"{conversion_name(model)}-{kind}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        write_gguf(model, unfinished, kind)
        unfinished.rename(file)
    return file


if __name__ == "__main__":
    serve(partial(LlamaCpp, sys.argv[1]))
