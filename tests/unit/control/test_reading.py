"""A drafter that must read the prompt first drafts only where that is expected to pay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec.structs import replace as changed
from tests.records import STEP
from tests.simulated import Tables, World, table

from forerun.control.acceptance import AcceptanceEstimates
from forerun.control.base import RequestState
from forerun.control.config import GoodputConfig
from forerun.control.costs import DrafterTraits, OperatingPoint
from forerun.control.goodput import GoodputController

pytestmark = pytest.mark.usefixtures("unchecked")

READS = {"d": DrafterTraits(reads_text=True)}
PLAIN_S, READ_S = 0.01, 0.0002
COSTS = {"draft": 0.05, "row": 0.1, "overhead": 0.03, "plain_s": PLAIN_S}
LONG, SHORT = 512, 32


def world(alpha: float, *names: str) -> World:
    methods = {name: table(**COSTS) for name in names or ("d",)}
    return World(lambda *_: alpha, methods, noise=0.05, read_s=READ_S)


def controller(*free: str) -> GoodputController:
    return GoodputController(dict.fromkeys(("d", *free)), 8, traits=READS)


def serve(ours: World, fitted: GoodputController, name: str, num_prompt: int, num_output: int):
    """Serve a request; return its drafts by method, and its seconds over those of plain steps."""
    ours.num_prompt, ours.num_output = num_prompt, num_output
    before = len(ours.records)
    seconds = ours.serve(fitted, name)
    drafts = [record.method for record in ours.records[before:] if record.k_budget]
    return drafts, seconds / (num_output * PLAIN_S)


def taught(alpha: float) -> tuple[World, GoodputController]:
    """A controller that knows the drafter from requests with short prompts."""
    ours, fitted = world(alpha), controller()
    for number in range(6):
        serve(ours, fitted, f"r{number}", SHORT, 128)
    return ours, fitted


def test_a_prompt_is_read_where_drafts_save_more_than_that_takes():
    """Reading takes 10 plain steps; with this draft a step saves about a third."""
    ours, fitted = taught(0.6)
    assert serve(ours, fitted, "few", LONG, 16)[0] == []
    drafts, seconds = serve(ours, fitted, "many", LONG, 256)
    assert len(drafts) > 100
    assert seconds < 0.85


def test_the_first_tokens_of_a_short_prompt_are_drafted_as_before():
    ours, fitted = world(0.8), controller()
    assert len(serve(ours, fitted, "r", SHORT, 128)[0]) > 20


def test_an_unknown_useless_drafter_loses_its_share_over_many_long_prompts():
    ours, fitted, num_requests = world(0.0), controller(), 30
    found = [serve(ours, fitted, f"r{number}", LONG, 48) for number in range(num_requests)]
    config = GoodputConfig()
    assert found[0][0] == []
    assert any(drafts for drafts, _ in found)
    lost = sum(seconds for _, seconds in found) / num_requests - 1.0
    assert lost <= config.reading_share + 2 * config.probe_share


def test_without_knowing_that_it_reads_the_drafter_would_lose_more():
    found = []
    for traits in ({}, READS):
        ours, fitted = world(0.0), GoodputController({"d": None}, 8, traits=traits)
        found.append(sum(serve(ours, fitted, f"r{n}", LONG, 48)[1] for n in range(30)) / 30 - 1.0)
    assert found[1] < 0.6 * found[0]


def test_an_unknown_good_drafter_is_found_within_ten_requests():
    ours, fitted = world(0.8), controller()
    found = [serve(ours, fitted, f"r{number}", LONG, 64) for number in range(20)]
    assert all(len(drafts) > 5 for drafts, _ in found[10:])
    assert sum(seconds for _, seconds in found[10:]) < 0.85 * 10


def test_a_drafter_that_reads_nothing_is_tried_first():
    ours, fitted = world(0.8, "d", "free"), controller("free")
    drafts, _ = serve(ours, fitted, "r", LONG, 48)
    assert set(drafts) == {"free"}


def test_a_reader_known_to_be_useless_is_tried_at_the_share_of_probes():
    """Whether another drafter, which need not read, is known does not matter."""
    fitted = controller("free")
    state = RequestState(request_id="new", num_committed=SHORT, max_new=100, temperature=1.0)
    fitted._note_requests([state])
    assert fitted._reading_left == pytest.approx(100 * GoodputConfig().reading_share)
    for _ in range(20):
        fitted.acceptance.observe(changed(STEP, request_id="new", method="d"))
    assert not fitted._is_known(state, "free")
    fitted._reading_left = 0.0
    fitted._note_requests([replace(state, request_id="next")])
    assert fitted._reading_left == pytest.approx(100 * GoodputConfig().probe_share)


def test_a_batch_waits_for_what_one_of_its_requests_reads():
    """The reading that pays for one request alone does not where seven others wait for it."""
    _, fitted = taught(0.6)
    state = RequestState(request_id="new", num_committed=LONG, max_new=60, temperature=1.0)
    times = fitted.costs.times(OperatingPoint.of([state]))
    curve = fitted.acceptance.curve(state, "d", 4)
    assert fitted._may_read(state, "d", times, 1, curve)
    assert not fitted._may_read(replace(state, max_new=8), "d", times, 1, curve)
    many = fitted.costs.times(OperatingPoint.of([state] * 8))
    assert not fitted._may_read(state, "d", many, 8, curve)


def test_reading_is_measured_and_does_not_count_as_drafting():
    ours, fitted = taught(0.6)
    state = ours.states()[0]
    before = fitted.costs.times(OperatingPoint.of([state]))["d"]
    for number in range(4):
        serve(ours, fitted, f"long{number}", LONG, 256)
    times = fitted.costs.times(OperatingPoint.of([state]))["d"]
    assert times.read_s == pytest.approx(READ_S, rel=0.15)
    assert times.chain_s(1) == pytest.approx(before.chain_s(1), rel=0.15)


def test_before_it_is_measured_reading_costs_in_proportion_to_the_target():
    ours, fitted = world(0.6), controller()
    state = ours.states()[0]
    point = OperatingPoint.of([state])
    times = fitted.costs.times(point)["d"]
    assert times.read_s == pytest.approx(0.05 * times.draft_s[0])
    prompt = changed(STEP, num_prefill_rows=100, batch_rows=100, verify_s=50.0)
    fitted.costs.observe_prompt(prompt)
    now = fitted.costs.times(point)["d"]
    assert now.read_s == pytest.approx(0.5 * now.draft_s[0] / now.plain_s)


def test_with_a_profile_too():
    ours = world(0.0)
    fitted = GoodputController({"d": Tables(table(**COSTS))}, 8, traits=READS)
    found = [serve(ours, fitted, f"r{number}", LONG, 48)[1] for number in range(30)]
    assert sum(found) / 30 <= 1.035


def test_the_output_to_come_is_that_of_requests_that_have_ended():
    estimates = AcceptanceEstimates(GoodputConfig(assumed_output=256.0))
    state = RequestState(request_id="r", num_committed=100, max_new=4000, temperature=1.0)
    assert estimates.num_expected(state) == 256.0
    assert estimates.num_expected(replace(state, max_new=40)) == 40.0
    for number in range(300):
        ended = replace(state, request_id=f"r{number}")
        estimates.num_expected(ended)
        estimates.end(replace(ended, num_committed=120))
    fresh = replace(state, request_id="fresh")
    assert estimates.num_expected(fresh) == pytest.approx(20.0, abs=15.0)
    assert estimates.num_expected(replace(fresh, num_committed=400)) == 300.0


def test_probes_that_gained_do_not_make_a_rest_negative():
    """What probes gained is kept; where no probe may read, the next rest is a whole one."""
    fitted = GoodputController({"d": None}, 4, traits=READS)
    ours = World(
        lambda *_: 0.5,
        {"d": table(draft=0.1)},
        seed=1,
        read_s=1e-4,
        num_output=300,
        noise=0.1,
    )
    for number in range(10):
        name = f"r{number}"
        ours.names, ours.lengths = (name,), {name: 100}
        while ours.lengths[name] < 400:
            ours.step(fitted)
            assert ours.decisions.num_left >= 0
