"""Probes and explorers: how often, how many, and what ends them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.control.base import Chain, Plan
from forerun.control.beliefs import UnreadText
from forerun.control.config import GoodputConfig
from forerun.control.exploration import (
    EAGER,
    LEAST_LOSS,
    LEAST_NEED,
    LEAST_TEXT,
    MOST_CREDIT,
    MOST_LOSS,
    NUM_LOSSES,
    PROBE_DEPTH,
    REVIVAL,
    Exploration,
)

PLAIN = Plan()

QUIET = GoodputConfig(explore=0.0, probe_share=0.1)
DRAFTS = Plan.chain("d", 3)


def texts(*missed: int, tokens: int = LEAST_TEXT, kind: str = "k") -> Callable[[int], UnreadText]:
    """Requests with as much output that is new, and so much that their draft has not read."""
    return [UnreadText(kind, tokens, each) for each in missed].__getitem__


JUST_READ = texts(0)
PAYS = {"came": 1.0, "needed": 0.5}
FAILS = {"came": 0.0, "needed": 0.5}
JUST_PAYS = {"came": 0.5, "needed": 0.5}
"""The share stays as it is."""


def probes(
    exploration: Exploration, num_steps: int, loss: float, *, pays: bool = False
) -> list[int]:
    """Steps that probed, each of which lost so much."""
    steps = []
    for step in range(num_steps):
        (plan,) = exploration.varied([PLAIN], [9], JUST_READ, ["d"], 9)
        if plan.num_speculative_tokens:
            assert plan.probe
            assert plan.num_speculative_tokens == PROBE_DEPTH
            steps.append(step)
            exploration.observe("d", loss, came=float(pays), needed=0.5)
    return steps


@pytest.mark.parametrize("loss", [0.05, 0.5, 5.0])
def test_probes_cost_no_more_than_their_share(loss):
    exploration = Exploration(QUIET)
    probes(exploration, 100, loss)  # no longer eager
    num_steps = 2000
    spent = loss * len(probes(exploration, num_steps, loss))
    assert spent <= 0.1 * num_steps + loss
    if loss > 0.1:  # else every other step probes
        assert spent >= 0.08 * num_steps


def test_a_probe_is_paid_for_before_the_next_and_the_share_that_pays_halves():
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=1 / 16))
    first, second, *rest = probes(exploration, 80, loss=1.0)
    assert (first, second) == (0, pytest.approx(2 / EAGER, abs=1))
    waits = [after - before for before, after in pairwise([second, *rest])]
    assert waits == pytest.approx([16] * len(rest), abs=1)  # less than a step is carried over
    assert len(rest) > 2


def test_a_probe_that_pays_is_followed_by_the_next_at_once():
    assert probes(Exploration(QUIET), 8, loss=0.7, pays=True) == list(range(8))


def test_a_step_that_was_held_up_does_not_end_all_probing():
    exploration = Exploration(QUIET)
    exploration.observe("d", 1000.0, **FAILS)
    assert probes(exploration, 100, loss=0.5)


@given(st.lists(st.tuples(st.integers(-8, 80), st.booleans()), max_size=20))
def test_what_is_charged_is_the_median_of_the_last_losses(seen):
    """Seen in how long is to be waited; of an even number it is the middle of the two."""
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=EAGER))  # no other share
    capped: list[float] = []
    debt = 0.0
    for eighths, pays in seen:
        exploration.observe("d", eighths / 8, came=float(pays), needed=0.5)
        capped.append(min(eighths / 8, MOST_LOSS))
        last = sorted(capped[-NUM_LOSSES:])
        debt += max(LEAST_LOSS, (last[(len(last) - 1) // 2] + last[len(last) // 2]) / 2)
        wait = max(1, math.ceil(max(0.0, debt) / EAGER))
        assert exploration.rest([PLAIN], [9], 10**6) == wait


@pytest.mark.parametrize("held_up", [MOST_LOSS, 1000.0])
def test_two_steps_of_five_that_were_held_up_are_charged_nothing_for_it(held_up):
    exploration, even = (
        Exploration(GoodputConfig(explore=0.0, probe_share=EAGER)) for _ in range(2)
    )
    for loss in (0.5, 0.5, 0.5, held_up, held_up, 0.5, 0.5):
        exploration.observe("d", loss, **FAILS)
        even.observe("d", 0.5, **FAILS)
        rests = [each.rest([PLAIN], [9], 10**6) for each in (exploration, even)]
        assert rests[0] == rests[1]
    for _ in range(3):
        exploration.observe("d", held_up, **FAILS)
        even.observe("d", 0.5, **FAILS)
    assert exploration.rest([PLAIN], [9], 10**6) > even.rest([PLAIN], [9], 10**6)


def asked(exploration: Exploration, *tokens: int, plans: list[Plan] | None = None) -> list[int]:
    """Who probes."""
    news = [UnreadText("k", each, at) for at, each in enumerate(tokens)].__getitem__
    plans = plans or [PLAIN] * len(tokens)
    varied = exploration.varied(plans, [9] * len(tokens), news, ["d"], 20)
    assert (varied is plans) == (not exploration.probed and exploration.explored is None)
    return exploration.probed


def test_a_probe_waits_for_text_to_look_back_at():
    exploration = Exploration(QUIET)
    for tokens in range(1, LEAST_TEXT):
        assert asked(exploration, tokens) == []
        assert exploration.rest([PLAIN], [9], 1000) == 1  # it wants to know how it goes on
    assert asked(exploration, LEAST_TEXT) == [0]


def test_one_request_with_text_is_enough():
    assert asked(Exploration(QUIET), 0, 0, LEAST_TEXT - 1) == []
    assert asked(Exploration(QUIET), 0, 0, LEAST_TEXT) != []


def test_a_request_that_drafts_is_no_text_to_wait_for():
    plans = [DRAFTS, PLAIN]
    assert asked(Exploration(QUIET), 100, 0, plans=plans) == []
    assert asked(Exploration(QUIET), 0, 100, plans=plans) == [1]


@pytest.mark.parametrize("tokens", [0, LEAST_TEXT - 1])
def test_text_is_waited_for_no_longer_than_it_takes_to_write_it(tokens):
    """Every time anew: short texts must not end all probing."""
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=EAGER))
    probing = []
    for step in range(4 * (LEAST_TEXT + 1)):
        if asked(exploration, tokens):
            probing.append(step)
            exploration.observe("d", 0.0, **FAILS)
    waits = [after - before for before, after in pairwise([-1, *probing])]
    assert waits == [LEAST_TEXT + 1] * 4


def test_waiting_begins_when_a_probe_is_due():
    first = []
    for tokens in (LEAST_TEXT, 0):
        exploration = Exploration(GoodputConfig(explore=0.0, probe_share=EAGER))
        assert asked(exploration, LEAST_TEXT) == [0]
        exploration.observe("d", 4.0, **FAILS)
        first.append(next(step for step in range(1, 60) if asked(exploration, tokens)))
    assert first[0] == pytest.approx(4.0 / EAGER, abs=1)
    assert first[1] == first[0] + LEAST_TEXT


def test_one_that_pays_is_followed_by_the_next_whatever_there_is_to_read():
    exploration = Exploration(QUIET)
    assert asked(exploration, LEAST_TEXT) == [0]
    exploration.observe("d", 5.0, **PAYS)
    assert asked(exploration, 0) == [0]


def test_waiting_keeps_nobody_from_trying_another_plan():
    exploration = Exploration(GoodputConfig(explore=0.01, probe_share=0.1))
    for step in range(LEAST_TEXT):
        assert asked(exploration, 0, 0, plans=[PLAIN, DRAFTS]) == []
        assert (exploration.explored == 1) == (step == 0)
        if exploration.explored is not None:
            exploration.pay(0.5)
    assert asked(exploration, 0, 0, plans=[PLAIN, DRAFTS]) == [0]


def test_after_a_time_of_drafting_probes_are_frequent_again():
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=0.01))
    rare = probes(exploration, 500, loss=1.0)
    for _ in range(50):
        assert exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9) == [DRAFTS]
    assert len(probes(exploration, 40, loss=1.0)) >= 3
    assert len([step for step in rare if step >= 200]) == 3


@pytest.mark.parametrize("tokens", [0, LEAST_TEXT])
@pytest.mark.parametrize("share", [1 / 4, 1 / 2])
@pytest.mark.parametrize("methods", [["d"], ["d", "e"]])
def test_nothing_is_due_before_it_is_said_to_be(share, tokens, methods):
    """A controller that does not ask meanwhile misses nothing, and pays all the same."""
    asked, counted = (
        Exploration(GoodputConfig(explore=1 / 256, probe_share=share)) for _ in range(2)
    )
    plans, most = [PLAIN, DRAFTS], [9, 9]
    both = texts(0, 0, tokens=tokens)
    rest = 1
    for _ in range(40):
        varied = asked.varied(plans, most, both, methods, 20, rest)
        for _ in range(rest - 1):
            assert counted.varied(plans, most, both, methods, 20) is plans
        assert counted.varied(plans, most, both, methods, 20) == varied
        for each in (asked, counted):
            if each.probed:
                each.observe(varied[each.probed[0]].method, 0.5, **FAILS)
            elif each.explored is not None:
                each.pay(1 / 32)
        rest = asked.rest(plans, most, 1000)


def test_a_quarter_of_the_idle_requests_probe_those_with_least_to_catch_up_with():
    exploration = Exploration(QUIET)
    plans = [PLAIN, DRAFTS, PLAIN, PLAIN, PLAIN, PLAIN]
    varied = exploration.varied(plans, [9] * 6, texts(50, 0, 40, 3, 7, 60), ["d"], 20)
    assert [plan.probe for plan in varied] == [False, False, False, True, True, False]
    assert exploration.probed == [3, 4]
    assert varied[1] == DRAFTS


def test_probes_share_the_room_there_is():
    exploration = Exploration(QUIET)
    varied = exploration.varied([PLAIN] * 8, [9] * 8, texts(*[0] * 8), ["d"], PROBE_DEPTH + 1)
    assert [plan.num_speculative_tokens for plan in varied] == [PROBE_DEPTH, 1, *[0] * 6]


def test_no_probe_without_room():
    exploration = Exploration(QUIET)
    for _ in range(40):
        assert exploration.varied([PLAIN], [0], JUST_READ, ["d"], 9) == [PLAIN]
        assert exploration.varied([PLAIN], [9], JUST_READ, ["d"], 0) == [PLAIN]


@pytest.mark.parametrize("loss", [0.05, 0.5])
def test_drafting_deeper_loses_no_more_than_its_share(loss):
    exploration = Exploration(GoodputConfig(explore=0.01))
    deeper = 0
    for _ in range(2000):
        (plan,) = exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
        if exploration.explored is not None:
            assert plan == replace(DRAFTS, shape=Chain(num_tokens=4), probe=True)
            deeper += 1
            exploration.pay(loss)
    assert 0.009 * 2000 < deeper * loss <= 0.01 * 2000 + loss


def test_what_is_believed_to_be_as_good_is_tried_often_but_not_always():
    exploration = Exploration(GoodputConfig(explore=0.003))
    tried = 0
    for _ in range(1000):
        exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
        if exploration.explored is not None:
            tried += 1
            exploration.pay(0.0)
    assert 100 < tried < 200


def test_nobody_drafts_deeper_without_room_or_wish():
    for config, most, room in ((QUIET, 9, 9), (GoodputConfig(), 3, 9), (GoodputConfig(), 9, 3)):
        exploration = Exploration(config)
        for _ in range(40):
            assert exploration.varied([DRAFTS], [most], JUST_READ, ["d"], room) == [DRAFTS]
            assert exploration.explored is None


def test_other_drafters_get_their_turn():
    exploration = Exploration(GoodputConfig(explore=0.2))
    plans = []
    for _ in range(300):
        plans += exploration.varied([DRAFTS], [3], JUST_READ, ["d", "e"], 9)
        if exploration.explored is not None:
            exploration.pay(0.5)
    assert {plan.method for plan in plans} == {"d", "e"}
    other = Plan.chain("e", PROBE_DEPTH, probe=True)
    assert {plan for plan in plans if plan.method == "e"} == {other}
    assert 0.3 < sum(plan.probe for plan in plans) / 300 < 0.45


def test_another_drafter_drafts_a_token_however_deep_the_first_does():
    exploration = Exploration(GoodputConfig(explore=0.2))
    for k in (1, 2, 9):
        deep, others = replace(DRAFTS, shape=Chain(num_tokens=k)), []
        for _ in range(20):
            (plan,) = exploration.varied([deep], [k], JUST_READ, ["d", "e"], k)
            if plan.method == "e":
                others.append(plan.num_speculative_tokens)
            exploration.pay(0.0)
        assert set(others) == {PROBE_DEPTH}


@pytest.mark.parametrize("loss", [MOST_LOSS, 1000.0])
def test_an_exploration_that_was_held_up_does_not_end_all_others(loss):
    exploration = Exploration(GoodputConfig(explore=0.25))
    exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
    exploration.pay(loss)
    assert exploration.rest([DRAFTS], [9], 10**6) == (MOST_LOSS - 0.25) / 0.25


@pytest.mark.parametrize("gain", [0.0, 0.5, 1000.0])
def test_what_pays_is_charged_all_the_same(gain):
    """Nothing is tried for ever without anything else being done."""
    exploration = Exploration(GoodputConfig(explore=LEAST_LOSS / 4))
    steps = []
    for step in range(400):
        exploration.varied([DRAFTS], [9], JUST_READ, ["d"], 9)
        if exploration.explored is not None:
            steps.append(step)
            exploration.pay(-gain)
    assert len(steps) == pytest.approx(400 / 4, abs=2)


def share(exploration: Exploration, kind: str = "k", method: str = "d", others: str = "") -> float:
    """Of the steps that pay for probes of such requests, to half a percent."""
    tried = deepcopy(exploration)
    tried.varied([PLAIN], [9], texts(0, kind=kind), [method, *others], 0)
    for other in others:
        for _ in range(4000):  # far from due
            tried.observe(other, MOST_LOSS, **JUST_PAYS)
    for _ in range(NUM_LOSSES + 1):  # of more than half of them the median is this
        tried.observe(method, MOST_LOSS, **JUST_PAYS)
    before = tried.rest([PLAIN], [9], 10**9)
    for _ in range(20):
        tried.observe(method, MOST_LOSS, **JUST_PAYS)
    waits = tried.rest([PLAIN], [9], 10**9) - before
    return 20 * MOST_LOSS / waits * (1 + len(others))


def near(expected: float) -> object:
    return pytest.approx(expected, rel=0.005)


SLOWLY = GoodputConfig(explore=0.0, probe_share=0.001)
SMALL = EAGER / 16
"""A share that may grow and shrink."""


def shrunk(kind: str = "k", method: str = "d") -> Exploration:
    """Of which all probes have failed so far."""
    exploration = Exploration(SLOWLY)
    exploration.varied([PLAIN], [9], texts(0, kind=kind), [method], 0)
    for _ in range(4):
        exploration.observe(method, 1.0, **FAILS)
    assert share(exploration, kind, method) == near(SMALL)
    return exploration


needs = st.floats(LEAST_NEED, 1.0 - LEAST_NEED)


@settings(deadline=None)
@given(needs, st.lists(st.floats(0.0, 0.5), min_size=1, max_size=6), st.data())
def test_the_share_does_not_drift_where_as_much_comes_as_must(needed, halves, data):
    """On average, in whatever order: each of them grows or shrinks it by up to a half."""
    most = min(1.0, needed / (1.0 - needed))  # nothing less than nothing can come
    signed = [sign * half * most for half in halves for sign in (1, -1)]
    exploration = shrunk()
    for exponent in data.draw(st.permutations(signed)):
        came = needed + exponent * (1.0 - needed)
        exploration.observe("d", 1.0, came=came, needed=needed)
    assert share(exploration) == near(SMALL)


@pytest.mark.parametrize(
    ("num_right", "ends"), [(1, (SLOWLY.probe_share, SMALL)), (3, (SMALL, EAGER))]
)
def test_the_share_goes_where_less_or_more_comes_than_must(num_right, ends):
    """Of five tokens two are needed."""
    exploration, shares = shrunk(), []
    for _ in range(20):
        for token in range(5):
            exploration.observe("d", 1.0, came=float(token < num_right), needed=0.4)
            shares.append(share(exploration))
    low, high = min(shares[-5:]), max(shares[-5:])
    if num_right == 1:
        assert low == near(ends[0])
        assert high < ends[1]
    else:
        assert low > ends[0]
        assert high == near(ends[1])


@settings(deadline=None)
@given(st.floats(0.0, 1.0, exclude_max=True))
def test_a_share_doubles_where_all_came(needed):
    exploration = shrunk()
    exploration.observe("d", 1.0, came=1.0, needed=needed)
    assert share(exploration) == near(2 * SMALL)


@pytest.mark.parametrize("came", [0.0, 0.5, 1.0])
def test_where_no_k_ever_pays_a_share_halves_whatever_comes(came):
    exploration = shrunk()
    exploration.observe("d", 1.0, came=came, needed=1.0)
    assert share(exploration) == near(SMALL / 2)


@settings(deadline=None)
@given(st.floats(-1.0, 10.0), st.floats(0.0, 1.0))
def test_a_share_never_leaves_its_bounds(needed, came):
    exploration = shrunk()
    for _ in range(12):
        exploration.observe("d", 1.0, came=came, needed=needed)
        assert 0.995 * SLOWLY.probe_share <= share(exploration) <= 1.005 * EAGER


@given(st.floats(0.0, 1.0), st.floats(0.0, 2.0))
def test_a_probe_is_followed_at_once_exactly_where_enough_came(came, needed):
    exploration = Exploration(QUIET)
    assert asked(exploration, LEAST_TEXT) == [0]
    exploration.observe("d", MOST_LOSS, came=came, needed=needed)
    assert asked(exploration, LEAST_TEXT) == ([0] if came >= needed < 1.0 else [])
    assert asked(exploration, LEAST_TEXT) == []  # of that one nothing is known yet


def test_what_follows_is_drafted_by_the_same_drafter():
    exploration = Exploration(QUIET)
    methods = []
    for step in range(8):
        (plan,) = exploration.varied([PLAIN], [9], JUST_READ, ["d", "e"], 9)
        methods.append(plan.method)
        exploration.observe(plan.method, MOST_LOSS, **(PAYS if step != 3 else FAILS))
    assert methods == ["d"] * 4 + ["e"] * 4


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-4, 4)), min_size=1, max_size=12))
def test_kinds_of_requests_do_not_influence_each_other(seen):
    """What has come of a kind's probes decides its share as if there were no other kind."""
    both = Exploration(SLOWLY)
    alone = {kind: Exploration(SLOWLY) for kind in "abc"}
    for kind, eighths in seen:
        for exploration in (both, alone[kind]):
            exploration.varied([PLAIN], [9], texts(0, kind=kind), ["d"], 0)
            exploration.observe("d", 1.0, came=0.5 + eighths / 8, needed=0.5)
    for kind, exploration in alone.items():
        assert share(both, kind) == pytest.approx(share(exploration, kind), rel=0.01)


