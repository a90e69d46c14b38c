"""Reads prompts and conversations from files and folders.

A record has "prompt" or "messages", and perhaps "response" and "tag"; conversations of ShareGPT
("conversations" of "from" and "value") are read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import msgspec

from forerun.bounded_read import (
    ReadLimits,
    check_regular,
    first_line,
    json_lines,
    read_json,
    read_parquet,
    read_text,
)
from forerun.errors import InvalidRequest, UnreadableInput, explain_invalid
from forerun.models.catalog import chat_prompts, held_out_prompts

if TYPE_CHECKING:
    from forerun.models.tokenizers import Tokenizer

SUFFIXES = (".json", ".jsonl", ".parquet", ".txt")
"""Suffixes of all files that are read."""
SEPARATOR = "---"
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""Other roles of ShareGPT, such as "system", are those of chat templates."""
MAX_RECORDS = 1_000_000
MAX_CHARACTERS = 1 << 30
STREAM = ReadLimits(
    max_bytes=1 << 34, max_seconds=3600.0, max_line_bytes=1 << 24, max_rows=MAX_RECORDS
)
"""Limits of files that are read record by record; the time includes tokenisation."""
TABLE = ReadLimits(max_bytes=1 << 27, max_seconds=3600.0, max_rows=MAX_RECORDS)

STRIDE = 7
"""Shipped prompts are reordered with this stride, so that those of one module are not adjacent."""

Message = Mapping[str, str]
"""A message of a conversation, with the keys "role" and "content"."""
Rows = Iterable[tuple[str, object]]
"""Records, each behind its place for error messages."""
Text = Annotated[str, msgspec.Meta(min_length=1)]
Ids = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]


class _Message(msgspec.Struct, frozen=True):
    role: Text
    content: str


class _Turn(msgspec.Struct, frozen=True):
    """A message of ShareGPT."""

    sender: Text = msgspec.field(name="from")
    value: str


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """One record of a file, in forerun's or ShareGPT's form."""

    prompt: Text | None = None
    text: Text | None = None
    messages: Annotated[tuple[_Message, ...], msgspec.Meta(min_length=1)] = ()
    turns: tuple[_Turn, ...] = msgspec.field(default=(), name="conversations")
    response: Text | None = None
    tag: str = ""
    prompt_ids: Ids = ()
    token_ids: Ids = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEntry:
    """One record of a prompt file: a text or a conversation.

    Attributes:
        text: a text to continue as it is, None for a conversation.
        prompt_ids: tokens of the prompt, where the record has them.
        token_ids: tokens of the response after them.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    response: str | None = None
    tag: str = ""
    prompt_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def num_characters(self) -> int:
        contents = sum(len(message["content"]) for message in self.messages)
        return len(self.text or "") + contents + len(self.response or "")


def read_prompts(path: Path) -> list[PromptEntry]:
    """Read all prompts of a file or a folder.

    Raises:
        InvalidRequest: there is none, or one is damaged.
    """
    entries = list(read_entries(path))
    if not entries:
        raise InvalidRequest(f"{path} has no prompts")
    return entries


def shipped_prompts(tokenizer: Tokenizer, *, raw: bool) -> list[PromptEntry]:
    """Return chats for a model with a chat template, or else beginnings of Python modules."""
    is_chat = tokenizer.has_chat_template and not raw
    prompts = chat_prompts() if is_chat else held_out_prompts()
    entries = [PromptEntry(where=prompt.name, text=prompt.text) for prompt in prompts]
    return neighbours_apart(entries)


Item = TypeVar("Item")


def neighbours_apart(items: Sequence[Item], stride: int = STRIDE) -> list[Item]:
    """Reorder items with a stride."""
    return [item for start in range(stride) for item in items[start::stride]]


def prompt_ids(entry: PromptEntry, tokenizer: Tokenizer, *, raw: bool) -> list[int]:
    """Return the ids of a prompt as the target reads it.

    A conversation goes through the chat template, without a last answer of the assistant. So does a
    text, as a user's message, if there is a template, unless `raw`.

    Raises:
        InvalidRequest: it is a conversation, and there is no template or it refuses it.
    """
    messages: Sequence[Message] = entry.messages
    if entry.text is not None:
        if raw or not tokenizer.has_chat_template:
            return tokenizer.encode(entry.text)
        messages = [{"role": "user", "content": entry.text}]
    elif messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    try:
        text = tokenizer.render_chat(messages)
    except InvalidRequest as error:
        raise InvalidRequest(f"{entry.where} is a conversation, and {error}") from error
    return tokenizer.encode(text, add_special_tokens=False)


def plain_text(entry: PromptEntry) -> str:
    """Return the text of a prompt where conversations cannot be used."""
    if entry.text is None:
        raise InvalidRequest(f'{entry.where} is a conversation; give its text as a "prompt"')
    return entry.text


def read_entries(path: Path) -> Iterator[PromptEntry]:
    """Read the records of a file, or of every file of a folder in order of names.

    The suffix decides how a file is read: JSON lines, a JSON list, a Parquet table, or plain text,
    in which lines of "---" separate the prompts or, where there are none, every line is one.
    """
    num_characters = 0
    try:
        entries = chain.from_iterable(map(entries_of, _list_sources(path)))
        for number, entry in enumerate(entries, start=1):
            num_characters += entry.num_characters
            if num_characters > MAX_CHARACTERS or number > MAX_RECORDS:
                raise InvalidRequest(
                    f"{path} has more than {MAX_CHARACTERS} characters or {MAX_RECORDS} records "
                    "of prompts, the limits here; give less of it"
                )
            yield entry
    except UnreadableInput as error:
        raise InvalidRequest(f"prompts: {error}") from error
    except OSError as error:
        raise InvalidRequest(f"prompts cannot be read from {path}: {error}") from error


def _list_sources(path: Path) -> list[Path]:
    """Return the file as a list of one, or all prompt files below a folder."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise InvalidRequest(
            f"the folder {path} has no {', '.join(SUFFIXES)} file with prompts; source code and "
            'other texts are no prompts: write their beginnings to a .jsonl file as {"prompt": ...}'
        )
    return found


