"""Faults of what the draft is fed: its cache, its weights, its state after a pause."""

from __future__ import annotations

from tests.lab.controllers import Pausing
from tests.lab.dice import Dice
from tests.lab.drafts import ForgetsOnPause, KeepsRejected, MissesBonus
from tests.lab.laboratory import DRAFT, TARGET, Lab
from tests.lab.setups import Fault, FaultSetup
from tests.lab.weights import altered_copy, forgotten
from tests.lab.workload import requests, setup_with_plain_stage

__all__ = ["STATE"]

PADDING = 0
"""Also what separates the texts that both models were trained on."""


def off_by_one(lab: Lab, dice: Dice) -> FaultSetup:
    """A rejected row is taken for its replacement after every partial rejection."""
    drafter = KeepsRejected(lab.draft_model(), lab.model(TARGET).vocab_size)
    return setup_with_plain_stage(lab, lab.engine(drafter, dice.integer(3, 5)), requests(lab, dice))


def missing_bonus(lab: Lab, dice: Dice) -> FaultSetup:
    """A padding row stands for the last drafted token after a full acceptance."""
    drafter = MissesBonus(lab.draft_model(), lab.model(TARGET).vocab_size, PADDING)
    return setup_with_plain_stage(lab, lab.engine(drafter, dice.integer(1, 3)), requests(lab, dice))


def misloaded(lab: Lab, dice: Dice) -> FaultSetup:
    """Part of the draft's matrices are what an initialiser left."""
    seed = dice.integer(0, 1 << 30)
    name = altered_copy(
        DRAFT, lab.folder / f"draft-{seed}", forgotten(dice.uniform(0.4, 0.9), seed)
    )
    engine = lab.engine(lab.drafter(name), dice.integer(2, 4))
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def state_lost(lab: Lab, dice: Dice) -> FaultSetup:
    """After every plain step the draft begins again from the last few tokens."""
    drafter = ForgetsOnPause(lab.draft_model(), lab.model(TARGET).vocab_size, dice.integer(1, 2))
    k = dice.integer(2, 4)
    controller = Pausing(drafter.method, k, dice.integer(8, 11))
    return setup_with_plain_stage(
        lab, lab.engine(drafter, k, controller=controller), requests(lab, dice)
    )


STATE = (
    Fault(
        name="rejected row kept",
        label="kv_position_misalignment",
        what="after a partial rejection the draft's cache has the rejected token's row where its "
        "replacement's should be",
        varies="K, temperature",
        inject=off_by_one,
    ),
    Fault(
        name="bonus row missing",
        label="kv_position_misalignment",
        what="after a full acceptance the draft's cache has padding for the last drafted token",
        varies="K, temperature",
        inject=missing_bonus,
    ),
    Fault(
        name="weights not loaded",
        label="draft_weights_misloaded",
        what="a share of the draft's matrices is as they are initialised",
        varies="K, temperature, which matrices and how many",
        inject=misloaded,
    ),
    Fault(
        name="state lost at pauses",
        label="drafter_state_loss",
        what="after a step without it the draft goes on from the last few tokens only",
        varies="K, temperature, how often it pauses, how many tokens are left",
        inject=state_lost,
    ),
)
