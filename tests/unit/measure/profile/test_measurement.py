"""The whole measurement on a planted machine: what was planted must come out."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.doctor.probe.planted import COMMIT_S, SMALL, Clock, Costs, facts, planted_pair

from forerun.errors import NotEnoughMemory
from forerun.measure.profile import Profile, Quantity
from forerun.measure.rigs import Stopwatch, measure_pair, rigs
from forerun.theory.splitmix import INCREMENT, MASK, finalise

BRIEF = replace(SMALL, min_rounds=1, budget_s=1e-9)
# Steps run on at slightly longer contexts than passes, and after full acceptance the draft reads
# one row more: with costs as small as these neither shows.
PASS_S, ROW_S, CACHED_S = 0.010, 0.001, 1e-8
CHAIN_S, CHAIN_TOKEN_S = 0.0004, 0.0006


def target_costs(**changes) -> Costs:
    return Costs(pass_s=PASS_S, row_s=ROW_S, cached_s=CACHED_S, **changes)


def draft_costs(**changes) -> Costs:
    return Costs(pass_s=0.0008, row_s=1e-8, chain_s=CHAIN_S, chain_token_s=CHAIN_TOKEN_S, **changes)


def profile_of(target: Costs, draft: Costs, config=SMALL, notify=lambda rounds, error: None):
    clock = Clock()
    pair = planted_pair(clock, target, draft)
    both = facts("target"), facts("draft")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forerun.engine.step.time", SimpleNamespace(monotonic=clock))
        return measure_pair(pair, both, config, clock=clock, notify=notify)


def jitter(count: int) -> float:
    """Up to 6% either way, mostly less, in no pattern a round could follow."""
    bits = finalise(count * INCREMENT & MASK)
    return 1 + 0.06 * ((bits >> 32) / 2**32 - (bits & 0xFFFFFFFF) / 2**32)


def planted_pass_s(batch, context, rows):
    return PASS_S + ROW_S * batch * rows + CACHED_S * batch * context


@pytest.fixture(scope="module")
def exact() -> Profile:
    """Without noise."""
    return profile_of(target_costs(), draft_costs())


@pytest.fixture(scope="module")
def noisy() -> Profile:
    config = replace(SMALL, min_rounds=11, target_error=0.5)
    return profile_of(target_costs(noise=jitter), draft_costs(noise=jitter), config)


def test_every_pass_is_found(exact):
    passes = [m for m in exact.measured if m.cell.quantity is Quantity.TARGET_PASS]
    assert len(passes) == 2 * (len(SMALL.rows) * 2)
    for m in passes:
        expected = planted_pass_s(m.cell.batch, m.cell.context, m.cell.size)
        assert m.seconds.estimate == pytest.approx(expected, rel=1e-6)


def test_what_reading_costs_is_found(exact):
    assert exact.reading is not None
    assert exact.reading.tokens == SMALL.read
    for size, seconds in zip(SMALL.read, exact.reading.target_s, strict=True):
        assert seconds == pytest.approx(planted_pass_s(1, SMALL.contexts[0], size), rel=1e-6)
    assert exact.reading.target_more_s(16) == pytest.approx(15 * ROW_S, rel=1e-6)


@pytest.mark.parametrize(("pass_s", "num_warm"), [(0.010, 4), (0.0025, 8), (1e-4, 16)])
def test_short_steps_are_warmed_up_for_longer(pass_s, num_warm):
    clock, target = Clock(), Costs(pass_s=pass_s, row_s=0.0)
    pair = planted_pair(clock, target, draft_costs())
    rig = rigs(pair, SMALL, Stopwatch(clock, pair.target.device))[-1]
    plain = next(cell for cell in rig.cells if cell.size == 0)
    before = target.count
    (found, *_) = rig.visit(plain).values()
    assert target.count - before == 1 + num_warm + len(found)


def test_reading_is_not_measured_where_nobody_wants_it():
    found = profile_of(target_costs(), draft_costs(), replace(BRIEF, read=()))
    assert found.reading is None
    written = json.loads(json.dumps(found.to_dict()))
    kept = Profile.from_dict(written)
    assert kept.reading is None
    assert json.loads(json.dumps(kept.to_dict())) == written


def test_plain_steps_draft_and_overhead_are_found(exact):
    for line in exact.greedy.lines:
        plain_s = planted_pass_s(line.batch, line.context, 1) + line.batch * COMMIT_S
        assert line.plain_s == pytest.approx(plain_s, rel=3e-3)
        # A chain's own start and both models' commits come once per cycle.
        assert line.draft_s == pytest.approx(line.batch * CHAIN_TOKEN_S, rel=3e-3)
        rest_s = CHAIN_S + line.batch * 2 * COMMIT_S
        assert line.overhead_ks == SMALL.drafted
        assert line.overhead_s == pytest.approx([rest_s] * 2, rel=3e-3)


def test_sampled_tokens_are_drafted_by_single_passes(exact):
    for line in exact.sampled.lines:
        assert line.draft_s == pytest.approx(0.0008, rel=3e-3)
        # Steps are timed a few tokens further on, at CACHED_S each, than passes are.
        commits_s = line.batch * 2 * COMMIT_S
        assert line.overhead_s == pytest.approx([commits_s] * 2, rel=3e-3, abs=16 * CACHED_S)


def test_a_pass_among_other_work_is_counted_in_the_step():
    """Every pass of the target that follows one of the draft takes longer, as in no pass alone."""
    target, draft = target_costs(), draft_costs()
    seen = {"draft": 0}

    def after_draft(count):
        late = draft.count > seen["draft"]
        seen["draft"] = draft.count
        return 1.2 if late else 1.0

    target.noise = after_draft
    found = profile_of(target, draft, replace(SMALL, min_rounds=4))
    line = found.greedy.lines[0]
    cycle_s = CHAIN_S + 3 * CHAIN_TOKEN_S + 1.2 * planted_pass_s(1, 9, 4) + 2 * COMMIT_S
    assert found.greedy.cycle_s(3, line.context, 1) == pytest.approx(cycle_s, rel=3e-3)
    assert line.plain_s == pytest.approx(planted_pass_s(1, 9, 1) + COMMIT_S, rel=3e-3)


def test_kappa_is_the_time_of_a_planted_cycle(exact):
    k, batch, context = 3, 3, 40
    cycle_s = (
        CHAIN_S
        + k * batch * CHAIN_TOKEN_S
        + planted_pass_s(batch, context, k + 1)
        + batch * 2 * COMMIT_S
    )
    assert exact.greedy.cycle_s(k, context, batch) == pytest.approx(cycle_s, rel=3e-3)


def test_a_steady_machine_is_done_as_soon_as_there_are_intervals(exact):
    assert exact.stable
    # Six samples are needed: a visit times two passes, or six steps.
    assert exact.num_rounds == 3


def test_planted_times_lie_in_the_intervals_of_a_noisy_machine(noisy):
    passes = [m for m in noisy.measured if m.cell.quantity is Quantity.TARGET_PASS]
    hits = 0
    for m in passes:
        planted = planted_pass_s(m.cell.batch, m.cell.context, m.cell.size)
        hits += m.seconds.low <= planted <= m.seconds.high
        # The median of 22 samples of this noise has a standard error of 0.64%: five of them.
        assert m.seconds.estimate == pytest.approx(planted, rel=0.032)
        assert m.seconds.high > m.seconds.low
    assert hits >= 0.85 * len(passes)


def test_kappa_of_a_noisy_machine_lies_in_its_interval(noisy, exact):
    for k in (1, 3):
        for line in noisy.greedy.lines:
            found = noisy.greedy.cycle_cost_interval(k, line.context, line.batch)
            planted = exact.greedy.cycle_cost(k, line.context, line.batch)
            assert found.low <= planted <= found.high
            assert found.high - found.low < 0.2 * planted


def test_a_machine_that_slows_down_half_way_keeps_its_ratios(exact):
    slow = []

    def weather(count):
        return 1.8 if slow else 1.0

    def turn(rounds, error):
        if rounds == 4:
            slow.append(True)

    found = profile_of(
        target_costs(noise=weather), draft_costs(noise=weather), replace(SMALL, min_rounds=7), turn
    )
    for rows in SMALL.rows:
        v = found.greedy.verify_cost(rows, 40, 3)
        assert v == pytest.approx(exact.greedy.verify_cost(rows, 40, 3), rel=0.005)


def test_an_unsteady_machine_stops_at_its_budget():
    told = []
    config = replace(SMALL, contexts=(9,), target_error=1e-6, budget_s=16.0)
    found = profile_of(
        target_costs(noise=jitter),
        draft_costs(noise=jitter),
        config,
        notify=lambda rounds, error: told.append((rounds, error)),
    )
    assert not found.stable
    assert 6 <= found.num_rounds == len(told) < 50
    assert [rounds for rounds, _ in told] == list(range(1, len(told) + 1))
    assert told[0][1] == math.inf
    assert 1e-6 < told[-1][1] < 0.1


def test_passes_that_do_not_fit_are_left_out_with_one_warning(caplog):
    with caplog.at_level(logging.WARNING, logger="forerun.measure"):
        found = profile_of(target_costs(fits=lambda rows: rows != 24), draft_costs(), BRIEF)
    assert len(caplog.records) == 1
    assert caplog.records[0].message.startswith("2 of")
    assert {(c.batch, c.size) for c in found.left_out} == {(3, 8)}
    lines = {(line.batch, line.context): line.rows for line in found.greedy.lines}
    assert lines[1, 9] == (1, 2, 4, 8)
    assert lines[3, 9] == lines[3, 40] == (1, 2, 4)


def test_a_batch_that_does_not_fit_at_all_goes_altogether(caplog):
    # Prompts of the engine steps and chunks of the prefix are passes of many rows; only three
    # sequences of one row each are refused.
    costs = target_costs(fits=lambda rows: rows != 3)
    with caplog.at_level(logging.WARNING, logger="forerun.measure"):
        found = profile_of(costs, draft_costs(), replace(BRIEF, rows=(1, 2), drafted=(1,)))
    assert found.greedy.batches == (1,)
    assert len(caplog.records) == 1
    assert all(c.batch == 3 for c in found.left_out)


def test_a_machine_too_small_for_anything_says_so():
    with pytest.raises(NotEnoughMemory, match="target pass of size 1 at batch 1"):
        profile_of(target_costs(fits=lambda rows: rows != 1), draft_costs())


def test_other_failures_are_not_taken_for_lack_of_memory():
    def broken(rows):
        if rows == 2:
            raise RuntimeError("a kernel misbehaves")
        return True

    with pytest.raises(RuntimeError, match="misbehaves"):
        profile_of(target_costs(fits=broken), draft_costs())


def test_every_slot_is_given_back():
    clock = Clock()
    pair = planted_pair(clock, target_costs(), draft_costs())
    free = pair.target.store.num_free, pair.drafter.model.store.num_free
    measure_pair(
        pair, (facts("t"), facts("d")), BRIEF, clock=clock, notify=lambda rounds, error: None
    )
    assert (pair.target.store.num_free, pair.drafter.model.store.num_free) == free


def test_threads_of_the_passes_are_on_record():
    clock = Clock()
    pair = planted_pair(clock, target_costs(), draft_costs())
    pair.config = replace(pair.config, num_threads=3)  # torch has another number
    both = (facts("t"), facts("d"))
    found = measure_pair(pair, both, BRIEF, clock=clock, notify=lambda rounds, error: None)
    assert (found.setup.num_threads, found.provenance["num_threads"]) == (3, 3)


def test_everything_is_kept_in_the_file(exact):
    values = json.loads(json.dumps(exact.to_dict()))
    again = Profile.from_dict(values)
    assert again.to_dict() == exact.to_dict()
    assert again.greedy == exact.greedy
    assert again.setup == exact.setup
    assert all(len(m.samples_s) == exact.num_rounds for m in again.measured)
    assert values["provenance"]["models"] == {
        "target": "hash of target",
        "draft": "hash of draft",
    }
    assert {"torch", "transformers"} <= values["provenance"]["packages"].keys()
