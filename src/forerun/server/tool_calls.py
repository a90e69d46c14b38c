"""Tool calls in a model's text: found while the text arrives, and enforced by a grammar.

Models write calls as JSON, with marks around it that depend on the family. Text that looks like a
call and is none (broken JSON, an unknown tool) stays text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.bounded_read import parse_json
from forerun.errors import InvalidRequest, UnreadableInput
from forerun.server.config import ToolFormatChoice

SPACES = " \t\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """The form in which a family of models writes tool calls.

    Attributes:
        begins: first character of the JSON: an object, or a list of objects.
        is_bare: whether JSON at the beginning of the answer is a call without the opening mark,
            which is a special token and so no part of the text.
        id_length: characters of a call's id that the chat template accepts.
    """

    opening: str
    closing: str = ""
    begins: str = "{"
    is_bare: bool = False
    arguments: str = "arguments"
    separators: str = SPACES
    id_length: int = 24


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "hermes": ToolFormat(opening="<tool_call>", closing="</tool_call>"),
    "mistral": ToolFormat(opening="[TOOL_CALLS]", begins="[", is_bare=True, id_length=9),
    "llama3": ToolFormat(
        opening="<|python_tag|>", is_bare=True, arguments="parameters", separators=SPACES + ";"
    ),
}
"""Formats by name: Hermes and Qwen; Mistral; Llama 3."""


def chosen_format(choice: ToolFormatChoice, template: str | None) -> ToolFormat | None:
    """Return the format of tool calls; "auto" decides by the text of the chat template."""
    if choice != "auto":
        return TOOL_FORMATS.get(choice)
    if template is None or "<function=" in template:  # calls as XML
        return None
    return next((f for f in TOOL_FORMATS.values() if f.opening in template), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a tool."""

    name: str
    arguments: str

    def to_dict(self, tool_format: ToolFormat) -> dict[str, Any]:
        """Return the call in the form of the OpenAI API, with a new id."""
        digits = uuid.uuid4().hex[: tool_format.id_length]
        return {
            "id": digits if tool_format.id_length < 24 else "call_" + digits,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""White space of enforced JSON; without it a model could repeat spaces up to its token limit."""
JSON_MARKS = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


class JsonEnd:
    """Finds the end of a JSON object or list in a text that grows."""

    def __init__(self, start: int) -> None:
        self.start = start
        self._seen = start
        self._depth = 0
        self._in_string = False

    def find(self, text: str) -> int | None:
        """Return the end of the JSON in the text, or None where more text is needed."""
        for mark in JSON_MARKS.finditer(text, self._seen):
            self._seen = mark.end()
            if mark[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and mark[0] in "{}[]":
                self._depth += 1 if mark[0] in "{[" else -1
                if self._depth <= 0:
                    return self._seen
        self._seen = len(text) - 1 if text.endswith("\\", self._seen) else len(text)
        return None


class ToolCallParser:
    """Splits the text of one answer into plain text and tool calls.

    However the text is divided into pieces, the results together are the same. Plain text is
    returned as soon as it cannot be the beginning of a call. Spaces around calls are dropped.
    """

    def __init__(self, tool_format: ToolFormat, names: Sequence[str]) -> None:
        self.format = tool_format
        self.names = frozenset(names)
        self.num_calls = 0
        self._rest = ""
        self._may_be_bare = tool_format.is_bare  # until the first text
        self._after_call = False
        self._body: JsonEnd | None = None  # of the call that `_rest` begins with
        self._mark_length = 0  # characters that are plain text if it is no call
        self._found: tuple[int, list[ToolCall]] | None = None  # the end of its JSON, and the calls

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[ToolCall]]:
        """Add a piece of text and return plain text and calls that are certain now."""
        self._rest += text
        plain, calls = "", []
        while True:
            if self._body is None:
                before, is_open = self._until_call(is_last)
                plain += before
                if not is_open:
                    break
            found = self._call(is_last)
            if found is None:
                break
            if found:
                calls += found
                self._after_call = True
            else:  # the mark was text, and what follows it may begin a call
                plain += self._refuse()
            self._body = self._found = None
        self.num_calls += len(calls)
        return plain, calls

    def _until_call(self, is_last: bool) -> tuple[str, bool]:
        """Remove and return plain text, and whether the rest begins with a possible call."""
        tool, rest = self.format, self._rest
        if self._after_call:
            rest = self._rest = rest.lstrip(tool.separators)
        if self._may_be_bare or (self._after_call and tool.is_bare):
            head = rest.lstrip(SPACES)
            begin = len(rest) - len(head)
            if tool.opening.startswith(head) and not is_last:
                return "", False
            if head.startswith(tool.begins) and not head.startswith(tool.opening):
                self._body, self._mark_length = JsonEnd(begin), begin + 1
                return "", True
        at = rest.find(tool.opening)
        if at >= 0:
            start = len(rest[:at].rstrip(SPACES))
            self._mark_length = at - start + len(tool.opening)
            self._body = JsonEnd(self._mark_length)
        else:
            start = len(rest) if is_last else len(rest) - unfinished(rest, tool.opening)
        self._rest = rest[start:]
        if start:
            self._may_be_bare = self._after_call = False
        return rest[:start], at >= 0

    def _call(self, is_last: bool) -> list[ToolCall] | None:
        """Return the calls that the rest begins with and remove them.

        Empty where they are none, and None where more text is needed.
        """
        missing: list[ToolCall] | None = [] if is_last else None
        if self._found is None:
            end = self._find_json_end()
            if end <= 0:
                return [] if end < 0 else missing
            self._found = end, self._parse(self._rest[:end])
        end, calls = self._found
        after, closing = self._rest[end:].lstrip(SPACES), self.format.closing
        if not calls or not (after.startswith(closing) or closing.startswith(after)):
            return []
        if after.startswith(closing):
            self._rest = after[len(closing) :] if closing else self._rest[end:]
        elif is_last:
            self._rest = ""  # the model ended its text, or was stopped, in the closing mark
        else:
            return None
        return calls

    def _find_json_end(self) -> int:
        """Return the end of the JSON of a call; 0 if more text is needed, -1 if it is no JSON."""
        assert self._body is not None
        head = self._rest[self._body.start :].lstrip(SPACES)
        if head and not head.startswith(self.format.begins):
            return -1
        return self._body.find(self._rest) or 0

    def _parse(self, text: str) -> list[ToolCall]:
        """Return the calls after the mark; none if one of them is no call of a known tool."""
        assert self._body is not None
        calls = []
        try:
            value = parse_json(text[self._body.start :], "the call")
            for each in value if isinstance(value, list) else [value]:
                name = each["name"]
                arguments = each.get("arguments", each.get("parameters", {}))
                if name not in self.names or not isinstance(arguments, dict):
                    return []
                written = json.dumps(arguments, allow_nan=False)
                calls.append(ToolCall(name=name, arguments=written))
        except (UnreadableInput, ValueError, TypeError, KeyError, AttributeError):
            return []
        return calls

    def _refuse(self) -> str:
        """Remove the mark of a refused call, or the first character of bare JSON; return it."""
        length = self._mark_length
        refused, self._rest = self._rest[:length], self._rest[length:]
        self._may_be_bare = self._after_call = False
        return refused


def unfinished(text: str, mark: str) -> int:
    """Return how many characters at the end may belong to a call: spaces, and part of a mark."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            break
    else:
        size = 0
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip(SPACES))


