"""Faults of heads on the target's hidden states, and a control."""

from __future__ import annotations

from tests.lab.dice import Dice
from tests.lab.heads import (
    HEAD,
    HEAD_TARGET,
    EarlierRows,
    StaleAfterHit,
    eagle3_drafter,
    medusa_drafter,
    trained_medusa,
    without_biases,
)
from tests.lab.laboratory import Lab
from tests.lab.setups import Fault, FaultSetup
from tests.lab.workload import compared, requests

from forerun.drafters.base import Drafter
from forerun.engine.config import Sharing
from forerun.models.base import LanguageModel

__all__ = ["HEADS"]


def of_head(
    lab: Lab,
    dice: Dice,
    drafter: Drafter,
    *,
    target: LanguageModel | None = None,
    num_times: int = 1,
) -> FaultSetup:
    """Requests to the shipped head, every prompt `num_times` times."""
    served = lab.target(HEAD_TARGET if target is None else target)
    sharing: Sharing = "tenant" if num_times > 1 else "none"
    engine = lab.engine(drafter, dice.integer(3, 5), target=served, sharing=sharing)
    asked = requests(lab, dice, count=lab.num_prompts // num_times) * num_times
    return FaultSetup(stages=compared(lab, engine, asked, target=HEAD_TARGET, draft=HEAD))


def as_trained(lab: Lab, dice: Dice) -> FaultSetup:
    """The head as it should be."""
    return of_head(lab, dice, eagle3_drafter(lab), num_times=dice.choice((1, 2)))


def other_layers(lab: Lab, dice: Dice) -> FaultSetup:
    """All layers, or one of them, are taken for their neighbours."""
    layers = [*eagle3_drafter(lab).feature_layers]
    step = dice.choice((-1, 1))
    for place in dice.choice(((0, 1, 2), (1,), (2,))):
        layers[place] += step
    return of_head(lab, dice, eagle3_drafter(lab, tuple(layers)))


def earlier_rows(lab: Lab, dice: Dice) -> FaultSetup:
    """Every row has the hidden states of the row before."""
    return of_head(lab, dice, EarlierRows(eagle3_drafter(lab)))


def wrong_flag(lab: Lab, dice: Dice) -> FaultSetup:
    """A flag of the configuration is read as its opposite."""
    flags = dice.choice(({"norm_before_residual": False}, {"norm_output": True}))
    return of_head(lab, dice, eagle3_drafter(lab, **flags))


def stale_states(lab: Lab, dice: Dice) -> FaultSetup:
    """Every prompt comes again, and is found in the cache with other hidden states."""
    target = StaleAfterHit(lab.model(HEAD_TARGET))
    return of_head(lab, dice, eagle3_drafter(lab), target=target, num_times=2)


def lost_biases(lab: Lab, dice: Dice) -> FaultSetup:
    """A loader drops the biases of Medusa heads."""
    heads, folder = trained_medusa(lab)
    engine = lab.engine(medusa_drafter(lab, without_biases(heads)), 2)
    stages = compared(lab, engine, requests(lab, dice), draft=str(folder))
    return FaultSetup(stages=stages)


MISREAD = "draft_input_feature_mismatch"

HEADS = (
    Fault(
        name="head reads other layers",
        label=MISREAD,
        what="an EAGLE-3 head gets the hidden states of the layers before or after its own",
        varies="K, temperature, which layers",
        inject=other_layers,
    ),
    Fault(
        name="head reads earlier rows",
        label=MISREAD,
        what="every row of an EAGLE-3 head gets the hidden states of the row before",
        varies="K, temperature",
        inject=earlier_rows,
    ),
    Fault(
        name="head with a wrong flag",
        label=MISREAD,
        what="norm_before_residual or norm_output of an EAGLE-3 head is read as its opposite",
        varies="K, temperature, which flag",
        inject=wrong_flag,
    ),
    Fault(
        name="stale states after a prefix hit",
        label="drafter_state_loss",
        what="tokens that are found in the cache come with the hidden states of other tokens",
        varies="K, temperature",
        inject=stale_states,
    ),
    Fault(
        name="Medusa biases lost",
        label=MISREAD,
        what="the biases of Medusa heads are zero in the engine and not in the checkpoint",
        varies="temperature",
        inject=lost_biases,
    ),
    Fault(
        name="head as trained",
        label="healthy",
        what="the shipped EAGLE-3 head, half of the seeds with prompts that come twice",
        varies="K, temperature, prefix hits",
        inject=as_trained,
    ),
)