def entries_of(source: Path) -> Iterator[PromptEntry]:
    if source.suffix == ".txt":
        yield from texts_of(source)
        return
    readers: dict[str, Callable[[Path], Rows]] = {
        ".json": _read_json_rows,
        ".jsonl": lambda file: ((f"{file}:{n}", row) for n, row in json_lines(file, STREAM)),
        ".parquet": _read_parquet_rows,
    }
    if source.suffix not in readers:
        raise InvalidRequest(
            f"{source} has the suffix {source.suffix!r}; prompts are read from files that end in "
            f"{', '.join(SUFFIXES)}: rename it by its format"
        )
    for where, row in readers[source.suffix](source):
        yield _build_entry(row, where)


def _read_json_rows(file: Path) -> Rows:
    """Yield the entries of a JSON list, which is the file itself or the only list in its object."""
    values = read_json(file)
    if isinstance(values, Mapping):
        lists = [value for value in values.values() if isinstance(value, list)]
        values = lists[0] if len(lists) == 1 else None
    if not isinstance(values, list):
        raise InvalidRequest(
            f"{file} is JSON but no list of records; if it has one record per line, name it .jsonl"
        )
    for number, row in enumerate(values, start=1):
        yield f"{file}, record {number}", {"prompt": row} if isinstance(row, str) else row


def _read_parquet_rows(file: Path) -> Rows:
    import pyarrow.parquet as pq
    from pyarrow import ArrowException

    check_regular(file)  # opening a pipe may never return
    try:
        columns = [
            name for name in pq.read_schema(file).names if name in _Row.__struct_encode_fields__
        ]
    except (OSError, ArrowException) as error:
        raise InvalidRequest(f"{file} is no whole Parquet file: {first_line(error)}") from error
    number = 0
    for batch in read_parquet(file, columns, TABLE):
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def texts_of(file: Path) -> Iterator[PromptEntry]:
    """Yield the prompts of a plain text file, each with the number of its first line."""
    text = StringIO(read_text(file), newline=None)  # a list of millions of lines takes gigabytes
    is_split = any(line.removesuffix("\n") == SEPARATOR for line in text)
    text.seek(0)
    lines = (line.removesuffix("\n") for line in text)
    if not is_split:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield PromptEntry(where=f"{file}:{number}", text=line)
        return
    block: list[str] = []
    for number, line in enumerate(chain(lines, [SEPARATOR]), start=1):
        if line != SEPARATOR:
            block.append(line)
            continue
        if any(part.strip() for part in block):
            yield PromptEntry(where=f"{file}:{number - len(block)}", text="\n".join(block))
        block = []


def _build_entry(row: object, where: str) -> PromptEntry:
    """Check a record in forerun's or ShareGPT's form and convert it to an entry."""
    if not isinstance(row, Mapping):
        raise InvalidRequest(f'{where} is no object with a "prompt" or "messages"')
    try:
        # Rows of a table have every column; those without a value are null.
        values = {n: v for n, v in row.items() if v is not None}
        found = msgspec.convert(values, _Row)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{where}: {explain_invalid(error, values, _Row)}") from error
    messages = tuple({"role": m.role, "content": m.content} for m in found.messages)
    texts = [text for text in (found.prompt, found.text) if text is not None]
    if not texts and not messages:
        messages = tuple(
            {"role": SHAREGPT_ROLES.get(turn.sender, turn.sender), "content": turn.value}
            for turn in found.turns
        )
    if len(texts) + bool(messages) != 1:
        several = "only " if texts else ""
        raise InvalidRequest(
            f'{where} must have {several}one of "prompt", "text" and "messages", or be a record of '
            'ShareGPT ("conversations")'
        )
    if found.token_ids and not found.prompt_ids:
        raise InvalidRequest(f'{where} has "token_ids" without the "prompt_ids" they follow')
    if messages and messages[0]["role"] == "assistant":
        raise InvalidRequest(f"{where}: the conversation begins with the assistant's answer")
    return PromptEntry(
        where=where,
        text=texts[0] if texts else None,
        messages=messages,
        response=found.response,
        tag=found.tag,
        prompt_ids=found.prompt_ids,
        token_ids=found.token_ids,
    )
