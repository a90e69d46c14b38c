"""What the tokens of a vocabulary stand for: the two alphabets language models write bytes in."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from forerun.errors import InvalidModel

__all__ = ["from_byte_level", "from_sentencepiece", "piece_decoder"]

SPACE_MARK = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece writes spaces with it
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE writes printable bytes as themselves and the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL: Mapping[str, int] = MappingProxyType(byte_level_alphabet())


def from_byte_level(piece: str) -> bytes:
    """Bytes of a token of a byte-level BPE; added tokens may be plain text instead."""
    try:
        return bytes(BYTE_LEVEL[character] for character in piece)
    except KeyError:
        return piece.encode()


def from_sentencepiece(piece: str) -> bytes:
    """Bytes of a SentencePiece token: text with marked spaces, or one byte as "<0x0A>"."""
    byte = BYTE_PIECE.fullmatch(piece)
    if byte is not None:
        return bytes([int(byte[1], 16)])
    return piece.replace(SPACE_MARK, " ").encode()


def piece_decoder(tokenizer_json: str) -> Callable[[str], bytes]:
    """The alphabet of a tokenizer.

    Args:
        tokenizer_json: its definition, as in tokenizer.json.

    Raises:
        InvalidModel: its tokens do not stand for fixed bytes.
    """
    kinds = set(decoder_kinds(json.loads(tokenizer_json).get("decoder")))
    if "ByteLevel" in kinds:
        return from_byte_level
    if kinds & {"ByteFallback", "Metaspace"}:
        return from_sentencepiece
    raise InvalidModel(
        f"a tokenizer that decodes by {', '.join(sorted(kinds)) or 'nothing'} is not supported; "
        "supported are byte-level BPE and SentencePiece"
    )


def decoder_kinds(decoder: Any) -> Iterator[str]:
    """Types of the steps of a decoder."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from decoder_kinds(step)
    else:
        yield decoder["type"]
