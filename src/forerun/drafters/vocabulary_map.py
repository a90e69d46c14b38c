"""Tokens of two tokenizers matched by their bytes, and a text kept in the tokens of both.

A draft with another tokenizer drafts in one of two ways (Timor et al. 2025, arXiv:2502.05202): from
the tokens that both vocabularies have (TLI), or as text that is encoded again (SLEM).
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

from forerun.errors import IncompatibleDraft
from forerun.models.tokenizers import BYTE_PIECE, Tokenizer

Way = Literal["tli", "slem"]
LOOK_BEHIND = 24
"""Last tokens of a text that are encoded again as it grows."""
MIN_ALIGNED = 0.8
"""Share of a text's target tokens that the draft must have at the same places for TLI. Of the pairs
in benchmarks/vocabularies TLI is accepted more often at 86%, and SLEM at 77%."""
MIN_SPELLED = 0.1
"""Share of the words of the samples that both must be able to spell."""
PROBES = ("Ab", "\u00e9\u00c5", "\ufb01\uff21\u2460")
"""Texts that lower-casing, the removal of accents, and NFKC change."""
SPACES = "a  b"
SAMPLES = (
    "The committee said on Tuesday that it would not publish the report before next year.",
    "She opened the window, looked at the grey water below and thought of nothing at all.",
    "def merge(left, right):\n    result = []\n    while left and right:\n        result.append(",
    "for (int i = 0; i < count; i++) {\n    total += values[i];\n}\nreturn total / count;\n",
    "Let x be the number of apples; then 3x + 12 = 48, so x = (48 - 12) / 3 = 12.",
    "La r\u00e9union a dur\u00e9 trois heures, mais personne n'a pu expliquer le retard.",
    "Nach dem Essen gingen sie durch die Stra\u00dfen zur\u00fcck zum Bahnhof.",
    "\u041e\u043d\u0430 \u043f\u0440\u0438\u0448\u043b\u0430 \u0434\u043e\u043c\u043e\u0439 "
    "\u043f\u043e\u0437\u0434\u043d\u043e \u0432\u0435\u0447\u0435\u0440\u043e\u043c.",
    "\u6211\u4eec\u660e\u5929\u65e9\u4e0a\u4e00\u8d77\u53bb\u516c\u56ed\u6563\u6b65\u3002",
)
"""Texts on whose words the tokens of both are compared, as far as both can spell them."""


class SpelledText(NamedTuple):
    """The tokens of a text, and how many of its bytes end with each."""

    ids: list[int]
    ends: list[int]


def cut_text(tokenizer: Tokenizer, text: str) -> SpelledText | None:
    """Encode a text without special tokens; None if the tokens do not spell it byte by byte."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = [tokenizer.token_bytes(token) for token in ids]
    spelled, wanted = b"".join(pieces), text.encode()
    extra = len(spelled) - len(wanted)
    if spelled != b" " * extra + wanted or extra > 1:
        return None
    return SpelledText(ids=ids, ends=[end - extra for end in accumulate(map(len, pieces))])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabularyMap:
    """Map between the tokens of a target and of a draft with another tokenizer.

    Attributes:
        target: tokenizer that reads special tokens written out in a text as ordinary text.
        special: ids of special tokens of the target, and the draft's id of those that it has.
        first_ids: special tokens that the draft expects before a text.
        shared: the draft's id of every token that both have; no two have the same.
        aligned: share of the target's tokens of sample texts that the draft has at the same places.
    """

    target: Tokenizer
    draft: Tokenizer
    target_ids: Mapping[bytes, int]
    draft_ids: Mapping[bytes, int]
    special: Mapping[int, int | None]
    first_ids: Sequence[int]
    shared: Mapping[int, int]
    aligned: float

    @property
    def way(self) -> Way:
        """Method of drafting: TLI if the tokens mostly end at the same places, otherwise SLEM."""
        return "tli" if self.aligned >= MIN_ALIGNED else "slem"

    @property
    def reason(self) -> str:
        """A sentence with the number of shared tokens and the method of drafting."""
        kind = "shared tokens (TLI)" if self.way == "tli" else "text encoded again (SLEM)"
        relation = "at least" if self.way == "tli" else "less than"
        return (
            f"{len(self.shared):,} of the target's {len(self.target.vocabulary):,} tokens are the "
            f"draft's too, and {self.aligned:.0%} of the target's tokens in sample texts are "
            f"tokens of the draft at the same places, {relation} {MIN_ALIGNED:.0%}: "
            f"drafts by {kind}"
        )

    def continuation(self, committed: Sequence[int], drafted: Sequence[int]) -> list[int]:
        """Return the target's tokens of what the draft wrote after a text.

        The end of the committed text is encoded with it, because a token's neighbours decide where
        it ends. Where it then ends within a token, the rest of that token is encoded by itself.
        """
        tail = self._tail(committed)
        raw, ending = bytearray(tail), []
        for token in drafted:
            if not (piece := self.draft.token_bytes(token)):
                ending = [t for t, own in self.special.items() if own == token]
                break
            raw += piece
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            text, ending = raw[: error.start].decode(), []
        return [*self._after(len(tail), text), *ending]

    def _tail(self, committed: Sequence[int]) -> bytes:
        """Return the bytes of the last committed tokens, from the beginning of a character on."""
        pieces: list[bytes] = []
        for token in reversed(committed[-LOOK_BEHIND:]):
            if token in self.special:
                break
            pieces.append(self.target.token_bytes(token))
        while pieces and _is_within_character(pieces[-1], 0):
            pieces.pop()
        return b"".join(reversed(pieces))

    def _after(self, start: int, text: str) -> list[int]:
        """Return the target's tokens of a text from byte `start` on; none if it cannot be cut."""
        found = cut_text(self.target, text)
        if found is None or not found.ends or found.ends[-1] <= start:
            return []
        index = next(i for i, end in enumerate(found.ends) if end > start)
        begin = found.ends[index - 1] if index else 0
        if begin == start:
            return found.ids[index:]
        rest = self._spelled(text.encode()[start : found.ends[index]])
        return [*rest, *found.ids[index + 1 :]] if rest else []

    def _spelled(self, part: bytes) -> list[int]:
        """Return tokens of the target that spell part of a word; none if there are none."""
        if part in self.target_ids:
            return [self.target_ids[part]]
        ids = self.target.encode(part.decode(errors="replace"), add_special_tokens=False)
        if b"".join(map(self.target.token_bytes, ids)) == part:
            return ids
        each = [self.target_ids.get(bytes([byte])) for byte in part]
        return [token for token in each if token is not None] if None not in each else []


