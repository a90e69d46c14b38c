"""Faults of the acceptance rule."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.dice import Dice
from tests.lab.laboratory import DRAFT, TARGET, Lab
from tests.lab.setups import Fault, FaultSetup
from tests.lab.verdicts import LenientVerifier, WrongRecord, unclipped_residual
from tests.lab.workload import requests, setup_with_plain_stage

__all__ = ["DISTRIBUTION"]


def wrong_record(lab: Lab, dice: Dice) -> FaultSetup:
    """q at another temperature than that of the draws."""
    factor = dice.choice((dice.uniform(0.4, 0.6), dice.uniform(1.6, 2.2)))
    drafter = WrongRecord(lab.draft_model(DRAFT), lab.model(TARGET).vocab_size, factor)
    temperature = dice.choice((0.8, 0.9, 1.0))
    asked = requests(lab, dice, temperature=temperature)
    return setup_with_plain_stage(lab, lab.engine(drafter, dice.integer(2, 4)), asked)


def wrong_residual(lab: Lab, dice: Dice) -> FaultSetup:
    """The token after a rejection comes from |p - q|."""
    temperature = dice.choice((0.8, 0.9, 1.0))
    engine = lab.engine(lab.drafter(), dice.integer(2, 4), change_verdict=unclipped_residual)
    return setup_with_plain_stage(lab, engine, requests(lab, dice, temperature=temperature))


def lenient(lab: Lab, dice: Dice) -> FaultSetup:
    """Some rejected tokens pass."""
    temperature = dice.choice((0.8, 0.9, 1.0))
    change_verdict = LenientVerifier(dice.uniform(0.3, 0.6))
    engine = lab.engine(lab.drafter(), dice.integer(2, 4), change_verdict=change_verdict)
    return setup_with_plain_stage(lab, engine, requests(lab, dice, temperature=temperature))


def exact_match(lab: Lab, dice: Dice) -> FaultSetup:
    """Drafts count only where the target's own draw equals them."""
    asked = requests(lab, dice, temperature=dice.choice((0.9, 1.0, 1.1)))
    asked = [replace(r, params=replace(r.params, verification="walk")) for r in asked]
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


def greedy_draft(lab: Lab, dice: Dice) -> FaultSetup:
    """The draft is greedy although the target samples."""
    asked = requests(lab, dice, temperature=dice.choice((0.9, 1.0, 1.1)))
    asked = [
        replace(r, params=replace(r.params, draft_temperature=0.0, verification="auto", seed=None))
        for r in asked
    ]
    return setup_with_plain_stage(lab, lab.engine(lab.drafter(), dice.integer(2, 4)), asked)


DISTRIBUTION = (
    Fault(
        name="q of another temperature",
        label="sampling_mismatch_q",
        what="the proposal carries the draft probabilities of another temperature",
        varies="K, temperature, the factor between the two",
        inject=wrong_record,
    ),
    Fault(
        name="residual not clipped",
        label="biased_accept_rule",
        what="the token after a rejection is drawn from |p - q|",
        varies="K, temperature",
        inject=wrong_residual,
    ),
    Fault(
        name="lenient acceptance",
        label="biased_accept_rule",
        what="a share of the rejected tokens is accepted after all",
        varies="K, temperature, the share",
        inject=lenient,
    ),
    Fault(
        name="exact match at T > 0",
        label="suboptimal_accept_rule",
        what="requests ask for verification by comparing with the target's own draw",
        varies="K, temperature",
        inject=exact_match,
    ),
    Fault(
        name="greedy draft at T > 0",
        label="suboptimal_accept_rule",
        what="requests ask for a draft temperature of 0",
        varies="K, temperature",
        inject=greedy_draft,
    ),
)
