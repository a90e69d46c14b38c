"""Runs that nothing is wrong with."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.assisted import HeuristicController
from tests.lab.dice import Dice
from tests.lab.laboratory import Lab
from tests.lab.setups import Fault, FaultSetup, Inject
from tests.lab.workload import long_prompts, requests, setup_with_plain_stage

from forerun.drafters.config import SuffixConfig
from forerun.drafters.suffix import SuffixDrafter

__all__ = ["CONTROLS"]


def greedy(lab: Lab, dice: Dice) -> FaultSetup:
    """Temperature 0."""
    engine = lab.engine(lab.drafter(), dice.integer(2, 4))
    return setup_with_plain_stage(lab, engine, requests(lab, dice, temperature=0.0))


def sampled(lab: Lab, dice: Dice) -> FaultSetup:
    """Temperature 1."""
    engine = lab.engine(lab.drafter(), dice.integer(2, 4))
    return setup_with_plain_stage(lab, engine, requests(lab, dice, temperature=1.0))


def filtered(lab: Lab, dice: Dice) -> FaultSetup:
    """Top-p and top-k."""
    top_p, top_k = dice.choice((0.9, 0.95)), dice.choice((20, 50))
    asked = [
        replace(r, params=replace(r.params, top_p=top_p, top_k=top_k)) for r in requests(lab, dice)
    ]
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


def seeded(lab: Lab, dice: Dice) -> FaultSetup:
    """Draft and target share their noise."""
    asked = [
        replace(r, params=replace(r.params, verification="coupled")) for r in requests(lab, dice)
    ]
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


def alone(lab: Lab, dice: Dice) -> FaultSetup:
    """One at a time."""
    engine = lab.engine(lab.drafter(), dice.integer(2, 4), batch=1)
    return setup_with_plain_stage(lab, engine, requests(lab, dice, count=2 * lab.num_prompts // 3))


def five(lab: Lab, dice: Dice) -> FaultSetup:
    """K of 5."""
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), 5), requests(lab, dice))


def far(lab: Lab, dice: Dice) -> FaultSetup:
    """Short and long contexts."""
    texts = [
        *long_prompts(lab, dice, dice.integer(60, 120), lab.num_prompts // 2),
        *long_prompts(lab, dice, dice.integer(350, 500), lab.num_prompts // 2),
    ]
    asked = requests(lab, dice, texts=texts, count=len(texts))
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


def adaptive(lab: Lab, dice: Dice) -> FaultSetup:
    """K that follows acceptance."""
    drafter = lab.drafter()
    k = dice.integer(4, 6)
    engine = lab.engine(drafter, k, controller=HeuristicController(drafter.method, k))
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def suffix(lab: Lab, dice: Dice) -> FaultSetup:
    """Copying from the text so far, where it repeats itself."""
    texts = [text + "\n\n" + text[: len(text) // 2] for text in lab.prompts()]
    drafter = SuffixDrafter(SuffixConfig())
    asked = requests(lab, dice, texts=texts, temperature=dice.choice((0.0, 0.3)))
    return setup_with_plain_stage(lab, lab.engine(drafter, dice.integer(4, 8)), asked, None)


def healthy(name: str, what: str, inject: Inject) -> Fault:
    """A control."""
    return Fault(
        name=name,
        label="healthy",
        what=what,
        varies="K, temperature where it is not named",
        inject=inject,
    )


CONTROLS = (
    healthy("greedy", "temperature 0", greedy),
    healthy("sampled", "temperature 1", sampled),
    healthy("top-p and top-k", "both filters at once", filtered),
    healthy("seeded", "draft and target share their noise", seeded),
    healthy("alone", "one sequence at a time instead of four", alone),
    healthy("K of 5", "more than pays at the last position, but not much", five),
    healthy("short and long contexts", "up to 500 tokens of prompt", far),
    healthy("adaptive", "the heuristic or the confidence controller", adaptive),
    healthy("suffix", "copying from repetitive text", suffix),
)
