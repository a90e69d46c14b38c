"""What a worker of the comparison says and hears: one JSON object per line.

The harness writes a setup line, then one line per call; the worker answers each with one line. A
worker runs in its peer's own environment, so this module needs the standard library only. Libraries
like to print: a worker keeps the real standard output for answers and sends everything else to
standard error.

    -> {"target": "...", "draft": "...", "ks": [2, 4], "threads": 2, "max_batch": 8, "arms": [...]}
    <- {"ready": true, "versions": {...}, "settings": "..."}
    -> {"k": 4, "prompts": [[1, 2]], "max_tokens": 128}
    <- {"seconds": 3.2, "tokens": [[5, 6]], "settings": "..."}
    <- {"error": "..."}                              instead, where something failed
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Protocol, TextIO

__all__ = ["PLAIN", "SPECULATIVE", "Peer", "Setup", "conversion_name", "serve", "versions_of"]

PLAIN, SPECULATIVE = "plain", "speculative"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What a worker is to load.

    Attributes:
        target: folder of the target.
        draft: folder of the draft.
        ks: every K that calls may name, besides 0.
        threads: threads of the peer's kernels.
        max_batch: sequences it must take at once.
        max_context: prompt and completion.
        arms: which of PLAIN and SPECULATIVE will be asked for.
        scratch: a folder for converted models, kept between runs.
    """

    target: str
    draft: str
    ks: list[int]
    threads: int
    max_batch: int
    max_context: int
    arms: list[str] = field(default_factory=lambda: [PLAIN, SPECULATIVE])
    scratch: str = "."

    def to_line(self) -> str:
        return json.dumps(asdict(self))


class Peer(Protocol):
    """An engine behind the protocol."""

    @property
    def versions(self) -> dict[str, str]:
        """Version of every package that decides its speed."""

    @property
    def settings(self) -> str:
        """What it was set to, in words; may change with the first calls."""

    def generate(
        self, k: int, prompts: Sequence[Sequence[int]], max_tokens: int
    ) -> list[list[int]]:
        """Greedy continuations of exactly `max_tokens` tokens each, ends of text ignored.

        Args:
            k: tokens drafted per step; 0 decodes plainly.
            prompts: token ids, all of one length.
            max_tokens: new tokens of every prompt.
        """


def versions_of(*packages: str) -> dict[str, str]:
    return {package: version(package) for package in packages}


def conversion_name(model: Path) -> str:
    """Name of a model's converted copy, which changes with its weights."""
    with (model / "model.safetensors").open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()
    return f"{model.name}-{digest[:12]}"


def serve(load: Callable[[Setup], Peer]) -> None:
    """Answer until standard input ends."""
    answers = private_output()
    try:
        peer = load(Setup(**json.loads(sys.stdin.readline())))
        ready = {"ready": True, "versions": peer.versions, "settings": peer.settings}
    except BaseException as error:  # a peer may fail in any way, and the harness must hear of it
        answer(answers, failure(error))
        raise
    answer(answers, ready)
    while line := sys.stdin.readline():
        answer(answers, answered(peer, json.loads(line)))


def answered(peer: Peer, call: dict[str, object]) -> dict[str, object]:
    """The answer to one call; the clock runs around the peer's own call and nothing else."""
    try:
        start_s = time.perf_counter()
        tokens = peer.generate(**call)
        seconds = time.perf_counter() - start_s
        return {"seconds": seconds, "tokens": tokens, "settings": peer.settings}
    except Exception as error:  # noqa: BLE001 (whatever it is, the harness must hear of it)
        return failure(error)


def failure(error: BaseException) -> dict[str, object]:
    traceback.print_exc()
    return {"error": f"{type(error).__name__}: {error}"}


def answer(answers: TextIO, content: dict[str, object]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def private_output() -> TextIO:
    """Standard output for answers alone; whatever else is written to it goes to standard error."""
    kept = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return kept
