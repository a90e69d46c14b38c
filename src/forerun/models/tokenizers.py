"""Tokenizers, comparison of vocabularies, streaming detokenisation, and reading from files.

To read a tokenizer transformers loads most of itself and torch's compiler, another second of every
start. So the result is cached on disk by content and version, and the `tokenizers` library alone
does the work from there. Only chat templates, which few runs render, are left to transformers.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import msgspec
from tokenizers import Tokenizer as Backend

from forerun.bounded_read import ReadLimits, first_line, read_bytes
from forerun.cache import cache_folder, cached_json, hash_of
from forerun.errors import (
    ForerunError,
    IncompatibleDraft,
    InvalidModel,
    InvalidRequest,
    UnreadableInput,
)
from forerun.models.chat_template import TemplateProcess, TemplateRefused, drop_none

FROM_TRANSFORMERS: Mapping[str, bool] = MappingProxyType(
    {"local_files_only": True, "trust_remote_code": False}
)
"""Options for transformers' `from_pretrained`, which then fetches and runs nothing."""
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _build_alphabet() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_LEVEL: Mapping[str, int] = MappingProxyType(_build_alphabet())


def from_byte_level(piece: str) -> bytes:
    """Bytes of a token of a byte-level BPE; added tokens may be plain text instead."""
    try:
        return bytes(BYTE_LEVEL[character] for character in piece)
    except KeyError:
        return piece.encode()


@lru_cache(maxsize=1 << 16)
def _decode_whole(piece: str) -> str | None:
    """Return the text of a byte-level token; None if its bytes are not whole characters."""
    try:
        return from_byte_level(piece).decode()
    except UnicodeDecodeError:
        return None


class ByteLevelStream:
    """Stream for byte-level tokens; the bytes of an unfinished character are held back."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_between_characters = True

    def append(self, piece: str) -> str:
        if self._is_between_characters and (text := _decode_whole(piece)) is not None:
            return text
        text = self._decoder.decode(from_byte_level(piece))
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def finish(self) -> str:
        """Return U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceRules:
    """The decoding rules of a SentencePiece tokenizer, or of one whose tokens are words.

    Attributes:
        before: what is put before every token.
        has_bytes: whether "<0x0A>" stands for a byte.
        first_mark: character removed from the first token; None where none is.
        stripped: character removed from the beginning of the text, at most `num_stripped` times.
        num_stripped: see `stripped`.
    """

    before: str = ""
    replaced: tuple[tuple[str, str], ...] = ()
    has_bytes: bool = False
    first_mark: str | None = None
    stripped: str = " "
    num_stripped: int = 0

    def text_of(self, piece: str, *, is_first: bool = False) -> str:
        if is_first and self.first_mark is not None:
            piece = piece.replace(self.first_mark, "")
        for old, new in self.replaced:
            piece = piece.replace(old, new)
        return self.before + piece

    def find_byte(self, piece: str) -> int | None:
        found = BYTE_PIECE.fullmatch(piece) if self.has_bytes else None
        return None if found is None else int(found[1], 16)

    def to_bytes(self, piece: str) -> bytes:
        byte = self.find_byte(piece)
        return self.text_of(piece).encode() if byte is None else bytes([byte])


class PieceStream:
    """Stream for the tokens of `PieceRules`.

    A run of byte tokens is text only if all of it is UTF-8, and otherwise one U+FFFD per byte. So a
    run is held back until a token that is no byte ends it.
    """

    def __init__(self, rules: PieceRules) -> None:
        self._rules = rules
        self._run = bytearray()
        self._is_first = True
        self._num_to_strip = rules.num_stripped

    def append(self, piece: str) -> str:
        byte = self._rules.find_byte(piece)
        is_first, self._is_first = self._is_first, False
        if byte is not None:
            self._run.append(byte)
            return ""
        text = self._end_run() + self._rules.text_of(piece, is_first=is_first)
        return self._strip(text)

    def finish(self) -> str:
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


