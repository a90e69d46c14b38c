"""Streaming conversion of token ids to text, equal to decoding all ids at once.

Three kinds of decoders are supported: byte-level BPE, SentencePiece with or without tokens that
stand for single bytes, and none at all, where tokens are words joined by spaces.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from forerun.errors import InvalidModel

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL: Mapping[str, int] = MappingProxyType(_byte_level_alphabet())


def from_byte_level(piece: str) -> bytes:
    """Bytes of a token of a byte-level BPE; added tokens may be plain text instead."""
    try:
        return bytes(BYTE_LEVEL[character] for character in piece)
    except KeyError:
        return piece.encode()


@lru_cache(maxsize=1 << 16)
def _whole_text(piece: str) -> str | None:
    """Return the text of a byte-level token; None if its bytes are not whole characters."""
    try:
        return from_byte_level(piece).decode()
    except UnicodeDecodeError:
        return None


@runtime_checkable
class TextStream(Protocol):
    """Converts tokens to text one by one; text that later tokens may change is held back."""

    def append(self, piece: str) -> str:
        """Return the text that one more token completes; may be empty."""

    def finish(self) -> str:
        """End the text and return the characters held back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDecoder:
    """Creates text streams for one vocabulary.

    `to_bytes` is what a token's written form contributes to a text that has begun.
    """

    to_bytes: Callable[[str], bytes]
    open_stream: Callable[[], TextStream]


class ByteLevelStream:
    """Stream for byte-level tokens; the bytes of an unfinished character are held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between_characters = True

    def append(self, piece: str) -> str:
        """Return the text that one more token completes."""
        if self._is_between_characters and (text := _whole_text(piece)) is not None:
            return text
        text = self._decoder.decode(from_byte_level(piece))
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


class WordStream:
    """Stream for tokens that are words, with a space between two."""

    def __init__(self) -> None:
        self._has_begun = False

    def append(self, piece: str) -> str:
        """Return the word, after a space if it is not the first."""
        text = " " + piece if self._has_begun else piece
        self._has_begun = True
        return text

    def finish(self) -> str:
        """Return nothing: no text is held back."""
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRules:
    """The decoding rules of a SentencePiece tokenizer.

    Attributes:
        has_bytes: whether "<0x0A>" stands for a byte.
        first_mark: character removed from the first token; None where none is.
        stripped: character removed from the beginning of the text, at most `num_stripped` times.
        num_stripped: see `stripped`.
    """

    replaced: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    first_mark: str | None = None
    stripped: str = " "
    num_stripped: int = 0

    def text_of(self, piece: str, *, is_first: bool = False) -> str:
        """Return the text of a token that is not a byte token."""
        if is_first and self.first_mark is not None:
            piece = piece.replace(self.first_mark, "")
        for old, new in self.replaced:
            piece = piece.replace(old, new)
        return piece

    def byte_of(self, piece: str) -> int | None:
        found = BYTE_PIECE.fullmatch(piece) if self.has_bytes else None
        return None if found is None else int(found[1], 16)

    def to_bytes(self, piece: str) -> bytes:
        byte = self.byte_of(piece)
        return self.text_of(piece).encode() if byte is None else bytes([byte])


class PieceStream:
    """Stream for SentencePiece tokens.

    A run of byte tokens is text only if all of it is UTF-8, and otherwise one U+FFFD per byte. So a
    run is held back until a token that is no byte ends it.
    """

    def __init__(self, rules: PieceRules) -> None:
        self._rules = rules
        self._run = bytearray()
        self._is_first = True
        self._num_to_strip = rules.num_stripped

    def append(self, piece: str) -> str:
        """Return the text that one more token completes."""
        byte = self._rules.byte_of(piece)
        is_first, self._is_first = self._is_first, False
        if byte is not None:
            self._run.append(byte)
            return ""
        text = self._end_run() + self._rules.text_of(piece, is_first=is_first)
        return self._strip(text)

    def finish(self) -> str:
        """Return the bytes held back, as text."""
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        run, self._run = bytes(self._run), bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(run)

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            is_stripped = text[0] == self._rules.stripped
            self._num_to_strip = self._num_to_strip - 1 if is_stripped else 0
            text = text[1:] if is_stripped else text
        return text


def token_decoder(tokenizer_json: str) -> TokenDecoder:
    """Return the decoder of a tokenizer.json."""
    steps = list(_decoder_steps(json.loads(tokenizer_json).get("decoder")))
    kinds = {step["type"] for step in steps}
    if not steps:
        return TokenDecoder(to_bytes=lambda piece: b" " + piece.encode(), open_stream=WordStream)
    if "ByteLevel" in kinds:
        return TokenDecoder(to_bytes=from_byte_level, open_stream=ByteLevelStream)
    if kinds & {"ByteFallback", "Metaspace", "Fuse"}:
        rules = _piece_rules(steps)
        return TokenDecoder(to_bytes=rules.to_bytes, open_stream=lambda: PieceStream(rules))
    raise InvalidModel(
        f"a tokenizer that decodes by {', '.join(sorted(kinds))} is not supported; supported are "
        "byte-level BPE, SentencePiece and whole words without a decoder"
    )


def _piece_rules(steps: Sequence[Mapping[str, Any]]) -> PieceRules:
    """Return the rules that correspond to a list of decoder steps."""
    rules: dict[str, Any] = {"replaced": ()}
    for step in steps:
        pattern = step.get("pattern", {})
        if step["type"] == "Replace" and "String" in pattern:
            rules["replaced"] += ((pattern["String"], step["content"]),)
        elif step["type"] == "Metaspace":
            mark = step["replacement"]
            rules["replaced"] += ((mark, " "),)
            has_first = step.get("prepend_scheme", "always") != "never"
            rules["first_mark"] = mark if has_first else None
        elif step["type"] == "ByteFallback":
            rules["has_bytes"] = True
        elif step["type"] == "Strip" and not step["stop"]:
            rules |= {"stripped": step["content"], "num_stripped": step["start"]}
        elif step["type"] != "Fuse":
            raise InvalidModel(
                f"a SentencePiece tokenizer with the decoder step {dict(step)} is not supported: "
                "its text cannot be streamed token by token"
            )
    return PieceRules(**rules)


def _decoder_steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a decoder, with nested sequences flattened."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _decoder_steps(step)
    else:
        yield decoder