def _close(parameters: dict[str, Any]) -> dict[str, bool]:
    """Return what excludes arguments without a name in the schema, where it leaves them open."""
    composed = {"$ref", "allOf", "anyOf", "oneOf", "patternProperties"}
    is_plain = "properties" in parameters and composed.isdisjoint(parameters)
    return {"additionalProperties": False} if is_plain else {}


def forced(
    tools: Sequence[Mapping[str, Any]], tool_format: ToolFormat | None, added: Mapping[str, int]
) -> str:
    """Return a Lark grammar, for llguidance, of a text that is a call of one of the tools.

    The tools have the form of the OpenAI API; each schema becomes a rule of its own. `added` has
    the ids of the tokenizer's added tokens by their text. Raises InvalidRequest where the format is
    not known, or a tool has no name.
    """
    if tool_format is None:
        raise InvalidRequest(
            "tool_choice cannot be enforced, because the chat template has no known format of tool "
            f"calls; start the server with --tool-format {' or '.join(TOOL_FORMATS)}"
        )

    def mark(text: str) -> str:
        return f"<[{added[text]}]>" if text in added else json.dumps(text)

    rules = []
    for number, tool in enumerate(tools):
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"])}, "{tool_format.arguments}": '
        parameters = function.get("parameters") or {"type": "object"}
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"the parameters of tool {number} are no JSON schema: an object")
        schema = {"x-guidance": LAYOUT, **_close(parameters), **parameters}
        rules.append(f'call_{number}: {json.dumps(head)} arguments_{number} "}}"')
        rules.append(f"arguments_{number}: %json {json.dumps(schema)}")
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    if tool_format.closing:
        start = f'{mark(tool_format.opening)} "\\n" call "\\n" {mark(tool_format.closing)}'
    elif tool_format.begins == "[":
        start = f'{mark(tool_format.opening)} "[" call "]"'
    else:
        start = "call"
    return "\n".join([f"start: {start}", *rules])
