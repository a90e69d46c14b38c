"""Detokenising piece by piece, and comparing vocabularies."""

from __future__ import annotations

import logging

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import TokenizersBackend

from forerun.errors import InvalidModel, InvalidRequest
from forerun.models.tokenizers import (
    MAX_TEXT_CHARACTERS,
    Detokenizer,
    PieceRules,
    Tokenizer,
    adopt,
    compare_vocabularies,
    from_byte_level,
)

TEXT = "def f(x):\n    return 'naïve 😀 …'\n"


def backend_of(pieces: list[str], decoder: object) -> TokenizersBackend:
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}))
    backend.decoder = decoder
    return TokenizersBackend(tokenizer_object=backend)


def sentencepiece(pieces: list[str]) -> Tokenizer:
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return adopt(backend_of(pieces, decoders.Sequence(steps)))


def detokenized(tokenizer: Tokenizer, ids: list[int]) -> tuple[str, str]:
    """The text at the end, and the same put together from what every call returned."""
    detokenizer = Detokenizer(tokenizer)
    shown = "".join([*(detokenizer.append(token) for token in ids), detokenizer.finish()])
    return detokenizer.text, shown


def test_text_survives(byte_level):
    ids = byte_level.encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    assert detokenized(byte_level, ids) == (TEXT, TEXT)


