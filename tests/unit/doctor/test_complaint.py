"""A complaint in words is a source of observations."""

from __future__ import annotations

import pytest

from forerun.doctor.readers.sources import read_source
from forerun.errors import InvalidRequest


def test_a_complaint_in_words_gives_observations():
    found = read_source("acceptance falls with the context length", interval_s=1.0)
    assert found.flag("acceptance_falls_with_context") is True
    assert found.readings[0].kinds == {"words"}


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("slower with 8 requests at once", "slower_with_batch"),
        ("slower with four clients in parallel", "slower_with_batch"),
        ("slower than without speculation since the update", "slower_than_plain"),
        ("acceptance falls as prompts get longer", "acceptance_falls_with_context"),
    ],
)
def test_the_examples_of_the_page_are_understood(text: str, fact: str):
    found = read_source(text, interval_s=1.0, is_asking=True)
    assert found.flag(fact) is True


@pytest.mark.parametrize("text", ["good morning to everybody", "x " * 9000, "a \x1b[31m b"])
def test_words_that_say_nothing_are_refused(text: str):
    with pytest.raises(InvalidRequest) as refused:
        read_source(text, interval_s=1.0)
    assert len(str(refused.value)) < 500


def test_a_missing_file_is_a_missing_file():
    with pytest.raises(InvalidRequest, match="No such file"):
        read_source("no-such-file.log", interval_s=1.0)


def test_one_word_that_names_no_file_is_a_complaint():
    with pytest.raises(InvalidRequest, match="'fine' is no file"):
        read_source("fine", interval_s=1.0)
    assert not read_source("slow", interval_s=1.0, is_asking=True).facts