def test_a_new_kind_is_eager_whatever_is_known_of_others():
    assert share(shrunk("code"), "prose") == near(EAGER)


def test_only_the_kind_that_drafts_is_revived():
    exploration = shrunk("code")
    exploration.varied([PLAIN], [9], texts(0, kind="prose"), ["d"], 0)
    for _ in range(4):
        exploration.observe("d", 1.0, **FAILS)
    for _ in range(100):
        exploration.varied([DRAFTS], [9], texts(0, kind="prose"), ["d"], 9)
    assert share(exploration, "prose") == near(EAGER)
    assert share(exploration, "code") == near(SMALL)


@pytest.mark.parametrize("drafts", ["d", "e"])
def test_only_drafters_in_use_are_revived(drafts):
    exploration = Exploration(SLOWLY)
    exploration.varied([PLAIN], [9], JUST_READ, ["d", "e"], 0)
    for method in "de":
        for _ in range(4):
            exploration.observe(method, 1.0, **FAILS)
    plan = replace(DRAFTS, method=drafts)
    for num_steps in (1, 2, 3, 1000):
        before = share(exploration, method=drafts, others="de".replace(drafts, ""))
        exploration.varied([plan], [9], JUST_READ, ["d", "e"], 9, num_steps)
        for method in "de":
            now = share(exploration, method=method, others="de".replace(method, ""))
            revived = min(EAGER, before * REVIVAL**num_steps)
            assert now == pytest.approx(revived if method == drafts else SMALL, rel=0.01)