def map_vocabularies(target: Tokenizer, draft: Tokenizer) -> VocabularyMap:
    """Match the tokens of two tokenizers.

    Ordinary tokens match by their bytes. Special tokens match special tokens written the same, and
    the token that ends a text matches the other's where neither has one written the same.
    """
    target, draft = target.make_specials_plain(), draft.make_specials_plain()
    for role, tokenizer in (("target", target), ("draft", draft)):
        _check_text(role, tokenizer)
    target_ids, draft_ids = _ids_by_bytes(target), _ids_by_bytes(draft)
    _check_ends(target, "draft", draft_ids)
    _check_ends(draft, "target", target_ids)
    special = _match_special(target, draft)
    shared = {token: draft_ids[piece] for piece, token in target_ids.items() if piece in draft_ids}
    aligned = _aligned_share(target, draft)
    if aligned is None:
        raise IncompatibleDraft(
            "there are hardly any words that both tokenizers can spell, and they have only "
            f"{len(shared)} tokens in common; use a draft for the target's languages"
        )
    return VocabularyMap(
        target=target,
        draft=draft,
        target_ids=target_ids,
        draft_ids=draft_ids,
        special=special,
        first_ids=_ids_before_text(draft),
        shared=shared | {token: own for token, own in special.items() if own is not None},
        aligned=aligned,
    )


