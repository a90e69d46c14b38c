"""Prompts cut to where greedy text begins to loop.

Looping text flatters every drafter, and a small model's greedy text often ends in a loop. One
batched run of plain decoding finds where each completion first repeats itself; the comparison stops
there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from forerun.bench.compare import Generator, Prompt
from forerun.bench.config import SCOUT_BATCH
from forerun.sampling.config import SamplingParams
from forerun.theory.text import first_repeat

__all__ = ["MIN_TOKENS", "scouted"]

MIN_TOKENS = 16
"""Shorter completions time little but the prefill; their prompts are passed over."""


def scouted(plain: Generator, texts: Sequence[str], params: SamplingParams) -> Iterator[Prompt]:
    """Prompts whose `max_tokens` ends before the first repeated 32-gram of the plain completion.

    Lazy: a batch is decoded when its first prompt is asked for.

    Args:
        plain: decodes without a draft.
        texts: prompts.
        params: greedy parameters with `max_tokens` set.
    """
    for start in range(0, len(texts), SCOUT_BATCH):
        batch = texts[start : start + SCOUT_BATCH]
        for text, output in zip(batch, plain.generate(batch, params), strict=True):
            length = first_repeat(output.token_ids)
            if length >= MIN_TOKENS:
                yield Prompt(text=text, params=replace(params, max_tokens=length))