def test_drafters_do_not_influence_each_others_shares():
    exploration = Exploration(SLOWLY)
    exploration.varied([PLAIN], [9], JUST_READ, ["d", "e"], 0)
    for _ in range(4):
        exploration.observe("d", 1.0, **FAILS)
    assert share(exploration, method="d", others="e") == near(SMALL)
    assert share(exploration, method="e", others="d") == near(EAGER)


losses = st.dictionaries(st.sampled_from("def"), st.floats(0.05, MOST_LOSS), min_size=1)


@settings(deadline=None, max_examples=40)
@given(losses, st.sampled_from([0.01, 0.05, EAGER]))
def test_no_drafter_costs_more_than_its_share_of_the_time(losses, probe_share):
    """Nor less, but for a probe: a dear drafter takes nothing from a cheap one."""
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=probe_share))
    methods, num_steps = list(losses), 3000
    counts: Counter[str] = Counter()

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            (plan,) = exploration.varied([PLAIN], [9], JUST_READ, methods, 9)
            if plan.probe:
                counts[plan.method] += 1
                exploration.observe(plan.method, losses[plan.method], **FAILS)

    while any(counts[method] < 6 for method in methods):  # eager no longer
        run(1)
    counts.clear()
    run(num_steps)
    paid = probe_share / len(methods) * num_steps
    for method, loss in losses.items():
        # At first it may have had credit, at the end not have paid for its last.
        assert counts[method] * loss <= paid + loss + MOST_CREDIT * probe_share
        if sum(probe_share / len(methods) / each for each in losses.values()) < 0.25:
            assert counts[method] * loss >= paid - loss - MOST_CREDIT * probe_share


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"),
            st.integers(1, 12),
            st.floats(-MOST_LOSS, 3 * MOST_LOSS),
            st.floats(0.0, 1.0),
            st.floats(0.0, 1.5),
            st.booleans(),
        ),
        min_size=20,
        max_size=200,
    )
)
def test_debts_are_paid_before_the_next_probe_whatever_comes(steps):
    """Kinds that change, steps that are many, losses of any size: by what a probe is charged."""
    exploration = Exploration(GoodputConfig(explore=0.0, probe_share=0.01))
    shares: dict[tuple[str, str], float] = {}
    losses: dict[str, list[float]] = {"d": [], "e": []}
    charged, paid = Counter[str](), Counter[str]()
    follows = False
    for kind, num_steps, loss, came, needed, drafts in steps:
        plans = [DRAFTS] if drafts else [PLAIN]
        for method in "de":
            paid[method] += num_steps * shares.get((kind, method), EAGER) / 2
        (plan,) = exploration.varied(plans, [9], texts(0, kind=kind), ["d", "e"], 9, num_steps)
        if drafts:
            revived = min(EAGER, shares.get((kind, "d"), EAGER) * REVIVAL**num_steps)
            shares[kind, "d"] = max(revived, shares.get((kind, "d"), EAGER))
        elif plan.probe:
            if not follows:
                assert charged[plan.method] <= paid[plan.method] + 1e-9
            losses[plan.method].append(min(loss, MOST_LOSS))
            charged[plan.method] += max(LEAST_LOSS, median(losses[plan.method][-NUM_LOSSES:]))
            exploration.observe(plan.method, loss, came=came, needed=needed)
            follows = came >= needed < 1.0
            must = max(LEAST_NEED, min(1.0 - LEAST_NEED, needed))
            factor = 2 ** ((came - must) / (1.0 - must)) if needed < 1.0 else 0.5
            grown = shares.get((kind, plan.method), EAGER) * factor
            shares[kind, plan.method] = max(0.01, min(EAGER, grown))