def find_rules(tokenizer_json: str) -> PieceRules | None:
    """Return the rules by which a tokenizer.json decodes; None for byte-level BPE.

    Others are SentencePiece with or without tokens that stand for single bytes, or without a
    decoder: words joined by spaces.
    """
    steps = list(_list_steps(json.loads(tokenizer_json).get("decoder")))
    kinds = {step["type"] for step in steps}
    if "ByteLevel" in kinds:
        return None
    if not steps:
        return PieceRules(before=" ", num_stripped=1)  # the space before the first word
    if kinds & {"ByteFallback", "Metaspace", "Fuse"}:
        return _read_rules(steps)
    raise InvalidModel(
        f"a tokenizer that decodes by {', '.join(sorted(kinds))} is not supported; supported are "
        "byte-level BPE, SentencePiece and whole words without a decoder"
    )


def _read_rules(steps: Sequence[Mapping[str, Any]]) -> PieceRules:
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


def _list_steps(decoder: Any) -> Iterator[Mapping[str, Any]]:
    """Return the steps of a decoder, with nested sequences flattened."""
    if decoder is None:
        return
    if decoder["type"] == "Sequence":
        for step in decoder["decoders"]:
            yield from _list_steps(step)
    else:
        yield decoder


NOTHING: Mapping[str, Any] = MappingProxyType({})
SHORT_CHARACTERS = 1 << 15
"""Texts with more characters are processed so that other requests can go on meanwhile."""
MAX_TEXT_CHARACTERS = 1 << 22
"""Of a text; the library takes over 100 bytes for each character of it."""
Messages = list[dict[str, Any]]
"""A conversation: each message with "role" and "content"."""
Renderer = Callable[[Messages, Mapping[str, Any]], str]
"""Renders a conversation, with variables for the template, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerDefinition:
    """The serialised definition of a tokenizer.

    Attributes:
        splits_special_tokens: whether a special token written out in a text is ordinary text.
    """

    content: str
    eos_token_id: int | None
    splits_special_tokens: bool
    chat_template: str | None


class Tokenizer:
    """Encoding, decoding and chat templates of one vocabulary.

    `load_renderer` returns the function that renders conversations with a template; it is called at
    the first conversation. Raises InvalidModel where tokens do not stand for fixed bytes.
    """

    def __init__(
        self, definition: TokenizerDefinition, load_renderer: Callable[[str], Renderer]
    ) -> None:
        self.definition = definition
        self._load_renderer = load_renderer
        self._template = ""  # empty: the one of the model folder
        with as_invalid("the tokenizer cannot be loaded"):
            self._backend = Backend.from_str(definition.content)
        # Whether a text is too long is decided by the engine.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = definition.splits_special_tokens
        self._rules = find_rules(definition.content)
        self._bytes: dict[int, bytes] = {}

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text, with the special tokens (such as a start token) that the model expects.

        Raises:
            InvalidRequest: the text holds a lone surrogate, which stands for no character, or is
                longer than any context.
        """
        if len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidRequest(
                f"the text has {len(text)} characters; at most {MAX_TEXT_CHARACTERS} are tokenised"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"character {error.start} of the text is {text[error.start]!r}, half of a "
                "surrogate pair: send the text as UTF-8"
            ) from None
        backend, options = self._backend, {"add_special_tokens": add_special_tokens}
        with as_invalid("the tokenizer cannot encode a text"):
            if len(text) <= SHORT_CHARACTERS:
                return list(backend.encode(text, **options).ids)
            # Other threads may run while a batch is encoded.
            (found,) = backend.encode_batch_fast([text], **options)
            return list(found.ids)

    def make_specials_plain(self) -> Tokenizer:
        """Return this tokenizer with special tokens written out in a text read as plain text."""
        return Tokenizer(replace(self.definition, splits_special_tokens=True), self._load_renderer)

    def normalised(self, text: str) -> str:
        """Return what a text is changed to before it is encoded."""
        normalizer = self._backend.normalizer
        with as_invalid("the tokenizer cannot normalise a text"):
            return text if normalizer is None else str(normalizer.normalize_str(text))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids, leaving special tokens out."""
        with as_invalid("the tokenizer cannot decode tokens"):
            return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        with_answer_begun: bool = True,
        variables: Mapping[str, Any] = NOTHING,
    ) -> str:
        """Render a conversation as a prompt text; encode it without special tokens.

        Args:
            messages: each with "role" and "content".
            with_answer_begun: whether it ends where the assistant's next words go, or where the
                last message ends.
            variables: of the template beside the messages, such as "tools".

        Raises:
            InvalidRequest: the tokenizer has no chat template, or the template refuses the
                conversation.
        """
        if self.definition.chat_template is None:
            raise InvalidRequest("this model has no chat template; give a plain prompt")
        given = {**variables, "add_generation_prompt": with_answer_begun}
        return self._render([dict(message) for message in messages], given)

    @cached_property
    def _render(self) -> Renderer:
        return self._load_renderer(self._template)

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be rendered."""
        return self.definition.chat_template is not None

    def use_chat_template(self, template: str) -> None:
        """Render conversations with this template from now on."""
        self.definition = replace(self.definition, chat_template=template)
        self._template = template
        self.__dict__.pop("_render", None)

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if there is one."""
        return self.definition.eos_token_id

    @cached_property
    def vocabulary(self) -> dict[int, str]:
        """Return the written form of every token."""
        return {token: piece for piece, token in self._backend.get_vocab().items()}

    @cached_property
    def added(self) -> dict[int, tuple[str, bool]]:
        """Return the text of each added token, and whether it is special."""
        tokens = self._backend.get_added_tokens_decoder()
        return {token: (added.content, added.special) for token, added in tokens.items()}

    def open_stream(self) -> ByteLevelStream | PieceStream:
        """Return a stream that turns tokens into text, equal to decoding all of them at once."""
        return ByteLevelStream() if self._rules is None else PieceStream(self._rules)

    def piece(self, token: int) -> str | None:
        """Return the written form of a token; None for special tokens and padding ids."""
        if token in self.added:
            content, is_special = self.added[token]
            return None if is_special else content
        return self.vocabulary.get(token)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token within a text; none for special tokens and padding."""
        known = self._bytes.get(token)
        if known is None:
            piece, to_bytes = self.piece(token), from_byte_level
            if self._rules is not None:
                to_bytes = self._rules.to_bytes
            known = b"" if piece is None else to_bytes(piece)
            self._bytes[token] = known
        return known


