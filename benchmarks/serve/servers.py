"""Servers over the same weights, each in a process group that can be stopped."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.append(str(Path(__file__).resolve().parents[1] / "peers"))  # benchmarks are scripts
from llama_server import kernel_folder, model_arguments, server_command
from protocol import conversion_name

HERE = Path(__file__).resolve().parent
START_TIMEOUT_S = 400.0
MAX_CONTEXT = 512


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to answer requests.

    Attributes:
        name: in the report.
        server: of `commands`.
        extra: further fields of every request.
    """

    name: str
    server: str
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Models:
    """What every server loads.

    Attributes:
        target: folder.
        draft: folder.
        k: draft tokens per step.
        threads: of the kernels.
        places: requests decoded at once.
        peers: folder of the peers' environments.
        gguf: type of llama.cpp's weights.
        eager: vLLM compiles nothing, for a trial of the script.
    """

    target: Path
    draft: Path
    k: int
    threads: int
    places: int
    peers: Path
    gguf: str = "bf16"
    eager: bool = False

    @property
    def llama_system(self) -> Path:
        """Folder of the Debian system with llama.cpp."""
        return self.peers / "llamacpp" / "debian"


def arms_of(models: Models, peers: Sequence[str]) -> list[Arm]:
    """Return plain decoding and drafting with K by every server, and our controller."""
    fixed = {"num_speculative_tokens": models.k}
    found = [
        Arm(name="forerun plain", server="forerun", extra={"speculation": "off"}),
        Arm(name=f"forerun K={models.k}", server="forerun", extra={"speculation": fixed}),
        Arm(name="forerun auto", server="forerun"),
    ]
    for peer in peers:
        extra = {"cache_prompt": False} if peer == "llama.cpp" else {}
        found.append(Arm(name=f"{peer} plain", server=f"{peer} plain", extra=extra))
        drafting = f"{peer} K={models.k}"
        found.append(Arm(name=drafting, server=drafting, extra=extra))
    return found


def command_of(server: str, models: Models, port: int) -> list[str]:
    """Return what starts a server on a port of this machine."""
    k = models.k if "K=" in server else 0
    if server == "forerun":
        command = [sys.executable, "-m", "forerun", "serve", str(models.target)]
        command += ["--draft", str(models.draft), "--k", str(models.k), "--controller", "auto"]
        command += ["--max-batch", str(models.places), "--max-context", str(MAX_CONTEXT)]
        return [*command, "--threads", str(models.threads), "--port", str(port)]
    if server.startswith("vLLM"):
        command = [sys.executable, str(HERE / "vllm_command.py"), "serve", str(models.target)]
        command += ["--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT)]
        command += ["--max-num-seqs", str(models.places), "--no-enable-prefix-caching"]
        command += ["--enforce-eager"] if models.eager else []
        drafting = {"method": "draft_model", "model": str(models.draft)}
        speculative = json.dumps({**drafting, "num_speculative_tokens": k})
        command += ["--speculative-config", speculative] if k else []
        return [*command, "--host", "127.0.0.1", "--port", str(port)]
    arguments = model_arguments(
        converted(models, models.target),
        converted(models, models.draft) if k else None,
        k=k,
        threads=models.threads,
        places=models.places,
        max_context=MAX_CONTEXT,
    )
    return server_command(models.llama_system, arguments, port)


def converted(models: Models, model: Path) -> Path:
    """Return a model as a GGUF file, which is made once."""
    file = models.peers / "models" / "gguf" / f"{conversion_name(model)}-{models.gguf}.gguf"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        python = models.peers / "llamacpp" / "venv" / "bin" / "python"
        script = HERE.parent / "peers" / "gguf_weights.py"
        subprocess.run([python, script, model, file.with_suffix(".part"), models.gguf], check=True)
        file.with_suffix(".part").rename(file)
    return file


class Server:
    """A running server.

    Args:
        name: of `commands`.
        models: what it loads.
        log: file for what it prints.

    Raises:
        RuntimeError: it ended, or is not ready in time.
    """

    def __init__(self, name: str, models: Models, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        with log.open("w") as out:
            self.process = subprocess.Popen(
                command_of(name, models, self.port),
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=kernel_folder(models.llama_system) if name.startswith("llama.cpp") else None,
                env={**os.environ, "OMP_NUM_THREADS": str(models.threads)},
                start_new_session=True,
            )
        self.url = f"http://127.0.0.1:{self.port}"
        try:
            self._wait(f"{name}, see {log},")
        except BaseException:
            self.end()
            raise
        self.model = httpx.get(self.url + "/v1/models").json()["data"][0]["id"]

    def _wait(self, name: str) -> None:
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self.process.poll() is not None:
                raise RuntimeError(f"{name} ended with {self.process.returncode}")
            if time.monotonic() > ends_s:
                raise RuntimeError(f"{name} is not ready after {START_TIMEOUT_S:g} s")
            time.sleep(0.5)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(self.url + "/health", timeout=5.0).is_success
        except httpx.HTTPError:
            return False

    def signal(self, number: int) -> None:
        """Send a signal to all processes of the server."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let a stopped server run for a while."""
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def end(self) -> None:
        """End all processes of the server."""
        self.signal(signal.SIGCONT)
        self.signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        self.signal(signal.SIGKILL)
        self.process.wait()
