"""A reduced vocabulary has the tokens that are learned most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forerun.align.methods.eagle3 import drafted_tokens
from forerun.align.samples import Sample
from forerun.errors import InvalidRequest


def text(prompt: list[int], response: list[int]) -> Sample:
    ids = (*prompt, *response)
    return Sample(prompt_hash="0", token_ids=ids, spans=((len(prompt), len(ids)),))


SAMPLES = [text([9, 9, 9, 9, 7], [4, 4, 2, 4]), text([9, 7], [2, 5, 4])]


def test_learned_tokens_count_before_those_of_prompts():
    assert drafted_tokens(SAMPLES, 12, 3).tolist() == [2, 4, 5]
    assert drafted_tokens(SAMPLES, 12, 4).tolist() == [2, 4, 5, 9]
    assert drafted_tokens(SAMPLES, 12, 6).tolist() == [0, 2, 4, 5, 7, 9]


def of_prompt(number: int, response: list[int]) -> Sample:
    """A text whose prompt is in the first half for 0, and in the second for 1."""
    return replace(text([0], response), prompt_hash=f"{(1 - number) * 0xF:x}" + "0" * 15)


def test_a_size_is_chosen_by_coverage_of_answers_to_other_prompts():
    common = [of_prompt(half, [*range(1, 129)] * 100) for half in (0, 1)]
    rare = [*range(200, 260)]
    assert len(drafted_tokens(common, 1000)) == 128
    # 60 of 25,660 tokens are left out, and they are in one half alone.
    assert len(drafted_tokens([*common, of_prompt(0, rare)], 1000)) == 128
    both = [of_prompt(half, rare * 2) for half in (0, 1)]
    assert len(drafted_tokens([*common, *both], 1000)) == 256
    assert len(drafted_tokens([*common, *both], 260)) == 256


def test_every_token_is_taken_where_answers_to_other_prompts_have_new_ones():
    # Each half alone is covered by 128 tokens, of which the other half has none.
    halves = [of_prompt(half, [*range(1 + half * 300, 129 + half * 300)]) for half in (0, 1)]
    assert len(drafted_tokens(halves, 1000)) == 256
    assert len(drafted_tokens(halves[:1], 1000)) == 128


def test_more_tokens_than_the_target_has_are_refused():
    with pytest.raises(InvalidRequest, match="draft_vocab_size is 13, but the target has 12"):
        drafted_tokens(SAMPLES, 12, 13)
