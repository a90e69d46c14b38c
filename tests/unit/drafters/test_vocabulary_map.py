"""Tokens matched by bytes, and texts kept in the tokens of another vocabulary."""

from __future__ import annotations

import random

import pytest
from tests import foreign, tiny
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from forerun.drafters.vocabulary_map import (
    ReencodedText,
    VocabularyMap,
    cut_text,
    map_vocabularies,
)
from forerun.errors import IncompatibleDraft
from forerun.models.tokenizers import Tokenizer

KINDS = {"tiny": tiny.tokenizer} | foreign.DRAFTS
PAIRS = [(one, other) for one in KINDS for other in KINDS if one != other]


def mapped(target: str, draft: str) -> VocabularyMap:
    return map_vocabularies(KINDS[target](), KINDS[draft]())


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_shared_tokens_have_the_same_bytes_and_no_two_are_one(target, draft):
    found = mapped(target, draft)
    assert len({*found.shared.values()}) == len(found.shared) > 20
    for token, own in found.shared.items():
        assert found.target.token_bytes(token) == found.draft.token_bytes(own)
    ends = found.target.eos_token_id, found.draft.eos_token_id
    assert found.shared[ends[0]] == ends[1]


def test_spaces_and_bytes_are_one_in_all_notations():
    found = mapped("tiny", "sentencepiece")
    ours, theirs = found.target.vocabulary, found.draft.vocabulary
    names = {ours[token]: theirs[own] for token, own in found.shared.items()}
    assert names["\u0120"] == "\u2581"
    assert names["\u010a"] == "<0x0A>"
    assert names["a"] == "a"  # and not <0x61>


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_the_draft_reads_what_it_would_encode_itself(target, draft):
    found = mapped(target, draft)
    for text in foreign.TEXTS:
        if cut_text(found.target, text) is None:
            continue
        ids = found.target.encode(text)
        reading = ReencodedText(found)
        for end in range(1, len(ids) + 1):
            reading.read(ids[:end])
            so_far = found.target.decode(ids[:end])
            if "\ufffd" not in so_far:
                assert reading.ids == found.draft.encode(so_far), so_far
                assert reading.is_usable == bool(reading.ids)


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_any_tokens_are_spelled_or_the_text_is_not_usable(target, draft):
    found = mapped(target, draft)
    rng = random.Random(0)
    ordinary = sorted(found.target_ids.values())
    reading, ids = ReencodedText(found), []
    for _ in range(60):
        ids += rng.choices(ordinary, k=rng.randint(1, 3))
        reading.read(ids)
        spelled = b"".join(map(found.draft.token_bytes, reading.ids))
        expected = b"".join(map(found.target.token_bytes, ids))
        if reading.is_usable and draft != "characters":
            found_text, text = (part.decode(errors="replace") for part in (spelled, expected))
            assert found_text.strip() == text.strip()


def test_an_unfinished_character_follows_in_bytes():
    found = mapped("tiny", "byte-level")
    ids = [found.target_ids[bytes([byte])] for byte in "a\u4e2d".encode()]
    reading = ReencodedText(found)
    reading.read(ids[:-1])
    assert b"".join(map(found.draft.token_bytes, reading.ids)) == "a\u4e2d".encode()[:-1]
    assert reading.is_usable
    reading.read(ids)
    assert reading.ids == found.draft.encode("a\u4e2d")
    without = ReencodedText(mapped("tiny", "characters"))
    without.read(ids[:-1])
    assert not without.is_usable


def test_only_the_end_of_a_long_text_is_encoded_again():
    found = mapped("tiny", "byte-level")
    ids = found.target.encode("import os\n" * 200)
    lengths: list[int] = []
    encode = found.draft.encode

    def counted(text: str, **options: bool) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    reading = ReencodedText(found)
    reading.read(ids[:-5])
    found.draft.encode = counted  # type: ignore[method-assign]
    for end in range(len(ids) - 4, len(ids) + 1):
        reading.read(ids[:end])
    assert max(lengths) < 200
    assert reading.ids == encode("import os\n" * 200)


def test_special_tokens_keep_their_meaning():
    found = mapped("sentencepiece", "tiny")
    end, own = found.target.eos_token_id, found.draft.eos_token_id
    word = found.target.encode("x")
    reading = ReencodedText(found)
    reading.read([*word, end, *word])
    assert reading.ids == [*found.draft.encode("x"), own, *found.draft.encode(" x")]

    found = mapped("tiny", "byte-level")
    written_out = found.continuation(found.target.encode("x"), found.draft.encode(foreign.END))
    assert found.target.eos_token_id not in written_out
    assert b"".join(map(found.target.token_bytes, written_out)).decode() == foreign.END


