"""Faults of the choice of K."""

from __future__ import annotations

from tests.lab.controllers import Oscillating
from tests.lab.device import DRAFT_PACE
from tests.lab.dice import Dice
from tests.lab.laboratory import DRAFT, POOR_DRAFT, Lab
from tests.lab.setups import Fault, FaultSetup
from tests.lab.workload import requests, setup_with_plain_stage

__all__ = ["POLICY"]


def k_too_large(lab: Lab, dice: Dice) -> FaultSetup:
    """Far more is drafted than is accepted."""
    pace = DRAFT_PACE.times(dice.uniform(1.8, 2.6))
    engine = lab.engine(lab.drafter(DRAFT, pace), dice.integer(12, 16))
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def k_too_large_poor(lab: Lab, dice: Dice) -> FaultSetup:
    """The same with a draft that is hardly ever right."""
    engine = lab.engine(lab.drafter(POOR_DRAFT), dice.integer(12, 16))
    asked = requests(lab, dice, temperature=dice.choice((0.9, 1.0, 1.2)))
    return setup_with_plain_stage(lab, engine, asked, POOR_DRAFT)


def k_too_small(lab: Lab, dice: Dice) -> FaultSetup:
    """One token per step of a draft that is nearly always right."""
    pace = DRAFT_PACE.times(dice.uniform(1.0, 3.0))
    drafter = lab.drafter("zoo:code-11m", pace)
    return setup_with_plain_stage(lab, lab.engine(drafter, 1), requests(lab, dice), "zoo:code-11m")


def oscillating(lab: Lab, dice: Dice) -> FaultSetup:
    """K swings between far too large and next to nothing."""
    drafter = lab.drafter()
    high = dice.integer(10, 16)
    controller = Oscillating(drafter.method, dice.integer(0, 1), high, dice.integer(1, 2))
    engine = lab.engine(drafter, high, controller=controller)
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


POLICY = (
    Fault(
        name="K too large",
        label="k_too_large",
        what="K of 12 to 16 where three tokens are accepted at best",
        varies="K, temperature, seconds of a drafted token",
        inject=k_too_large,
    ),
    Fault(
        name="K too large for a poor draft",
        label="k_too_large",
        what="K of 12 to 16 with a draft of other text",
        varies="K, temperature",
        inject=k_too_large_poor,
    ),
    Fault(
        name="K too small",
        label="k_too_small",
        what="K of 1 with a draft that is as good as the target",
        varies="temperature, seconds of a drafted token",
        inject=k_too_small,
    ),
    Fault(
        name="oscillating controller",
        label="adaptive_policy_pathology",
        what="a controller that swings between two K",
        varies="both K, how long it stays, temperature",
        inject=oscillating,
    ),
)
