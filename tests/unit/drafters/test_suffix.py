"""The suffix drafter: what it copies and when it holds back."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.control.base import Plan
from forerun.drafters.base import Drafter, DraftRequest, Pause
from forerun.drafters.config import SuffixConfig
from forerun.drafters.suffix import NOTHING, HitRates, Match, SuffixDrafter, copy_on
from forerun.errors import InvalidRequest
from forerun.sampling.config import Choice, SamplingParams
from forerun.sampling.proposal import Proposal
from forerun.theory.splitmix import finalise

FREE = SuffixConfig(step_cost=0, row_cost=0)
"""Drafting costs nothing, so whatever can be copied is."""
LINE = list(range(10, 40))


def asked(
    ids: Sequence[int], *, name: str = "r", num_prompt: int | None = None, scope: str | None = None
) -> DraftRequest:
    return DraftRequest(
        request_id=name,
        ids=list(ids),
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        params=SamplingParams(),
        noise_key=0,
        history=None,
        coupled=False,
        scope=scope,
    )


def proposed(drafter: SuffixDrafter, request: DraftRequest, k: int = 8) -> Proposal | None:
    (answer,) = drafter.propose([request], [Plan.chain("suffix", k)])
    return None if isinstance(answer, Pause) else answer


def drafted(drafter: SuffixDrafter, request: DraftRequest, k: int = 8) -> list[int]:
    proposal = proposed(drafter, request, k)
    return [] if proposal is None else proposal.tokens.tolist()


def matching(ids: Sequence[int]) -> Match:
    match = Match()
    for token in ids:
        match.advance(token)
    return match


def test_it_is_a_drafter():
    assert isinstance(SuffixDrafter(), Drafter)
    assert SuffixDrafter().method == "suffix"


# ------------------------------------------------------------------------------------------ copying


def test_what_followed_before_is_proposed_as_a_deterministic_chain():
    proposal = proposed(SuffixDrafter(), asked([*LINE, 99, *LINE[:20]]), 6)
    assert proposal is not None
    assert proposal.tokens.tolist() == LINE[20:26]
    assert proposal.tree.is_chain
    assert proposal.choice is Choice.DETERMINISTIC
    assert proposal.draft_probs is None


def test_nothing_is_proposed_where_nothing_repeats():
    assert proposed(SuffixDrafter(FREE), asked(LINE)) is None
    assert proposed(SuffixDrafter(FREE), asked([*LINE, *LINE[:9]]), 0) is None


def test_the_more_frequent_continuation_is_copied_and_of_equals_the_latest():
    head = [1, 2, 3]
    for tails, copied in (([7, 8, 7, 8, 8], 8), ([7, 7, 7, 8, 8], 7), ([8, 7, 7, 8], 8)):
        ids = [token for n, tail in enumerate(tails) for token in (*head, tail, 100 + n)]
        assert drafted(SuffixDrafter(FREE), asked([*ids, *head]), 1) == [copied]


def test_a_period_goes_on_past_the_end_of_the_text():
    assert drafted(SuffixDrafter(FREE), asked([5, 6, 7] * 6), 12) == [5, 6, 7] * 4


def test_the_budget_grows_with_the_match():
    config = SuffixConfig(tokens_per_match=1.5, step_cost=0, row_cost=0)
    for length in range(1, 9):
        ids = [*LINE, 99, *LINE[10 - length : 10]]
        assert drafted(SuffixDrafter(config), asked(ids), 100) == LINE[10:][: int(1.5 * length)]


def test_a_copy_ends_where_one_more_token_does_not_pay():
    """The score is what the rates promise; (1 + S) / kappa is largest at the length drafted."""
    match = matching([*LINE, 99, *LINE[:8]])
    config = SuffixConfig(tokens_per_match=10, step_cost=0.1, row_cost=0.15)
    copy = copy_on(match, 22, config)

    def value(num_tokens: int) -> float:
        reached, emitted = 1.0, 1.0
        for length in range(8, 8 + num_tokens):
            reached *= match.rates.probability(length, 1.0)
            emitted += reached
        return emitted / (
            1 + (config.step_cost if num_tokens else 0) + num_tokens * config.row_cost
        )

    best = max(value(n) for n in range(23))
    assert value(len(copy.tokens)) == pytest.approx(best)
    assert 0 < len(copy.tokens) < 22
    assert copy.score == pytest.approx(best * (1.1 + 0.15 * len(copy.tokens)) - 1)


def test_dear_rows_are_not_drafted_for():
    match = matching([*LINE, 99, *LINE[:8]])
    assert copy_on(match, 8, SuffixConfig(row_cost=1)) == NOTHING
    assert copy_on(match, 8, SuffixConfig(step_cost=20)) == NOTHING


# -------------------------------------------------------------------------------------------- rates


def test_rates_follow_what_happens_and_stay_probabilities():
    rates = HitRates()
    for hit, low, high in ((True, 0.97, 1.0), (False, 0.0, 0.03)):
        for _ in range(100):
            rates.observe(5, 1.0, hit)
            assert 0 <= rates.probability(5, 1.0) <= 1
        assert low <= rates.probability(5, 1.0) <= high
    assert rates.probability(20, 1.0) == HitRates().probability(20, 1.0)


def test_rates_correct_the_frequencies_not_replace_them():
    """Half the occurrences went that way, and half the time it was right: the rate stays at 1."""
    rates = HitRates()
    for turn in range(400):
        rates.observe(5, 0.5, turn % 2 == 0)
    assert rates.probability(5, 1.0) > 0.8


def test_a_request_that_does_not_copy_is_left_alone_and_noticed_when_it_does():
    """Tokens at random, of which short runs repeat by chance; then one line again and again."""
    noise = [finalise(n) % 40 for n in range(400)]
    drafter, request = SuffixDrafter(), asked(noise[:10])
    lengths = []
    for token in [*noise[10:], *LINE * 3]:
        lengths.append(len(drafted(drafter, request)))
        request.ids.append(token)
    assert sum(lengths[200:390]) < 20
    assert lengths[-1] == 8


def test_pauses_grow_until_something_is_copied():
    drafter, request = SuffixDrafter(), asked([0])
    pauses = []
    for token in [*LINE[:14], *LINE[:12]]:
        (answer,) = drafter.propose([request], [Plan.chain("suffix", 8)])
        pauses.append(answer.num_tokens if isinstance(answer, Pause) else 0)
        request.ids.append(token)
    assert pauses[:14] == [2, 2, 4, 4, 8, 8, 16, 16, 32, 32, 32, 32, 32, 32]
    assert pauses[-1] == 0
    request.ids[-1] = 999  # the copying is over, and long copies have made the pauses short again
    (answer,) = drafter.propose([request], [Plan.chain("suffix", 8)])
    assert 2 <= answer.num_tokens <= 4


def test_prompts_are_not_observations():
    """What a prompt repeats says nothing of what the model will."""
    drafter = SuffixDrafter()
    drafted(drafter, asked([*LINE, *LINE, *LINE[:20]]))
    assert drafter._readers["r"].match.rates.probability(30, 1.0) == HitRates().probability(30, 1.0)


# ------------------------------------------------------------------------------------- what is kept


def test_forgotten_requests_leave_nothing():
    drafter = SuffixDrafter()
    request = asked([*LINE, *LINE])
    drafted(drafter, request)
    drafter.forget("r")
    drafter.forget("r")
    assert drafter._readers == {}
    again = asked([*LINE[:5], 99])
    assert drafted(drafter, again) == []


def test_requests_do_not_see_each_other():
    drafter = SuffixDrafter(FREE)
    assert drafted(drafter, asked([*LINE, 99, *LINE[:9]], name="a")) == LINE[9:17]
    assert drafted(drafter, asked([99, *LINE[:9]], name="b")) == []


@pytest.mark.parametrize("name", ["tokens_per_match", "step_cost", "row_cost"])
@pytest.mark.parametrize("value", [-1, float("inf"), float("nan")])
def test_settings_that_cannot_work_are_refused(name, value):
    with pytest.raises(InvalidRequest, match=name):
        SuffixConfig(**{name: value})
