"""Faults of what a step costs."""

from __future__ import annotations

from dataclasses import replace

from tests.lab.device import DRAFT_PACE, TARGET_PACE
from tests.lab.dice import Dice
from tests.lab.laboratory import DRAFT, Lab
from tests.lab.passes import RowByRow
from tests.lab.setups import Fault, FaultSetup
from tests.lab.verdicts import SlowVerifier
from tests.lab.workload import long_prompts, requests, setup_with_plain_stage

__all__ = ["COST"]


def slow_draft(lab: Lab, dice: Dice) -> FaultSetup:
    """Every drafted token takes a large part of a target pass."""
    pace = DRAFT_PACE.times(dice.uniform(7.0, 10.0))
    engine = lab.engine(lab.drafter(DRAFT, pace), dice.integer(2, 4))
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def separate_passes(lab: Lab, dice: Dice) -> FaultSetup:
    """The target takes the rows of a step one by one."""
    pace = TARGET_PACE.times(dice.uniform(0.6, 1.0))
    engine = lab.engine(
        lab.drafter(DRAFT), dice.integer(2, 4), batch=1, target=RowByRow(lab.target(pace=pace))
    )
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def host_sync(lab: Lab, dice: Dice) -> FaultSetup:
    """The engine waits once per emitted token."""
    change_verdict = SlowVerifier(lab.device, TARGET_PACE.pass_s * dice.uniform(0.15, 0.3))
    engine = lab.engine(lab.drafter(), dice.integer(2, 4), change_verdict=change_verdict)
    return setup_with_plain_stage(lab, engine, requests(lab, dice))


def busy_batch(lab: Lab, dice: Dice) -> FaultSetup:
    """A batch whose plain rows alone keep the device busy."""
    batch = dice.integer(6, 8)
    pace = replace(TARGET_PACE, free_rows=batch * dice.uniform(0.15, 0.3))
    engine = lab.engine(
        lab.drafter(), dice.integer(3, 5), batch=batch, target=lab.target(pace=pace)
    )
    texts = long_prompts(lab, dice, dice.integer(16, 32), batch * max(1, lab.num_prompts // 5))
    asked = requests(lab, dice, texts=texts, count=len(texts))
    return setup_with_plain_stage(lab, engine, asked)


def long_context(lab: Lab, dice: Dice) -> FaultSetup:
    """A kernel that reads the cache once per row."""
    pace = replace(TARGET_PACE, context_s=TARGET_PACE.pass_s * dice.uniform(1.0, 1.5) / 1000)
    texts = [
        *long_prompts(lab, dice, dice.integer(40, 80), lab.num_prompts // 3),
        *long_prompts(lab, dice, dice.integer(380, 480), lab.num_prompts // 3),
    ]
    asked = requests(lab, dice, texts=texts, count=len(texts))
    engine = lab.engine(lab.drafter(), dice.integer(3, 5), batch=2, target=lab.target(pace=pace))
    return setup_with_plain_stage(lab, engine, asked)


def prefill_only(lab: Lab, dice: Dice) -> FaultSetup:
    """Long prompts, a few tokens of output."""
    pace = replace(TARGET_PACE, free_rows=16.0)
    texts = long_prompts(lab, dice, dice.integer(300, 450), lab.num_prompts)
    asked = requests(lab, dice, texts=texts, count=len(texts), max_tokens=dice.integer(5, 10))
    engine = lab.engine(lab.drafter(), dice.integer(2, 4), target=lab.target(pace=pace))
    return setup_with_plain_stage(lab, engine, asked)


COST = (
    Fault(
        name="slow draft",
        label="draft_too_slow",
        what="a drafted token takes a third to a half of a target pass",
        varies="K, temperature, how slow",
        inject=slow_draft,
    ),
    Fault(
        name="separate passes",
        label="verify_not_parallel",
        what="the rows of a verifying pass are taken one by one",
        varies="K, temperature, seconds of a pass",
        inject=separate_passes,
    ),
    Fault(
        name="host sync per token",
        label="engine_overhead",
        what="a wait per emitted token between the pass and the commit",
        varies="K, temperature, how long it waits",
        inject=host_sync,
    ),
    Fault(
        name="busy batch",
        label="compute_bound_batch",
        what="a device on which the plain batch takes all the rows that are free",
        varies="K, temperature, batch, free rows",
        inject=busy_batch,
    ),
    Fault(
        name="cache read per row",
        label="long_context_kv_cost",
        what="a pass takes time for every cached token and row",
        varies="K, temperature, prompt lengths, how much time",
        inject=long_context,
    ),
    Fault(
        name="prefill only",
        label="prefill_dominated",
        what="long prompts with outputs of a few tokens",
        varies="K, temperature, lengths of both",
        inject=prefill_only,
    ),
)
