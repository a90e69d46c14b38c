"""The harness's end of a worker: start it in its own environment, ask it, measure its idling."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
from protocol import PLAIN, SPECULATIVE, Setup

__all__ = ["KINDS", "Answer", "Kind", "Worker", "WorkerFailed"]

HERE = Path(__file__).parent
STOP_TIMEOUT_S = 10.0


class WorkerFailed(Exception):
    """A peer could not be started, or one of its calls failed; the message says how."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """How a peer is run.

    Attributes:
        script: its worker, and the worker's arguments.
        environment: folder of its virtual environment below build/peers; None for our own.
        arms_per_worker: arms that share one process.
        one_k: whether a worker that drafts has a single K, so that every K needs its own.
        batched_arms: arms that take several prompts at once.
        draft: what it drafts with instead of the draft that all peers share; None: that draft.
    """

    script: tuple[str, ...]
    environment: str | None = None
    arms_per_worker: tuple[tuple[str, ...], ...] = ((PLAIN, SPECULATIVE),)
    one_k: bool = False
    batched_arms: tuple[str, ...] = (PLAIN, SPECULATIVE)
    draft: str | None = None

    def command(self, peers: Path) -> list[str]:
        """What starts a worker."""
        python = sys.executable
        if self.environment is not None:
            python = str(peers / self.environment / "bin" / "python")
        name, *arguments = self.script
        return [python, str(HERE / name), *arguments]

    def setups(self, setup: Setup) -> list[Setup]:
        """What each of its workers is to load."""
        setup = replace(setup, draft=self.draft or setup.draft)
        found = []
        for arms in self.arms_per_worker:
            alone = self.one_k and SPECULATIVE in arms
            for ks in [[k] for k in setup.ks] if alone else [setup.ks]:
                found.append(replace(setup, arms=list(arms), ks=ks))
        return found

    def variables(self, peers: Path, threads: int) -> dict[str, str]:
        """Its environment variables: no network, and every core for its kernels."""
        variables = {
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        if self.environment == "vllm":
            root = peers / self.environment
            libraries = [
                *root.glob("tcmalloc/**/libtcmalloc_minimal.so.4"),
                *root.glob("lib/libiomp5.so"),
            ]
            variables |= {
                "LD_PRELOAD": ":".join(map(str, libraries)),
                "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
                "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
            }
        return variables


KINDS = {
    "forerun": Kind(script=("worker_forerun.py",)),
    "transformers": Kind(script=("worker_transformers.py",), batched_arms=(PLAIN,)),
    "openvino": Kind(script=("worker_openvino.py",), environment="openvino"),
    "vllm": Kind(
        script=("worker_vllm.py",),
        environment="vllm",
        arms_per_worker=((PLAIN,), (SPECULATIVE,)),
        one_k=True,
    ),
    "llamacpp-f16": Kind(script=("worker_llamacpp.py", "f16"), environment="llamacpp/venv"),
    "llamacpp-bf16": Kind(script=("worker_llamacpp.py", "bf16"), environment="llamacpp/venv"),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One call: seconds inside the worker, the tokens of every prompt, its settings in words."""

    seconds: float
    tokens: list[list[int]]
    settings: str


class Worker:
    """A running worker.

    Args:
        command: what to run.
        variables: added to this process's environment.
        setup: what it is to load.
        log: where its standard error goes.
    """

    def __init__(
        self, command: Sequence[str], variables: Mapping[str, str], setup: Setup, log: Path
    ) -> None:
        self.log = log
        self.setup = setup
        self.stopped_at_s: float | None = None
        try:
            with log.open("w") as errors:
                self.process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env={**os.environ, **variables},
                )
        except OSError as error:
            raise WorkerFailed(f"cannot be started: {error}") from error

    def begin(self) -> None:
        """Let it load; it answers with versions and settings when it has."""
        self.send(self.setup.to_line())

    def call(self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int) -> Answer:
        """Let it generate with K drafted tokens per step, or plainly where K is 0."""
        self.send(json.dumps({"k": k, "prompts": prompts, "max_tokens": max_tokens}))
        return Answer(**self.receive())

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        except OSError as error:
            raise WorkerFailed(self.epitaph()) from error

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WorkerFailed(self.epitaph())
        content: dict[str, Any] = json.loads(line)
        if "error" in content:
            raise WorkerFailed(f"{content['error']} (see {self.log})")
        return content

    def epitaph(self) -> str:
        return f"ended with code {self.process.wait()} (see {self.log})"

    def suspend(self) -> None:
        """Stop it and its children where they are: waiting threads of many libraries spin."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        self.stopped_at_s = self.cpu_s()

    def resume(self) -> float:
        """Let them go on.

        Returns:
            Processor seconds they used while stopped.
        """
        used_s = 0.0 if self.stopped_at_s is None else self.cpu_s() - self.stopped_at_s
        self.stopped_at_s = None
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return used_s

    def cpu_s(self) -> float:
        """Processor seconds it and its children have used."""
        total = 0.0
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def processes(self) -> list[psutil.Process]:
        """It and its children, as far as they still run."""
        try:
            own = psutil.Process(self.process.pid)
            return [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End it, politely first."""
        assert self.process.stdin is not None
        self.resume()
        with suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
