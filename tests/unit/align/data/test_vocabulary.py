"""A reduced vocabulary has the tokens that are learned most."""

from __future__ import annotations

import pytest

from forerun.align.samples import Sample, drafted_tokens
from forerun.errors import InvalidRequest


def text(prompt: list[int], response: list[int]) -> Sample:
    ids = (*prompt, *response)
    return Sample(prompt_hash="0", token_ids=ids, spans=((len(prompt), len(ids)),))


SAMPLES = [text([9, 9, 9, 9, 7], [4, 4, 2, 4]), text([9, 7], [2, 5, 4])]


def test_learned_tokens_count_before_those_of_prompts():
    assert drafted_tokens(SAMPLES, 12, 3).tolist() == [2, 4, 5]
    assert drafted_tokens(SAMPLES, 12, 4).tolist() == [2, 4, 5, 9]
    assert drafted_tokens(SAMPLES, 12, 6).tolist() == [0, 2, 4, 5, 7, 9]


def test_a_size_is_chosen_by_coverage():
    common = text([0], [*range(1, 129)] * 100)
    rare = text([0], [*range(200, 260)])
    assert len(drafted_tokens([common], 1000)) == 128
    assert len(drafted_tokens([common, rare], 1000)) == 128  # 60 of 12,860 tokens are left out
    assert len(drafted_tokens([common, *[rare] * 2], 1000)) == 256
    assert len(drafted_tokens([common, *[rare] * 2], 200 + 60)) == 256


def test_more_tokens_than_the_target_has_are_refused():
    with pytest.raises(InvalidRequest, match="draft_vocab_size is 13, but the target has 12"):
        drafted_tokens(SAMPLES, 12, 13)
