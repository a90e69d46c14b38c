from __future__ import annotations

from forerun.theory.acceptance import distinct_ngram_share, first_repeat


def test_text_without_repetition_has_share_one():
    assert distinct_ngram_share(range(100)) == 1.0


def test_share_counts_distinct_ngrams_over_all():
    # abab abab: the 4-grams are abab, baba, abab, baba, abab
    assert distinct_ngram_share([1, 2] * 4) == 2 / 5


def test_share_of_text_shorter_than_an_ngram():
    assert distinct_ngram_share([1, 1, 1]) == 1.0


def test_size_of_the_ngram_matters():
    assert distinct_ngram_share([1, 2, 1, 3], size=1) == 3 / 4
    assert distinct_ngram_share([1, 2, 1, 3], size=2) == 1.0


def test_first_repeat_is_where_the_second_occurrence_starts():
    assert first_repeat([9, 1, 2, 3, 8, 1, 2, 3], size=3) == 5


def test_first_repeat_of_text_without_one_is_its_length():
    assert first_repeat(range(200)) == 200
    assert first_repeat([]) == 0


def test_a_short_loop_is_cut_after_one_period():
    assert first_repeat([7] * 100) == 1
    assert first_repeat([1, 2, 3] * 40) == 3


def test_a_repeat_shorter_than_the_ngram_does_not_count():
    prefix, repeated = list(range(50)), list(range(31))
    assert first_repeat(prefix + repeated) == 81
