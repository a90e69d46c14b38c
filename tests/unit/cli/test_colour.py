from __future__ import annotations

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from forerun.cli.session import STYLES, ColouredText, legend
from forerun.models.tokenizers import adopt
from forerun.sampling.config import TokenSource

ACCEPTED, RECOVERED, BONUS = TokenSource.ACCEPTED, TokenSource.RECOVERED, TokenSource.BONUS


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte."""
    pieces = {piece: i for i, piece in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(pieces, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return adopt(PreTrainedTokenizerFast(tokenizer_object=backend))


def styles_of(text):
    """(characters, style) per run."""
    return [(text.plain[span.start : span.end], span.style) for span in text.spans]


def test_every_token_has_the_colour_of_its_source(tokenizer):
    ids = tokenizer.encode("abc")
    text = ColouredText(tokenizer).take("abc", ids, [ACCEPTED, RECOVERED, BONUS])
    assert text.plain == "abc"
    assert styles_of(text) == [
        ("a", STYLES[ACCEPTED]),
        ("b", STYLES[RECOVERED]),
        ("c", STYLES[BONUS]),
    ]


def test_a_character_of_several_tokens_has_the_colour_of_its_last(tokenizer):
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    text = ColouredText(tokenizer).take("é", ids, [ACCEPTED, BONUS])
    assert text.plain == "é"
    assert styles_of(text)[-1] == ("é", STYLES[BONUS])


def test_text_held_back_keeps_its_colour_when_it_is_shown_later(tokenizer):
    coloured = ColouredText(tokenizer)
    first = coloured.take("a", tokenizer.encode("ab"), [ACCEPTED, RECOVERED])
    second = coloured.take("bc", tokenizer.encode("c"), [BONUS])
    assert (first.plain, second.plain) == ("a", "bc")
    assert styles_of(second) == [("b", STYLES[RECOVERED]), ("c", STYLES[BONUS])]


def test_text_cut_by_a_stop_string_is_not_shown(tokenizer):
    text = ColouredText(tokenizer).take("ab", tokenizer.encode("abcd"), [ACCEPTED] * 4)
    assert text.plain == "ab"


def test_the_end_of_an_unfinished_character_is_shown_without_a_source(tokenizer):
    ids = tokenizer.encode("é")[:1]
    assert ColouredText(tokenizer).take("\ufffd", ids, [BONUS]).plain == "\ufffd"


def test_the_legend_names_every_source():
    assert all(str(source) in legend().plain for source in TokenSource)
