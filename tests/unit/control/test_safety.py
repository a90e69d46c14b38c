"""Never slower than plain, whatever is planned and whatever the table says."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.simulated import CAPACITY, Tables, World, best_rate, seconds_of, table

from forerun.control.base import Controller, Plan
from forerun.control.config import SafetyConfig
from forerun.control.fixed import FixedController
from forerun.control.goodput import GoodputController
from forerun.control.safety import SafeController

pytestmark = pytest.mark.usefixtures("unchecked")


def world(alpha: float, **changes) -> World:
    return World(lambda *_: alpha, {"d": table(**changes)}, noise=0.05)


def test_it_is_a_controller():
    assert isinstance(SafeController(FixedController(4)), Controller)


def test_what_is_slower_than_plain_goes_off():
    ours = world(0.0)
    safe = SafeController(FixedController(5, "d"))
    ours.run(safe, 400)
    assert sum(record.k_budget == 0 for record in ours.records) > 0.8 * 400
    first = safe.switches[0]
    assert not first.on
    assert "slower than plain" in first.reason
    assert first.step < 40


def test_what_pays_stays_on_but_for_its_probes():
    ours = world(0.8)
    safe = SafeController(FixedController(5, "d"))
    ours.run(safe, 2000)
    assert safe.num_switches["off"] == 0
    first = 8
    assert 0.004 < (safe.num_probes - first) / 2000 < 0.016
    assert sum(record.k_budget == 0 for record in ours.records) == safe.num_probes


def test_it_is_tried_again_and_stays_once_it_pays():
    ours = World(lambda _, __, step: 0.0 if step < 300 else 0.85, {"d": table()}, noise=0.05)
    safe = SafeController(FixedController(5, "d"))
    ours.run(safe, 1500)
    assert {switch.on for switch in safe.switches} == {False, True}
    assert sum(record.k_budget == 5 for record in ours.records[-300:]) > 250
    assert safe.num_switches.total() == len(safe.switches)


def test_a_wrong_table_costs_little():
    """Drafts cost ten times what the table says."""
    ours = world(0.5, draft=0.5, row=0.1)
    safe = SafeController(GoodputController({"d": Tables(table(draft=0.05))}, 8))
    assert ours.run(safe, 1500) > 0.93 * best_rate(0.0, table())


def test_a_draft_that_goes_and_comes_back_is_followed_within_200_steps():
    ours = World(
        lambda _, __, step: 0.8 if step < 300 or step >= 700 else 0.0, {"d": table()}, noise=0.05
    )
    ours.run(SafeController(GoodputController({"d": Tables(table())}, 8)), 1000)
    ks = [record.k_budget for record in ours.records]
    assert sum(ks[200:300]) > 3 * 100
    assert seconds_of(ours.records[500:700]) < 1.025 * 200 * table().plain_step_s(100)
    assert sum(ks[900:]) > 3 * 100


def test_buckets_are_judged_apart():
    names = [f"r{index}" for index in range(8)]
    safe = SafeController(FixedController(5, "d"))
    crowd = World(lambda *_: 0.3, {"d": table(row=0.5, batches=(1, 8))}, names=names, noise=0.05)
    crowd.run(safe, 200)
    assert not safe.switches[0].on
    alone = World(lambda *_: 0.9, {"d": table()}, noise=0.05)
    alone.run(safe, 200)
    assert {switch.bucket for switch in safe.switches} == {3}
    assert sum(record.k_budget == 5 for record in alone.records) > 150


@pytest.mark.parametrize(("wanted", "num_passed"), [(0, 10), (5, 0)])
def test_where_speculation_is_off_probes_pass_if_nobody_wants_to_draft(wanted, num_passed):
    """Who wants to draft explores beside it, which would be speculation all the same."""

    class Curious(FixedController):
        def decide(self, states, capacity):
            self.asked = getattr(self, "asked", 0) + 1
            if self.asked % 10 == 0:
                return [Plan.chain("d", 3, probe=True)]
            k = 5 if self.asked < 30 else wanted
            return [Plan.chain("d", k) if k else Plan()]

    ours = world(0.0)
    ours.run(SafeController(Curious(5, "d"), SafetyConfig(retry_after=1000)), 300)
    late = ours.records[200:]
    assert sum(record.k_budget == 3 for record in late) == num_passed
    assert not any(record.k_budget == 5 for record in late)


def test_who_is_made_to_decode_plainly_learns_what_plain_steps_take():
    """A plain step is half as long as its table says, so drafts that do not pay seem to."""
    honest = table()
    dear = replace(
        honest, lines=tuple(replace(line, plain_s=2 * line.plain_s) for line in honest.lines)
    )
    goodput = GoodputController({"d": Tables(dear)}, 8)
    ours = world(0.1)
    ours.run(SafeController(goodput), 1000)
    assert goodput.costs.pricing(ours.states()).plain_factor < 0.75


def test_plain_steps_are_measured_although_others_probe_in_between():
    """Each probe would end the run of plain steps; none would then ever be measured again."""

    class Curious(FixedController):
        def decide(self, states, capacity):
            self.asked = getattr(self, "asked", 0) + 1
            return [Plan.chain("d", 5, probe=self.asked % 3 == 0)]

    ours = world(0.8)
    ours.run(SafeController(Curious(5, "d")), 1000)
    assert sum(record.k_budget == 0 for record in ours.records) < 0.1 * 1000


def test_every_switch_is_logged_with_its_reason(caplog):
    with caplog.at_level(logging.INFO, logger="forerun.control"):
        safe = SafeController(FixedController(5, "d"))
        world(0.0).run(safe, 150)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == sum(safe.num_switches.values()) >= 2
    assert lines[0].startswith("speculation off at batch 1 to 1: speedup at most")
    assert any("speculation on" in line and "tried again" in line for line in lines)


def test_steps_beside_a_prefill_are_not_judged():
    ours = world(0.0)
    safe = SafeController(FixedController(5, "d"), SafetyConfig(num_clear=2, num_plain=1))
    for _ in range(50):
        (plan,) = safe.decide(ours.states(), CAPACITY)
        record = ours.record("r", plan, 1.0, 1.0, 1.0)
        safe.observe([changed(record, num_prefill_rows=4)])
    assert not safe.switches


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_goodput_watched_is_not_slower_than_plain(alpha):
    plain = best_rate(0.0, table())
    safe = SafeController(GoodputController({"d": Tables(table())}, 8))
    assert world(alpha).run(safe, 2000) >= 0.97 * plain
