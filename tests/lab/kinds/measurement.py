"""Faults of measurement: nothing is drafted, or the figures are of something else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tests.lab.dice import Dice
from tests.lab.drafts import Broken
from tests.lab.laboratory import Lab
from tests.lab.setups import Fault, FaultRequest, FaultSetup
from tests.lab.workload import compared, requests, sampled, setup_with_plain_stage

from forerun.control.named import FixedController

__all__ = ["MEASUREMENT"]


def not_engaged(lab: Lab, dice: Dice) -> FaultSetup:
    """K of zero, a controller that never drafts, or a draft that cannot be reached."""
    how = dice.choice(("K", "controller", "draft"))
    asked = requests(lab, dice)
    if how == "K":
        return setup_with_plain_stage(lab, lab.engine(lab.drafter(), 0), asked)
    if how == "controller":
        return setup_with_plain_stage(
            lab, lab.engine(lab.drafter(), 4, controller=FixedController(0)), asked
        )
    return setup_with_plain_stage(lab, lab.engine(Broken(), 4), asked)


def chunks_as_tokens(lab: Lab, dice: Dice) -> FaultSetup:
    """A client that counts deliveries."""
    engine = lab.engine(lab.drafter(), dice.integer(2, 4))

    def client(num_tokens: int, num_chunks: int, seconds: float) -> Mapping[str, float]:
        return {"tokens_per_s_client": num_chunks / seconds}

    return FaultSetup(stages=compared(lab, engine, requests(lab, dice)), client=client)


def random_prompts(lab: Lab, dice: Dice) -> FaultSetup:
    """A benchmark that draws its prompts token by token."""
    engine = lab.engine(lab.drafter(), dice.integer(2, 4))
    low, high = dice.choice(((64, 128), (128, 256)))
    first = sampled(dice, max_tokens=lab.num_tokens)
    asked = [
        FaultRequest(
            prompt=tuple(dice.integer(1, 8191) for _ in range(dice.integer(low, high))),
            params=replace(first, seed=dice.integer(0, 1 << 30)),
        )
        for _ in range(lab.num_prompts)
    ]
    return setup_with_plain_stage(lab, engine, asked)


def looping(lab: Lab, dice: Dice) -> FaultSetup:
    """Greedy output of prompts that say one thing over and over."""
    lines = [
        f"    {dice.choice(('self', 'other', 'node'))}.{dice.choice(('add', 'put', 'set'))}"
        f"({dice.choice(('0', 'x', 'None'))})\n"
        for _ in range(lab.num_prompts)
    ]
    texts = [line * dice.integer(12, 20) for line in lines]
    asked = requests(lab, dice, temperature=0.0, texts=texts, max_tokens=2 * lab.num_tokens)
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


MEASUREMENT = (
    Fault(
        name="not engaged",
        label="speculation_not_engaged",
        what="nothing is drafted: K is 0, the controller says so, or the draft fails at once",
        varies="which of the three",
        inject=not_engaged,
    ),
    Fault(
        name="chunks counted as tokens",
        label="measurement_artifact",
        what="the client reports deliveries per second as tokens per second",
        varies="K, temperature",
        inject=chunks_as_tokens,
    ),
    Fault(
        name="random prompts",
        label="unrepresentative_benchmark",
        what="prompts are tokens drawn at random",
        varies="K, temperature, prompt lengths",
        inject=random_prompts,
    ),
    Fault(
        name="looping output",
        label="degenerate_output_inflation",
        what="greedy output that repeats itself",
        varies="K, what is repeated and how often",
        inject=looping,
    ),
)