def _check_text(role: str, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer whose tokens do not carry a text unchanged."""
    for text in PROBES:
        shown = tokenizer.normalised(text).strip(" \u2581")
        if shown != text:
            raise IncompatibleDraft(
                f"the {role}'s tokenizer turns {text!r} into {shown!r} before it encodes a text, "
                "and tokens of a changed text cannot be matched by bytes: use a draft with the "
                "target's tokenizer, or a tokenizer without that normaliser"
            )
    if cut_text(tokenizer, SPACES) is None:
        raise IncompatibleDraft(
            f"the {role}'s tokenizer does not keep a text such as {SPACES!r} byte by byte: its "
            "tokens say nothing of the space between words; use a draft with the target's "
            "tokenizer, or a tokenizer with a decoder"
        )


def _special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens by their written form, the one that ends a text included."""
    found = {text: token for token, (text, special) in tokenizer.added.items() if special}
    end = tokenizer.eos_token_id
    if end is not None and end in tokenizer.vocabulary:
        found[tokenizer.vocabulary[end]] = end
    return found


def _ids_before_text(tokenizer: Tokenizer) -> list[int]:
    ids = tokenizer.encode(SPACES)
    bare = tokenizer.encode(SPACES, add_special_tokens=False)
    starts = range(len(ids) - len(bare) + 1)
    return ids[: next(start for start in starts if ids[start : start + len(bare)] == bare)]


def _ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Return ordinary tokens by bytes; of several the lowest id that is no single byte counts."""
    special = {*_special_ids(tokenizer).values()}
    found: dict[bytes, int] = {}
    vocabulary = tokenizer.vocabulary
    for token in sorted(vocabulary, key=lambda t: (bool(BYTE_PIECE.fullmatch(vocabulary[t])), t)):
        piece = tokenizer.token_bytes(token)
        if piece and token not in special:
            found.setdefault(piece, token)
    return found


def _check_ends(tokenizer: Tokenizer, other: str, ordinary: Mapping[bytes, int]) -> None:
    """Refuse a pair where the token that ends a text is ordinary text to the other tokenizer."""
    end = tokenizer.eos_token_id
    text = None if end is None else tokenizer.vocabulary.get(end)
    if text is not None and text.encode() in ordinary:
        raise IncompatibleDraft(
            f"special tokens collide: {text!r} ends a text in one tokenizer and is an ordinary "
            f"token, {ordinary[text.encode()]}, of the {other}'s; use a draft with the target's "
            "tokenizer"
        )


def _match_special(target: Tokenizer, draft: Tokenizer) -> dict[int, int | None]:
    """Return every special token of the target with that of the draft, or None."""
    ours, theirs = _special_ids(target), _special_ids(draft)
    found: dict[int, int | None] = {token: theirs.get(text) for text, token in ours.items()}
    end, other = target.eos_token_id, draft.eos_token_id
    if end in found and found[end] is None and other not in found.values():
        found[end] = other
    return found


def _aligned_share(target: Tokenizer, draft: Tokenizer) -> float | None:
    """Return the share of the target's tokens that the draft has at the same places in words.

    None if there are hardly any words that both can spell. Words that the target spells almost byte
    by byte are left out if there are others.
    """
    words = [f" {word}" for text in SAMPLES for word in text.split(" ") if word]
    pairs = [(cut_text(target, word), cut_text(draft, word)) for word in words]
    spelled = [(ours, theirs) for ours, theirs in pairs if ours is not None and theirs is not None]
    if len(spelled) < MIN_SPELLED * len(words):
        return None
    known = [pair for pair in spelled if 2 * len(pair[0].ids) <= pair[0].ends[-1]]
    spans = [({*_spans(ours)}, {*_spans(theirs)}) for ours, theirs in known or spelled]
    num_tokens = sum(len(ours) for ours, _ in spans)
    num_aligned = sum(len(ours & theirs) for ours, theirs in spans)
    return num_aligned / num_tokens


def _spans(cut: SpelledText) -> Iterator[tuple[int, int]]:
    return zip([0, *cut.ends], cut.ends, strict=False)


def _is_within_character(text: bytes | bytearray, place: int) -> bool:
    return place < len(text) and text[place] & 0xC0 == 0x80


class ReencodedText:
    """The text of a target's tokens in tokens of the draft, kept up to date as it grows.

    Of a grown text the last LOOK_BEHIND tokens are encoded again with what is new, from where both
    encodings end a token at the same byte. Where they never do, all of it is encoded again. A
    special token that the draft does not have is left out. The bytes of an unfinished character
    follow as tokens of one byte.
    """

    def __init__(self, vocabulary: VocabularyMap, offset: int = 0) -> None:
        self._map = vocabulary
        self._offset = offset
        self._num_read = 0
        self._has_begun = False
        self.ids = self._own(vocabulary.first_ids)
        self.is_usable = bool(self.ids)
        self._begin()

    def _begin(self) -> None:
        self._start = len(self.ids)
        self._text = bytearray()
        self._ends: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def read(self, committed: Sequence[int]) -> None:
        new, self._num_read = committed[self._num_read :], len(committed)
        for token in new:
            if token in self._map.special:
                self._text += self._decoder.decode(b"", final=True).encode()
                self._encode()
                own, before = self._map.special[token], self._map.first_ids
                if own is not None and not (own in before and len(self.ids) == len(before)):
                    self.ids += self._own([own])
                self._begin()
            else:
                self._text += self._decoder.decode(self._bytes(token)).encode()
        self._encode()
        unfinished = self._decoder.getstate()[0]
        each = [self._map.draft_ids.get(bytes([byte])) for byte in unfinished]
        self.ids += self._own([token for token in each if token is not None])
        self.is_usable = bool(self.ids) and None not in each

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of an ordinary token, without a space that decoding removes."""
        piece = self._map.target.token_bytes(token)
        is_first, self._has_begun = not self._has_begun, True
        if is_first and piece[:1] == b" " and self._map.target.decode([token])[:1] != " ":
            return piece[1:]
        return piece

    def _encode(self) -> None:
        """Encode what the text has grown by, and correct the tokens before it."""
        del self.ids[self._start + len(self._ends) :]  # bytes of an unfinished character
        if self._ends and self._ends[-1] == len(self._text):
            return
        first = max(0, len(self._ends) - LOOK_BEHIND)
        while first and _is_within_character(self._text, self._ends[first - 1]):
            first -= 1
        start = self._ends[first - 1] if first else 0
        if start > 0 and self._join(start, first):
            return
        found = cut_text(self._map.draft, self._text.decode())
        if found is None:
            ids = self._map.draft.encode(self._text.decode(), add_special_tokens=False)
            found = SpelledText(ids=ids, ends=[])
        self.ids[self._start :] = self._own(found.ids)
        self._ends = found.ends

    def _join(self, start: int, first: int) -> bool:
        """Encode the text from a token on; returns whether it meets the tokens before it."""
        found = cut_text(self._map.draft, self._text[start:].decode())
        if found is None:
            return False
        places = {end: index for index, end in enumerate(self._ends[first:], first + 1)}
        for index, end in enumerate(found.ends, 1):
            kept = places.get(start + end)
            if end > 0 and kept is not None:
                self.ids[self._start + kept :] = self._own(found.ids[index:])
                self._ends[kept:] = [start + later for later in found.ends[index:]]
                return True
        return False

    def _own(self, ids: Sequence[int]) -> list[int]:
        return [self._offset + token for token in ids]
