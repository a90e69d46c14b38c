from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from math import fsum, prod

import pytest
from tests.unit.measure.judge.judgements import K, figures, judged

from forerun.measure.judge.figures import ledger_of, teacher_forced_length

ALPHAS = (0.9, 0.5, 0.2, 0.7, 1.0, 0.4, 0.6, 0.3)


def by_enumeration(alphas, k):
    """Every outcome of one coin per position, walked through as the verifier would."""
    emitted = steps = 0.0
    for coins in itertools.product([True, False], repeat=len(alphas)):
        weight = prod(a if coin else 1 - a for a, coin in zip(alphas, coins, strict=True))
        place = 1
        while len(alphas) - place > k:
            run = next((i for i in range(k) if not coins[place + i]), k)
            emitted, steps = emitted + weight * (run + 1), steps + weight
            place += run + 1
    return emitted, steps


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_teacher_forced_length_is_that_of_all_outcomes(k):
    assert teacher_forced_length(ALPHAS, k) == pytest.approx(by_enumeration(ALPHAS, k))


@pytest.mark.parametrize("length", [0, 1, K, K + 1])
def test_texts_too_short_for_a_step_have_none(length):
    assert teacher_forced_length(ALPHAS[:length], K) == (0.0, 0.0)


def prompts_of(accepted, tag, alphas=ALPHAS):
    return [judged(steps, tag=tag, alphas=alphas) for steps in accepted]


DEPLOYED = figures(
    [*prompts_of([[3, 1], [2, 2]], "code"), *prompts_of([[0, 0], [1]], "prose")], temperature=0.0
)
SAMPLED = figures(
    [*prompts_of([[1, 1], [2, 3]], "code"), *prompts_of([[0], [0, 0]], "prose")], temperature=1.0
)


def test_items_follow_one_another_and_add_up():
    found = ledger_of(DEPLOYED, SAMPLED, "code")
    emitted, steps = teacher_forced_length(ALPHAS, K)
    lengths = [3.0, 11 / 4, emitted / steps]
    assert found.measured.estimate == DEPLOYED.overall.acceptance_length.estimate
    assert [item.name for item in found.items] == [
        "in-domain prompts",
        "temperature 1",
        "teacher-forced prefix",
    ]
    assert [item.length.estimate for item in found.items] == pytest.approx(lengths)
    gains = [item.gain.estimate for item in found.items]
    assert gains[0] == pytest.approx(3.0 - DEPLOYED.overall.acceptance_length.estimate)
    total = fsum([found.measured.estimate, *gains, found.capacity.estimate])
    assert total == pytest.approx(found.limit)
    assert found.limit == K + 1
    json.dumps(asdict(found))


def test_gains_have_intervals_of_their_own_over_paired_prompts():
    """Sampling costs every prompt of the domain one token per step, whatever it accepts."""
    easy, hard = [3, 3, 3, 3], [1, 1, 1, 1]
    deployed = figures(prompts_of([easy, hard] * 4, "code"), temperature=0.0)
    sampled = figures(prompts_of([[2] * 4, [0] * 4] * 4, "code"))
    item = ledger_of(deployed, sampled, "code").items[1]
    assert (item.gain.low, item.gain.high) == pytest.approx((-1.0, -1.0))
    assert item.length.high - item.length.low > 0.5


def test_prompts_outside_matter_to_the_first_item_alone():
    other = figures([*DEPLOYED.prompts[:2], *prompts_of([[3, 3], [3]], "prose")], temperature=0.0)
    first, second = (ledger_of(f, SAMPLED, "code") for f in (DEPLOYED, other))
    assert first.items[0].gain != second.items[0].gain
    assert first.items[1:] == second.items[1:]


def test_without_a_domain_or_another_temperature_these_items_are_nothing():
    found = ledger_of(SAMPLED, SAMPLED, None)
    for item in found.items[:2]:
        assert (item.gain.low, item.gain.estimate, item.gain.high) == (0.0, 0.0, 0.0)


def test_a_drafter_without_alpha_has_no_third_item():
    bare = figures([replace(prompt, alphas=()) for prompt in SAMPLED.prompts])
    assert len(ledger_of(bare, bare, "code").items) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ledger_of(DEPLOYED, DEPLOYED, "code"), "temperature 0.0, not 1"),
        (lambda: ledger_of(DEPLOYED, SAMPLED, "poems"), "no held-out prompt has the tag 'poems'"),
        (lambda: ledger_of(DEPLOYED, figures(SAMPLED.prompts[:3]), None), "same prompts"),
        (lambda: ledger_of(DEPLOYED, figures(SAMPLED.prompts, k=5), None), "same K"),
    ],
)
def test_figures_that_do_not_belong_together_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