def test_long_texts_are_encoded_in_silence(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    backend = backend_of(["a"], decoders.ByteLevel())
    backend.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.model_max_length = 1
    assert adopt(backend).encode("a a a") == [0, 0, 0]
    assert not caplog.records


def test_unfinished_character_is_held_back(byte_level):
    ids = [byte_level.encode("a")[0]]
    ids += [t for t in range(300) if byte_level.token_bytes(t) == b"\xf0"]
    ids += [t for t in range(300) if byte_level.token_bytes(t) == b"\x9f"]
    detokenizer = Detokenizer(byte_level)
    assert [detokenizer.append(token) for token in ids] == ["a", "", ""]
    assert detokenizer.text == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_any_ids_become_the_text_of_decoding_them_at_once(byte_level):
    """Random ids are mostly broken UTF-8, and include special, added and padding ids."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        ids = torch.randint(310, (60,), generator=generator).tolist()
        expected = byte_level.decode(ids)
        assert detokenized(byte_level, ids) == (expected, expected)


def test_special_tokens_are_no_text_and_added_ones_are(byte_level):
    added = {content: token for token, (content, _) in byte_level.added.items()}
    ids = [added["<|end|>"], added["<tool call>"], 9999]
    assert detokenized(byte_level, ids)[0] == "<tool call>"


def test_sentencepiece_pieces():
    tokenizer = sentencepiece(["\u2581def", "\u2581\u2581f", "<0xC3>", "<0xA9>", "<0x0A>", "x"])
    ids = [5, 0, 1, 2, 3, 4, 0]
    assert detokenized(tokenizer, ids)[0] == tokenizer.decode(ids) == "x def  fé\n def"


@pytest.mark.parametrize("piece", ["<0xZZ>", "<0x0A", "a<0x0A>"])
def test_only_whole_byte_pieces_are_bytes(piece):
    assert PieceRules(has_bytes=True).to_bytes(piece) == piece.encode()


def test_byte_level_alphabet_covers_every_byte():
    assert from_byte_level("AĠĊ") == b"A \n"
    alphabet = [chr(code) for code in range(0x180) if len(from_byte_level(chr(code))) == 1]
    assert {from_byte_level(character)[0] for character in alphabet} == set(range(256))


def test_other_decoders_are_refused():
    with pytest.raises(InvalidModel, match="decodes by WordPiece is not supported"):
        adopt(backend_of(["a"], decoders.WordPiece()))


def test_tokens_without_a_decoder_are_words_joined_by_spaces():
    tokenizer = adopt(backend_of(["a", "bc", "d"], None))
    assert detokenized(tokenizer, [1, 9, 0, 2]) == ("bc a d", "bc a d")
    assert tokenizer.decode([1, 9, 0, 2]) == "bc a d"
    assert tokenizer.token_bytes(1) == b" bc"


MARK = "\u2581"
FALLBACK = [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
SENTENCEPIECE: dict[str, object] = {
    "plain": decoders.Sequence(FALLBACK),
    "strip": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 1, 0)]),
    "strip two": decoders.Sequence([*FALLBACK, decoders.Strip(" ", 2, 0)]),
    "metaspace": decoders.Metaspace(),
    "metaspace first": decoders.Metaspace(prepend_scheme="first"),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "metaspace and bytes": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
}


@pytest.mark.parametrize("kind", SENTENCEPIECE)
def test_sentencepiece_text_is_that_of_decoding_all_ids_at_once(kind):
    """Random ids among byte tokens and spaces: mostly broken UTF-8, often leading spaces."""
    pieces = [f"<0x{byte:02X}>" for byte in range(0x20, 0x100, 3)]
    pieces += ["<0xC3>", "<0xA9>", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"]
    pieces += [MARK, MARK * 2, MARK + "a", "b", f"c{MARK}", "\u00e9", "<0x0", " "] * 8
    unique = [*dict.fromkeys(pieces)]
    backend = backend_of(unique, SENTENCEPIECE[kind])
    backend.add_tokens(["<tool" + MARK + ">"])
    backend.add_special_tokens({"eos_token": "</s>"})
    tokenizer = adopt(backend)
    generator = torch.Generator().manual_seed(0)
    choice = torch.tensor(
        [unique.index(piece) for piece in pieces] + [len(unique) + i for i in (0, 1, 5)] * 6
    )
    for length in (1, 2, 3, 5, 8, 40) * 25:
        ids = choice[torch.randint(len(choice), (length,), generator=generator)].tolist()
        expected = tokenizer.decode(ids)
        assert detokenized(tokenizer, ids) == (expected, expected), ids


@pytest.mark.parametrize(
    "step", [decoders.Strip(" ", 0, 1), decoders.CTC(), decoders.WordPiece()], ids=str
)
def test_sentencepiece_steps_that_cannot_be_streamed_are_refused(step):
    with pytest.raises(InvalidModel, match="cannot be streamed"):
        adopt(backend_of(["a"], decoders.Sequence([*FALLBACK, step])))


def test_same_tokenizer_is_identical(byte_level):
    comparison = compare_vocabularies(byte_level, byte_level)
    assert comparison.identical
    assert comparison.num_target == comparison.num_draft == len(byte_level.vocabulary)
    assert comparison.first_differences == ()


def test_differences_are_listed_by_id():
    target = sentencepiece(["a", "b", "c", "d"])
    draft = sentencepiece(["a", "c", "b"])
    comparison = compare_vocabularies(target, draft, max_shown=2)
    assert not comparison.identical
    assert (comparison.num_target, comparison.num_draft, comparison.num_different) == (4, 3, 3)
    assert comparison.first_differences == ((1, "b", "c"), (2, "c", "b"))
    assert compare_vocabularies(target, draft).first_differences[-1] == (3, "d", None)
    assert compare_vocabularies(draft, target).first_differences[-1] == (3, None, "d")


def test_chat_needs_a_template(byte_level):
    with pytest.raises(InvalidRequest, match="no chat template"):
        byte_level.render_chat([{"role": "user", "content": "hi"}])


def test_chat_ends_where_the_answer_begins():
    backend = backend_of(["a"], decoders.ByteLevel())
    backend.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    rendered = adopt(backend).render_chat([{"role": "user", "content": "hi"}])
    assert rendered == "<user>hi<assistant>"


def test_a_template_that_is_set_later_is_the_one_that_renders():
    backend = backend_of(["a"], decoders.ByteLevel())
    backend.chat_template = "{{ messages[0].content }}"
    tokenizer = adopt(backend)
    conversation = [{"role": "user", "content": "hi"}]
    assert tokenizer.render_chat(conversation) == "hi"
    tokenizer.use_chat_template("<{{ messages[0].content }}>")
    assert tokenizer.render_chat(conversation) == "<hi>"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("", None),
        ({}, None),
        ({"tool_use": "a"}, None),
        ({"tool_use": "a", "default": "{{ messages[0].content }}"}, "hi"),
    ],
)
def test_the_default_one_of_several_templates_is_used(template, text):
    backend = backend_of(["a"], decoders.ByteLevel())
    backend.chat_template = template
    tokenizer = adopt(backend)
    assert tokenizer.has_chat_template == (text is not None)
    if text is not None:
        assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == text


@pytest.mark.parametrize("template", [3, True, {"default": ["x"]}])
def test_a_template_that_is_no_text_is_refused(template):
    backend = backend_of(["a"], decoders.ByteLevel())
    backend.chat_template = template
    with pytest.raises(InvalidModel, match=r"the chat template is .*; it must be text"):
        adopt(backend)


def test_a_text_longer_than_any_context_is_not_tokenised(byte_level):
    with pytest.raises(InvalidRequest, match="has 4194305 characters; at most 4194304"):
        byte_level.encode("x" * (MAX_TEXT_CHARACTERS + 1))
