"""How many threads plain decoding is fastest with: a baseline must be at its best.

A small model waits longer at every barrier between two threads than the second one saves, and where
another process holds a core the wait becomes the whole step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from forerun.bench.compare import Generator
from forerun.sampling.config import SamplingParams

__all__ = ["use_best_threads"]

NUM_TOKENS = 8


def use_best_threads(plain: Generator, text: str, clock: Callable[[], float]) -> float:
    """Let torch use one thread or all of them, whichever decodes faster, in this whole process.

    Returns:
        Seconds per token at that number, prefill included.
    """
    all_threads = torch.get_num_threads()
    seconds: dict[int, float] = {}
    for num_threads in sorted({1, all_threads}):
        torch.set_num_threads(num_threads)
        seconds[num_threads] = seconds_per_token(plain, text, clock)
    best = min(seconds, key=seconds.__getitem__)
    torch.set_num_threads(best)
    return seconds[best]


def seconds_per_token(plain: Generator, text: str, clock: Callable[[], float]) -> float:
    """Of a short completion, the second time it is asked for."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    plain.generate([text], params)
    start_s = clock()
    plain.generate([text], params)
    return (clock() - start_s) / NUM_TOKENS
