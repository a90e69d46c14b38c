"""How many threads plain decoding is fastest with: a baseline must be at its best.

A small model waits longer at every barrier between two threads than the second one saves, and where
another process holds a core the wait becomes the whole step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from forerun.bench.compare import Generator
from forerun.sampling.config import SamplingParams

__all__ = ["on_best_threads"]

Loaded = TypeVar("Loaded", bound=Generator)

NUM_TOKENS = 8


def on_best_threads(
    load: Callable[[int], Loaded],
    text: str,
    clock: Callable[[], float],
    num_threads: int | None = None,
) -> tuple[Loaded, float]:
    """Load with one thread and with all of them, and keep whichever decodes faster.

    A runner may fix its threads when it loads; torch has its own number, which is set for the whole
    process and which a runner may lower while it loads.

    Args:
        load: an engine that decodes plainly, for a number of threads.
        text: what it continues.
        clock: seconds.
        num_threads: the number asked for, if one is: no other is tried then.

    Returns:
        The engine, and its seconds per token, prefill included.
    """
    found: list[tuple[float, int, Loaded]] = []
    candidates = {1, torch.get_num_threads()} if num_threads is None else {num_threads}
    for candidate in sorted(candidates):
        torch.set_num_threads(candidate)
        engine = load(candidate)
        pace_s = seconds_per_token(engine, text, clock)
        found.append((pace_s, torch.get_num_threads(), engine))
    pace_s, num_torch_threads, best = min(found, key=lambda entry: entry[0])
    torch.set_num_threads(num_torch_threads)
    return best, pace_s


def seconds_per_token(plain: Generator, text: str, clock: Callable[[], float]) -> float:
    """Of a short completion, the second time it is asked for."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain.generate([text], params)
    start_s = clock()
    plain.generate([text], params)
    return (clock() - start_s) / NUM_TOKENS
