"""The profile of an EAGLE-3 head: its passes, its reading of accepted tokens, whole steps."""

from __future__ import annotations

import time

import pytest
from tests import heads, natives, tiny
from tests.unit.doctor.probe.planted import facts

from forerun.engine.config import EngineConfig
from forerun.engine.engine import Engine
from forerun.measure.profile import ProfileCell, ProfileConfig, Quantity
from forerun.measure.rigs import cost_table, measure_pair
from forerun.theory.intervals import Interval

BRIEF = ProfileConfig(
    rows=(1, 2, 4),
    batches=(1, 2),
    contexts=(9, 20),
    drafted=(1, 3),
    read=(1, 8),
    max_pass_rows=16,
    target_error=0.5,
    min_rounds=1,
    budget_s=1e-6,
)


def plain_target():
    return tiny.adapted(tiny.network(num_layers=4))


def native_target():
    return natives.native_model(tiny.network(num_layers=4))


@pytest.mark.parametrize("target_of", [plain_target, native_target], ids=["torch", "native"])
def test_every_time_of_a_head_is_measured(target_of):
    target = target_of()
    drafter = heads.eagle3_drafter(target, heads.eagle3_head(target))
    pair = Engine(
        target=target,
        drafter=drafter,
        tokenizer=tiny.tokenizer(),
        config=EngineConfig(max_batch=2, max_context=target.max_context),
    )
    found = measure_pair(
        pair, (facts("t"), facts("h")), BRIEF, clock=time.perf_counter, notify=lambda n, error: None
    )
    sizes = {q: {m.cell.size for m in found.measured if m.cell.quantity is q} for q in Quantity}
    assert sizes[Quantity.DRAFT_PASS] == {1, 4}
    assert sizes[Quantity.DRAFT_CHAIN] == {1, 3}
    assert sizes[Quantity.DRAFT_READ] == {1, 8}
    assert sizes[Quantity.GREEDY_STEP] == sizes[Quantity.SAMPLED_STEP] == {0, 1, 3}
    assert all(m.seconds.estimate > 0 for m in found.measured if "overhead" not in m.cell.quantity)
    assert target.store.num_free == drafter.model.store.num_free  # every slot was given back


def planted(passes: dict[int, float]) -> dict[ProfileCell, Interval]:
    """A target of 10 ms, chains of 1 ms a token, steps that are their sum and 1 ms."""
    seconds = {
        (Quantity.TARGET_PASS, 1): 0.010,
        (Quantity.TARGET_PASS, 5): 0.010,
        (Quantity.DRAFT_CHAIN, 4): 0.004,
        (Quantity.GREEDY_STEP, 0): 0.010,
        (Quantity.GREEDY_STEP, 4): 0.015,
        **{(Quantity.DRAFT_PASS, size): s for size, s in passes.items()},
    }
    return {
        ProfileCell(quantity=quantity, batch=1, context=9, size=size): Interval(
            estimate=s, low=s, high=s
        )
        for (quantity, size), s in seconds.items()
    }


def test_a_head_is_charged_for_reading_half_of_a_draft_again():
    alone = cost_table(planted({1: 0.001}), sampled=False)
    head = cost_table(planted({1: 0.001, 5: 0.003}), sampled=False)
    assert alone.cycle_s(4, 9) == pytest.approx(0.015)
    assert head.cycle_s(4, 9) == pytest.approx(0.015 + 0.001)  # 2 of 4 tokens, at 0.5 ms
