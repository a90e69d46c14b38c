"""The command of llama.cpp's server, from the Debian system of `peers-llamacpp`.

Workers run outside of our environment, so this module needs the standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

__all__ = ["kernel_folder", "model_arguments", "server_command"]


def server_command(system: Path, arguments: Sequence[str], port: int) -> list[str]:
    """What starts a server on a port of this machine.

    Args:
        system: folder of the Debian system; its libraries are newer than the host's.
        arguments: of the server, see `model_arguments`.
        port: where it listens.
    """
    libraries = library_folder(system)
    return [
        str(libraries / "ld-linux-x86-64.so.2"),
        *("--library-path", f"{libraries}:{libraries / 'llama'}"),
        str(system / "usr/bin/llama-server"),
        *arguments,
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


def model_arguments(
    target: Path, draft: Path | None, *, k: int, threads: int, places: int, max_context: int
) -> list[str]:
    """Models of a server, K, threads, and requests at once with the tokens that each may have."""
    arguments = ["-m", str(target), "-t", str(threads), "-np", str(places)]
    arguments += ["-c", str(places * max_context)]
    if k:
        arguments += ["-md", str(draft), "--spec-type", "draft-simple"]
        arguments += ["--spec-draft-n-max", str(k)]
    return arguments


def kernel_folder(system: Path) -> Path:
    """Folder that a server has to run in: it looks there for the processor's kernels."""
    return library_folder(system) / "ggml/backends0"


def library_folder(system: Path) -> Path:
    return system / "usr/lib/x86_64-linux-gnu"
