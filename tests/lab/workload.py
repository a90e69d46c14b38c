"""Requests of a run: prompts from modules that neither model was trained on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from tests.lab.dice import Dice
from tests.lab.laboratory import DRAFT, TARGET, Lab
from tests.lab.setups import FaultRequest, FaultSetup, Stage

from forerun.engine.engine import Engine
from forerun.sampling.config import SamplingParams

__all__ = ["compared", "long_prompts", "requests", "sampled", "setup_with_plain_stage"]

NUM_PLAIN = 2
PLAIN_TOKENS = (16, 10)
"""Of the first plain request, and how many more of each further one: so batches thin out."""
Format = Callable[[str], str]


def sampled(dice: Dice, temperature: float | None = None, max_tokens: int = 72) -> SamplingParams:
    """Parameters of one request: a temperature as drawn, noise of its own, a fixed length."""
    if temperature is None:
        temperature = dice.choice((0.6, 0.7, 0.8, 0.9, 1.0))
    return SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        seed=dice.integer(0, 1 << 30),
        ignore_eos=True,
        verification="auto" if temperature == 0 else "block",
    )


def requests(
    lab: Lab,
    dice: Dice,
    *,
    temperature: float | None = None,
    texts: Sequence[str] | None = None,
    count: int | None = None,
    max_tokens: int | None = None,
    tags: tuple[str, ...] = (),
) -> list[FaultRequest]:
    """Different prompts under one temperature.

    Args:
        lab: says how many, and how long.
        dice: draw prompts, the temperature where it is not given, and noise.
        temperature: of all.
        texts: to draw prompts from; None for the shipped ones.
        count: how many; None as the lab says.
        max_tokens: of each; None as the lab says.
        tags: of all.
    """
    chosen = dice.sample(lab.prompts() if texts is None else texts, count or lab.num_prompts)
    first = sampled(dice, temperature, max_tokens or lab.num_tokens)
    return [
        FaultRequest(
            prompt=tuple(lab.tokenizer.encode(text)),
            params=replace(first, seed=dice.integer(0, 1 << 30)),
            tags=tags,
        )
        for text in chosen
    ]


def long_prompts(lab: Lab, dice: Dice, num_tokens: int, count: int) -> list[str]:
    """Modules one behind the other, cut to so many tokens."""
    found = []
    for _ in range(count):
        text = "\n\n".join(dice.sample(lab.prompts(), 8))
        found.append(lab.tokenizer.decode(lab.tokenizer.encode(text)[:num_tokens]))
    return found


def compared(
    lab: Lab,
    engine: Engine,
    asked: Sequence[FaultRequest],
    *,
    target: str = TARGET,
    draft: str | None = DRAFT,
) -> tuple[Stage, ...]:
    """Some of the requests plainly first, then all of them on the engine.

    Args:
        lab: that the engine is of.
        engine: that drafts.
        asked: what it is asked for.
        target: name or folder of its target.
        draft: of its draft.
    """
    num_plain = max(NUM_PLAIN, engine.config.max_batch)
    first, more = PLAIN_TOKENS
    plain = [
        replace(r, params=replace(r.params, max_tokens=first + more * place))
        for place, r in enumerate(asked[:num_plain])
    ]
    return (
        Stage(
            name="plain",
            engine=lab.engine(None, 0, batch=engine.config.max_batch, target=engine.target),
            requests=plain,
            target=target,
            draft=draft,
        ),
        Stage(name="run", engine=engine, requests=asked, target=target, draft=draft),
    )


def setup_with_plain_stage(
    lab: Lab, engine: Engine, asked: Sequence[FaultRequest], draft: str | None = DRAFT
) -> FaultSetup:
    """A plain stage and the run, with nothing else to say."""
    return FaultSetup(stages=compared(lab, engine, asked, draft=draft))
