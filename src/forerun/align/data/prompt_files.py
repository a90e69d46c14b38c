"""Prompts and conversations as files hold them: JSON lines, Parquet, plain text, or a folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from forerun.errors import InvalidRequest

__all__ = ["SUFFIXES", "TAGGED", "Message", "PromptEntry", "read_entries"]

TAGGED = (".jsonl", ".parquet")
"""Files whose records have fields."""
SUFFIXES = (*TAGGED, ".txt")
"""Files of a folder that are read."""
SEPARATOR = "---"
FIELDS = ("prompt", "text", "messages", "response", "tag")
BATCH_ROWS = 1024

Message = Mapping[str, str]
"""With "role" and "content"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEntry:
    """One record of a file; it has either a text or messages.

    Attributes:
        where: file and line, for errors.
        text: a text to continue as it is, None for a conversation.
        messages: a conversation for the chat template.
        response: what some model or person answered, if the record brings it.
        tag: the record's own label.
    """

    where: str
    text: str | None = None
    messages: tuple[Message, ...] = ()
    response: str | None = None
    tag: str = ""


def read_entries(path: Path) -> Iterator[PromptEntry]:
    """Records of a file, or of every file of a folder in the order of their names.

    Objects of a .jsonl file and rows of a .parquet file have a "prompt" (or "text") to be continued
    as it is, or "messages" for the chat template; and perhaps a "response" and a "tag". Any other
    file is text: where some line is "---", such lines separate the prompts; otherwise every line is
    one.

    Raises:
        InvalidRequest: something cannot be read or is malformed; file and line are named.
    """
    try:
        for file in files_of(path):
            yield from entries_of(file)
    except (OSError, UnicodeError) as error:
        raise InvalidRequest(f"prompts cannot be read from {path}: {error}") from error


def files_of(path: Path) -> list[Path]:
    """The file itself, or those of a folder that may hold prompts."""
    if not path.is_dir():
        return [path]
    found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    if not found:
        raise InvalidRequest(f"the folder {path} has no {', '.join(SUFFIXES)} file")
    return found


def entries_of(file: Path) -> Iterator[PromptEntry]:
    """Records of one file."""
    if file.suffix == ".parquet":
        rows: Iterable[tuple[str, object]] = parquet_rows(file)
    elif file.suffix == ".jsonl":
        rows = json_rows(file)
    else:
        yield from texts_of(file)
        return
    for where, row in rows:
        yield entry_of(row, where)


def json_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Objects of a JSON lines file and where they stand; empty lines are skipped."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            where = f"{file}:{number}"
            try:
                yield where, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise InvalidRequest(f"{where} is no JSON: {error}") from error


def parquet_rows(file: Path) -> Iterator[tuple[str, object]]:
    """Rows of a Parquet file, their columns of interest, and where they stand."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(file) as table:
            columns = [name for name in table.schema_arrow.names if name in FIELDS]
            for batch in table.iter_batches(batch_size=BATCH_ROWS, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{file}, row {number}", row
    except pa.ArrowException as error:
        raise InvalidRequest(f"{file} is no whole Parquet file: {error}") from error


def texts_of(file: Path) -> Iterator[PromptEntry]:
    """Prompts of plain text, each with the line it begins at."""
    lines = file.read_text(encoding="utf-8").splitlines()
    if SEPARATOR not in lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield PromptEntry(where=f"{file}:{number}", text=line)
        return
    block: list[str] = []
    for number, line in enumerate((*lines, SEPARATOR), start=1):
        if line != SEPARATOR:
            block.append(line)
            continue
        if any(part.strip() for part in block):
            yield PromptEntry(where=f"{file}:{number - len(block)}", text="\n".join(block))
        block = []


def entry_of(row: object, where: str) -> PromptEntry:
    """A record, checked.

    Raises:
        InvalidRequest: it has neither or both of a prompt and messages, or a field of another type.
    """
    if not isinstance(row, Mapping):
        raise InvalidRequest(f'{where} is no object with a "prompt" or "messages"')
    # Rows of a table have every column; those without a value are null.
    fields = {name: row[name] for name in FIELDS if row.get(name) is not None}
    if sum(name in fields for name in ("prompt", "text", "messages")) != 1:
        raise InvalidRequest(f'{where} must have one of "prompt", "text" and "messages"')
    messages = fields.pop("messages", None)
    for name, value in fields.items():
        if not isinstance(value, str) or (name != "tag" and not value):
            raise InvalidRequest(f'{where}: "{name}" is {value!r:.60}; it must be text, not empty')
    return PromptEntry(
        where=where,
        text=fields.get("prompt", fields.get("text")),
        messages=() if messages is None else checked_messages(messages, where),
        response=fields.get("response"),
        tag=fields.get("tag", ""),
    )


def checked_messages(messages: object, where: str) -> tuple[Message, ...]:
    """A conversation with something to answer.

    Raises:
        InvalidRequest: it is no list of messages, or says nothing before the assistant does.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequest(f'{where}: "messages" must be a list of messages, not empty')
    checked: list[Message] = []
    for index, message in enumerate(messages):
        role, content = (
            (message.get("role"), message.get("content"))
            if isinstance(message, Mapping)
            else (None, None)
        )
        if not isinstance(role, str) or not isinstance(content, str) or not role:
            raise InvalidRequest(
                f'{where}: message {index} must have "role" and "content", both of text'
            )
        checked.append({"role": role, "content": content})
    if checked[0]["role"] == "assistant":
        raise InvalidRequest(f"{where}: the conversation begins with the assistant's answer")
    return tuple(checked)