def test_a_token_that_begins_texts_is_read_once():
    """The target's text has it written out, and the draft expects one of its own before a text."""
    target = foreign.byte_level_with("<s>")
    backend = Backend.from_str(target.definition.content)
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", start)]
    )
    found = map_vocabularies(target, foreign.wrapped(backend))
    word = found.target.encode("x")
    reading = ReencodedText(found)
    reading.read([start, *word])
    assert reading.ids == found.draft.encode("x") == [start, *word]
    reading.read([start, *word, start, *word])
    assert reading.ids == [start, *word, start, *word]
    twice = ReencodedText(found)
    twice.read([start, start, *word])
    assert twice.ids == [start, *word]


def test_no_two_special_tokens_of_the_target_are_the_same_of_the_draft():
    """The draft's end of text is already a special token of the target that ends nothing."""
    draft = foreign.sentencepiece()
    target = foreign.byte_level_with("</s>")
    special = map_vocabularies(target, draft).special
    (kept,) = [token for token, own in special.items() if own == draft.eos_token_id]
    assert target.vocabulary[kept] == "</s>"
    assert special[target.eos_token_id] is None


@pytest.mark.parametrize(("target", "draft"), PAIRS)
@pytest.mark.parametrize("text", ["def add(left, right):\n    return", "two  spaces\n"])
def test_a_guess_is_what_the_target_would_encode(target, draft, text):
    found = mapped(target, draft)
    ids = found.target.encode(text)
    for end in range(1, len(ids)):
        rest = text[len(found.target.decode(ids[:end])) :]
        guess = found.continuation(ids[:end], found.draft.encode(rest, add_special_tokens=False))
        spelled = b"".join(map(found.target.token_bytes, guess)).decode()
        assert spelled.lstrip() == rest.lstrip()
        if draft != "sentencepiece":  # which writes a space before a text
            assert guess == ids[end:]


def test_a_guess_that_changes_committed_tokens_is_cut_where_they_end():
    found = mapped("tiny", "characters")
    whole = found.target.encode("    return")
    part = [found.target_ids[bytes([byte])] for byte in b"    re"]
    guess = found.continuation(part, found.draft.encode("turn x"))
    assert len(whole) < len(part)
    assert b"".join(map(found.target.token_bytes, guess)) == b"turn x"


def test_a_guess_behind_a_special_token_does_not_continue_the_text_before_it():
    found = mapped("tiny", "characters")
    before, end = found.target.encode(" "), found.target.eos_token_id
    drafted = found.draft.encode("   return")
    assert found.continuation([*before, end], drafted) == found.target.encode("   return")
    assert found.continuation(before, drafted) != found.target.encode("   return")


def test_bytes_of_an_unfinished_character_are_no_guess():
    found = mapped("tiny", "byte-level")
    drafted = [found.draft_ids[bytes([byte])] for byte in "x\u4e2d".encode()]
    before = found.target.encode("a")
    cut = found.continuation(before, drafted[:-1])
    assert b"".join(map(found.target.token_bytes, cut)) == b"x"
    ended = [*drafted[:-1], found.draft.eos_token_id]
    assert found.continuation(before, ended) == cut
    assert found.continuation(before, [found.draft.eos_token_id]) == [found.target.eos_token_id]


def changed(normalizer: object = None, decoder: object = None, end: str = foreign.END) -> Tokenizer:
    backend = Backend.from_str(foreign.byte_level(end=end).definition.content)
    if normalizer is not None:
        backend.normalizer = normalizer
    return foreign.wrapped(backend, end)


def words() -> Tokenizer:
    backend = Backend(models.WordLevel({"a": 0, "b": 1, "<unk>": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return foreign.wrapped(backend, "<unk>")


def only_letters(letters: str) -> Tokenizer:
    vocab = {piece: index for index, piece in enumerate(["<unk>", *letters])}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    backend.decoder = decoders.Fuse()
    return foreign.wrapped(backend, "<unk>")


@pytest.mark.parametrize(
    ("stranger", "message"),
    [
        (lambda: changed(normalizers.Lowercase()), "turns 'Ab' into 'ab'"),
        (lambda: changed(normalizers.NFKC()), "turns '\ufb01\uff21\u2460' into 'fiA1'"),
        (
            lambda: changed(normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])),
            "turns '\u00e9\u00c5' into 'eA'",
        ),
        (words, "say nothing of the space between words"),
        (lambda: only_letters("ab "), "only 3 tokens in common"),
        (lambda: changed(end="x"), "special tokens collide: 'x' ends a text"),
    ],
    ids=["lower case", "NFKC", "accents", "words", "nothing in common", "colliding end"],
)
def test_what_cannot_be_matched_is_refused_with_the_reason(stranger, message):
    for pair in ((tiny.tokenizer(), stranger()), (stranger(), tiny.tokenizer())):
        with pytest.raises(IncompatibleDraft, match=message):
            map_vocabularies(*pair)


def test_the_way_is_chosen_by_where_tokens_end():
    permuted = map_vocabularies(tiny.tokenizer(), foreign.permuted()[0])
    assert permuted.aligned == 1
    assert permuted.way == "tli"
    assert "300 of the target's 300 tokens" in permuted.reason
    apart = mapped("tiny", "characters")
    assert apart.way == "slem"