class Detokenizer:
    """Converts ids to text one by one; bytes of an unfinished character are held back.

    The text equals `Tokenizer.decode` of all ids, at the cost of a table look-up per token. A
    space that the tokenizer's decoder removes from the beginning of a text is removed here too.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = tokenizer.open_stream()
        self.text = ""

    def append(self, token: int) -> str:
        """Add one id and return the text it completed, which may be empty."""
        return self.extend((token,))

    def extend(self, tokens: Sequence[int]) -> str:
        """Add several ids and return the text they completed."""
        piece, append = self._tokenizer.piece, self._stream.append
        text = "".join([append(p) for t in tokens if (p := piece(t)) is not None])
        self.text += text
        return text

    def finish(self) -> str:
        """End the text and return the rest; an unfinished character becomes U+FFFD."""
        text = self._stream.finish()
        self.text += text
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyComparison:
    """The result of comparing two vocabularies.

    Attributes:
        num_different: ids that differ.
        first_differences: (id, target's token, draft's token) of the first few; None where a
            tokenizer has no such id.
    """

    identical: bool
    num_target: int
    num_draft: int
    num_different: int
    first_differences: tuple[tuple[int, str | None, str | None], ...]


def compare_vocabularies(
    target: Tokenizer, draft: Tokenizer, max_shown: int = 8
) -> VocabularyComparison:
    """Compare two tokenizers id by id.

    Models padded to different widths compare equal as long as their tokenizers are: padding is the
    model's, not the tokenizer's.
    """
    ours, theirs = target.vocabulary, draft.vocabulary
    different: list[int] = []
    if ours != theirs:
        ids = sorted(ours.keys() | theirs.keys())
        different = [token for token in ids if ours.get(token) != theirs.get(token)]
    return VocabularyComparison(
        identical=not different,
        num_target=len(ours),
        num_draft=len(theirs),
        num_different=len(different),
        first_differences=tuple((t, ours.get(t), theirs.get(t)) for t in different[:max_shown]),
    )


def check_vocabularies(target: Tokenizer, draft: Tokenizer) -> None:
    """Refuse a draft with another vocabulary; raises IncompatibleDraft."""
    comparison = compare_vocabularies(target, draft)
    if not comparison.identical:
        shown = "; ".join(
            f"id {i}: target {t!r}, draft {d!r}" for i, t, d in comparison.first_differences
        )
        raise IncompatibleDraft(
            f"the draft's tokenizer is not the target's ({comparison.num_draft} and "
            f"{comparison.num_target} tokens; {shown}); use a draft trained with the same tokenizer"
        )


LIMITS = ReadLimits(max_bytes=1 << 27)
MAX_TOKENS = 1 << 22
"""Ids of a tokenizer; the library takes time and memory for every id up to the largest."""
MAX_CHARACTERS = 1 << 14
"""Of a token."""
MAX_ADDED_CHARACTERS = 1 << 20
"""Of all added tokens together, each of whose characters takes the library about 100 bytes."""
OTHER_FILES = frozenset({"generation_config.json", "model.safetensors.index.json"})
"""Files that say nothing of a tokenizer."""
SUFFIXES = frozenset({".jinja", ".json", ".model", ".tiktoken", ".txt"})
"""Suffixes of the files that may determine a tokenizer."""


def read_tokenizer(folder: Path, cache: Path | None = None) -> Tokenizer:
    """Read the tokenizer of a model folder, or its serialised copy in the cache."""
    kept = cached_json(
        cache or cache_folder(),
        f"tokenizer-and-template-{key_of(folder)}",
        lambda: asdict(_read_definition(load_by_transformers(folder))),
    )
    return Tokenizer(
        TokenizerDefinition(**kept),
        lambda template: _build_renderer(load_by_transformers(folder), template),
    )


def adopt(backend: Any) -> Tokenizer:
    """Wrap a transformers tokenizer; raises InvalidModel where its kind is not supported."""
    return Tokenizer(_read_definition(backend), lambda template: _build_renderer(backend, template))


def _read_definition(backend: Any) -> TokenizerDefinition:
    """Return the definition of a tokenizer that transformers has read."""
    if not backend.is_fast:
        raise InvalidModel(f"{type(backend).__name__} has no tokenizer.json; convert it to one")
    return TokenizerDefinition(
        content=backend.backend_tokenizer.to_str(),
        eos_token_id=backend.eos_token_id,
        splits_special_tokens=backend.split_special_tokens,
        chat_template=_read_template(backend),
    )


def _read_template(backend: Any) -> str | None:
    """Return the chat template of a tokenizer, the default one of several; None without one."""
    template = backend.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template is not None and not isinstance(template, str):
        raise InvalidModel(f"the chat template is {template!r:.60}; it must be text")
    return template or None


def _build_renderer(backend: Any, template: str = "") -> Renderer:
    """Return a function that renders a chat template within limits; by default the tokenizer's."""
    special = {name: str(token) for name, token in backend.special_tokens_map.items()}
    return render_template(template or str(_read_template(backend)), special)


def render_template(template: str, special: Mapping[str, str]) -> Renderer:
    """Return a function that renders a chat template, which may name special tokens."""
    # Two, so that short conversations do not wait for long ones.
    short, long = TemplateProcess(), TemplateProcess()

    def render(messages: Messages, given: Mapping[str, Any]) -> str:
        variables = {
            "tools": None,
            "documents": None,
            **given,
            **special,
            "messages": drop_none(messages),
        }
        try:
            num_characters = sum(len(str(message.get("content"))) for message in messages)
            process = short if num_characters <= SHORT_CHARACTERS else long
            return process.render(template, variables)
        except TemplateRefused as error:
            raise InvalidRequest(f"the chat template refuses the conversation: {error}") from error

    return render


def load_by_transformers(folder: Path) -> Any:
    """Read the tokenizer of a folder with transformers."""
    from transformers import AutoTokenizer

    check_tokens(folder)
    try:
        with as_invalid(f"the tokenizer in {folder} cannot be loaded"):
            return AutoTokenizer.from_pretrained(folder, **FROM_TRANSFORMERS)
    except InvalidModel as error:
        if (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists():
            raise InvalidModel(
                f"{folder} has its tokenizer as tokenizer.model alone; to convert it, run "
                "`pip install sentencepiece protobuf` and then transformers' "
                f"AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) ({error})"
            ) from error
        raise


@contextmanager
def as_invalid(problem: str) -> Iterator[None]:
    """Turn errors of the tokenizers library, a panic of its Rust code too, into InvalidModel."""
    try:
        yield
    except (ForerunError, MemoryError):
        raise
    except BaseException as error:
        # The class of panics has no name to import, and is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InvalidModel(f"{problem}: {first_line(error)}") from error


_Characters = Annotated[str, msgspec.Meta(max_length=MAX_CHARACTERS)]
_Id = Annotated[int, msgspec.Meta(ge=0, lt=MAX_TOKENS)]


class _Added(msgspec.Struct):
    content: _Characters


class _NumberedAdded(_Added):
    id: _Id


class _Model(msgspec.Struct):
    vocab: dict[_Characters, _Id] | list[tuple[_Characters, float]] | None = None


class _Definition(msgspec.Struct):
    model: _Model | None = None
    added_tokens: list[_NumberedAdded] = []


class _Settings(msgspec.Struct):
    added_tokens_decoder: dict[_Id, _Added] = {}


def check_tokens(folder: Path) -> None:
    """Refuse the tokenizer of a folder whose ids or tokens are too large, before it is loaded."""
    tables: dict[str, Any] = {"tokenizer.json": _Definition, "tokenizer_config.json": _Settings}
    if not (folder / "tokenizer.json").is_file():
        tables |= dict.fromkeys(("vocab.json", "added_tokens.json"), dict[_Characters, _Id])
    for path in [folder / name for name in tables if (folder / name).is_file()]:
        try:
            table = msgspec.json.decode(read_bytes(path, LIMITS), type=tables[path.name])
        except (UnreadableInput, msgspec.ValidationError, RecursionError) as error:
            raise InvalidModel(
                f"the tokenizer in {folder} cannot be loaded: {path.name}: {first_line(error)}"
            ) from error
        except ValueError:
            continue  # transformers says what is wrong
        added = table.added_tokens if isinstance(table, _Definition) else ()
        if (most := sum(len(token.content) for token in added)) > MAX_ADDED_CHARACTERS:
            raise InvalidModel(
                f"{path} has added tokens of {most} characters in all; at most "
                f"{MAX_ADDED_CHARACTERS} are loaded"
            )


def list_versions() -> bytes:
    """Return the versions of the libraries that determine how a tokenizer behaves."""
    return "\0".join(version(name) for name in ("transformers", "tokenizers")).encode()


def key_of(folder: Path) -> str:
    """Hash the files and library versions that determine how a tokenizer behaves."""
    parts = [list_versions()]
    for path in sorted([*folder.iterdir(), *folder.glob("additional_chat_templates/*")]):
        if path.suffix in SUFFIXES and path.name not in OTHER_FILES and path.is_file():
            parts.append(
                path.name.encode() + b"\0" + hashlib.sha256(read_bytes(path, LIMITS)).digest()
            )
    return hash_of(b"".join(parts))
